"""Whether the numbers of a loaded cache are a state that decoding can have left: what slots hold, and every counter."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import EvictingCache
from .header import InvalidError
from .slots import SlotLayer


def check(cache: EvictingCache) -> None:
    """Raise InvalidError where the cache contradicts itself, its policy or its budget."""
    seen_B, seen = cache.seen_B, cache.layers[0].seen
    assert seen_B is not None
    _must(all(layer.seen == seen for layer in cache.layers), "its layers have seen different numbers of tokens")
    most, least = int(seen_B.max()), int(seen_B.min())
    whole = cache.padded or (most == seen and (cache.joined or least == seen))
    _must(0 < least and most <= seen and whole, f"{seen} columns were seen, and {least} to {most} tokens of its rows")
    _must(cache.steps <= seen, f"{cache.steps} steps of {seen} tokens")
    if cache.gaps_B is not None:
        _must(bool(((cache.gaps_B >= 0) & (cache.gaps_B <= seen_B)).all()), "gaps_B is no number of columns")
    if cache.lag_B is not None:
        _must(bool(((cache.lag_B >= 0) & (cache.lag_B <= cache.steps)).all()), "lag_B is no number of steps")
    if cache.shared is not None:
        grows = cache.policy.schedule != "prompt"  # it does when it is added to, which decode steps then do not
        _must(cache.shared.shape[-1] > seen or not grows, f"shared has room for {cache.shared.shape[-1]} of {seen + 1} tokens")
        _weights("shared", cache.shared)
    for index, layer in enumerate(cache.layers):
        _Slots(cache, index, layer, seen_B.to(layer.device)).check()


class _Slots:
    """One layer's slots. limit: those of each head [B,H] that may be in use."""

    def __init__(self, cache: EvictingCache, index: int, layer: SlotLayer, seen_B: Tensor) -> None:
        self.cache, self.index, self.layer, self.where = cache, index, layer, f"layer {index}"
        self.seen_B11 = seen_B[:, None, None]
        self.real = layer.positions >= 0
        self.held_BH = self.real.sum(-1)
        self.column = torch.arange(layer.positions.shape[2], device=layer.device)
        if layer.extents is None:
            self.limit_BH = torch.full_like(self.held_BH, layer.used)
        elif layer.evicting:
            self.limit_BH = torch.tensor(layer.extents.filled, device=layer.device).view_as(self.held_BH)
        else:
            self.limit_BH = layer.extents.capacity_N.view_as(self.held_BH)

    def check(self) -> None:
        cache, layer = self.cache, self.layer
        p = layer.positions
        self.must((p >= -1) & (p < self.seen_B11), "positions are not those of tokens that were seen")
        ordered = p.sort(-1).values
        self.must((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0), "a head holds a token twice")
        self.must(~self.real | (self.column < self.limit_BH[..., None]), "tokens lie behind the slots in use")
        shares = cache.policies[self.index].over_heads is not None
        self.must(self.held_BH >= (0 if shares else 1), "a head holds nothing")  # of one budget a head may get none
        if layer.contiguous:
            rank = self.real.long().cumsum(-1) + p.masked_fill(~self.real, torch.iinfo(p.dtype).max).amin(-1, keepdim=True) - 1
            self.must((p == rank) | ~self.real, "tokens are not in text order")
            self.must(layer.free_BH is None, "slots that are written to are not in text order")
        if layer.evicting:
            self._keeps()
        else:
            self.must(layer.filling == 0, f"filling is {layer.filling} where nothing is evicted")
        if layer.free_BH is None:
            self._appended()
        elif layer.evicting:
            self._evicting(layer.free_BH)
        else:
            self._growing(layer.free_BH)
        self._numbers()

    def must(self, condition: object, words: str) -> None:
        _must(bool(condition.all()) if isinstance(condition, Tensor) else condition, f"{self.where}: {words}")

    def _keeps(self) -> None:
        """The budget of each head is one that the policy can have given."""
        cache, layer = self.cache, self.layer
        assert layer.keep_BH1 is not None and layer.limits is not None
        keep_BH, policy = layer.keep_BH1[..., 0], cache.policies[self.index]
        heads, bound = keep_BH.shape[1], cache.bounds[self.index]
        budgets = [bound or cache.budget.tokens(self.index, n) for n in self.seen_B11.flatten().tolist()]
        most_B = torch.tensor(budgets, device=layer.device) * (1 if policy.over_layers is None else 2)
        most_B = most_B + layer.limits.prompt.flatten()
        self.must(layer.limits.prompt <= self.seen_B11, "limits are of a longer text")
        shared = policy.over_heads is not None
        given_BH = keep_BH.sum(-1, keepdim=True) if shared else keep_BH
        least = 0 if shared else 1
        within = (keep_BH >= least) & (keep_BH <= most_B[:, None] * heads * cache.parallel.size)
        self.must(within, "keep_BH1 is over the budget")
        self.must(given_BH <= most_B[:, None] * (heads * cache.parallel.size if shared else 1), "keep_BH1 is over the budget")
        self.must(self.held_BH <= keep_BH, "a head holds more than its budget")

    def _appended(self) -> None:
        """Tokens are appended behind the used columns."""
        layer, real = self.layer, self.real
        self.must(layer.slack == layer.grown == 0, "slack without free slots")
        self.must(layer.holes or (self.held_BH == layer.used), "slots are empty that should not be")
        later = real.long().flip(-1).cumsum(-1).flip(-1)  # the newest tokens, so that they can be rolled back
        newest = (layer.positions == self.seen_B11 - later) | ~real | (self.column < layer.floor)
        self.must(newest, "what was appended is not the newest")
        if layer.evicting:
            assert layer.keep_BH1 is not None
            self.must(not layer.holes and (layer.keep_BH1 == layer.used + layer.filling), "filling does not lead to the budget")

    def _evicting(self, free_BH: Tensor) -> None:
        """One slot of each head is free for the next token."""
        layer = self.layer
        assert layer.keep_BH1 is not None
        keep_BH = layer.keep_BH1[..., 0]
        self.must(layer.slack == layer.grown == 0, "slack where tokens are evicted")
        self.must((free_BH >= 0) & (free_BH < self.limit_BH), "free_BH names no slot")
        self.must(layer.positions.gather(-1, free_BH.clamp(0, len(self.column) - 1)[..., None]) < 0, "a free slot is taken")
        if layer.holes:
            self.must(layer.used == len(self.column), "unused columns between slots")
            self.must(keep_BH < self.limit_BH, "a head has no slot for its budget")
            self.must(int((keep_BH - self.held_BH).max()) <= layer.filling <= int(keep_BH.max()), "filling is wrong")
        else:
            self.must(layer.filling == 0 and (self.held_BH == layer.used - 1), "slots are empty that should not be")

    def _growing(self, free_BH: Tensor) -> None:
        """Free slots behind what each head holds, for tokens that evict nothing."""
        layer = self.layer
        self.must(layer.holes and layer.used == len(self.column), "unused columns between slots")
        self.must(layer.grown <= layer.slack, f"{layer.grown} of {layer.slack} free slots are taken")
        self.must(self.limit_BH - free_BH >= layer.slack - layer.grown, "fewer slots are free than it says")
        if layer.extents is None:
            self.must(free_BH == layer.taken, "free_BH is not behind what was taken")
        else:
            filled = torch.tensor(layer.extents.filled, device=layer.device).view_as(free_BH)
            self.must(free_BH == filled + layer.grown, "free_BH is not behind what was taken")
        behind = free_BH[..., None] - self.column  # 1 at the newest
        self.must(~self.real | (behind > 0), "a free slot is taken")
        recent = (behind > 0) & (behind <= layer.grown)
        self.must(~recent | (layer.positions == self.seen_B11 - behind), "what was appended is not the newest")

    def _numbers(self) -> None:
        """No number of a token that is held is infinite or none, and no weight is negative."""
        layer = self.layer
        real = self.real
        if layer.extents is not None:
            head, column = layer.extents.places()
            real = real.flatten(0, 1)[head, column]
        for name in ("keys", "values"):
            self.must(getattr(layer, name).isfinite().all(-1) | ~real, f"{name} are not finite")
        policy = self.cache.policies[self.index]
        known = () if policy.score is None else (*policy.statistics, "tail", "norm", "noise")
        for name, tensor in layer.state.items():
            own = tensor[self.real]
            (_weights if name in known else _finite)(f"{self.where}: {name}", own)
        if layer.mass_BH is not None:
            _weights(f"{self.where}: mass_BH", layer.mass_BH)


def _finite(name: str, tensor: Tensor) -> None:
    _must(tensor.dtype == torch.bool or bool(tensor.isfinite().all()), f"{name} holds a number that is not finite")


def _weights(name: str, tensor: Tensor) -> None:
    _must(bool((tensor.isfinite() & (tensor >= 0)).all()), f"{name} holds a number that is not finite or is negative")


def _must(condition: object, words: str) -> None:
    if not condition:
        raise InvalidError(words)
