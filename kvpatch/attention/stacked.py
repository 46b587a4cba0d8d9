"""All layers' slots side by side, so that a decode step observes and evicts once instead of once per layer.

Between steps the layers of a uniform budget differ in their numbers only: same shapes, same limits, same newest token. A
Deck stacks their positions and score state along the batch axis, [L*B,H,C], and the layers keep views of it. In a pass
each layer then only writes its key and value and attends; the probabilities of all layers land in one buffer, and the last
layer adds them up, chooses the victims and frees their slots for all. What is computed is what decode.py computes layer
by layer; whatever a Deck does not serve (holes, roll-back, beams, a score shared by layers) goes that way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import torch_backend
from ..cache.state import TextState
from ..policies.context import Block, EvictionContext, Limits
from ..policies.selection import victim
from ..policies.statistics import STATISTICS
from .layer_call import AHEAD, Call

BUFFER = 1 << 24  # probabilities of all layers: 64 MiB; above it a step is long enough to do without


class Deck:
    """Stacked state of a cache whose layers are alike. `of` says whether there can be one."""

    def __init__(self, cache: TextState) -> None:
        layers, self.policy = cache.layers, cache.settings.policy
        first = layers[0]
        self.L, (self.B, self.H, self.C) = len(layers), first.positions.shape
        self.device, self.sliding = first.positions.device, first.sliding
        self.seed, self.score, self.parallel = cache.settings.seed, cache.settings.policy.score, cache.settings.parallel
        self.positions = torch.cat([layer.positions for layer in layers])
        self.state = {name: torch.cat([layer.state[name] for layer in layers]) for name in first.state}
        assert first.limits is not None
        self.limits: Limits = first.limits.map_rows(lambda tensor: tensor.repeat(self.L, 1, 1))
        self.keep_B11 = torch.full((self.L * self.B, 1, 1), self.C - 1, device=self.device)
        self.layer_of = torch.arange(self.L, device=self.device).repeat_interleave(self.B)
        self.begins = torch.arange(0, self.positions.numel(), self.C, device=self.device)
        for index, layer in enumerate(layers):
            own = slice(index * self.B, (index + 1) * self.B)
            layer.positions, layer.contiguous = self.positions[own], False
            layer.state = {name: tensor[own] for name, tensor in self.state.items()}
        self.ahead: tuple[int, dict[str, Tensor]] | None = None
        self.p: Tensor | None = None
        self._free(cache, torch.cat([layer.mode.free_BH for layer in layers]))

    @classmethod
    def of(cls, cache: TextState, group: int) -> Deck | None:
        """A Deck for `cache`, or None where its layers differ or do not evict one token per step."""
        first, settings = cache.layers[0], cache.settings
        score = settings.policy.score
        if score is None or not all(settings.evicts) or score.across_layers or any(settings.bounds):
            return None
        if len(cache.layers) * first.positions.numel() * group > BUFFER:
            return None
        alike = all(
            layer.positions.shape == first.positions.shape
            and layer.positions.device == first.positions.device
            and layer.sliding == first.sliding
            and layer.limits is first.limits
            and layer.mode.slotted
            and not layer.holes
            and layer.used == layer.positions.shape[2]
            for layer in cache.layers
        )
        return cls(cache) if alike else None

    def _free(self, cache: TextState, slot: Tensor) -> None:
        """Name the slots [L*B,H] that the next token goes to."""
        self.at = slot.reshape(-1) + self.begins
        local = self.at.view(self.L, -1) - torch.arange(self.L, device=self.device)[:, None] * (self.B * self.H * self.C)
        for index, (layer, free_BH) in enumerate(zip(cache.layers, slot.view(self.L, self.B, self.H), strict=True)):
            layer.mode.free_BH = free_BH
            layer.free_at = (free_BH, local[index])

    # ---- one pass ----

    def open(self, call: Call, positions_B1: Tensor) -> None:
        """First layer: every layer's new token gets its position and an empty score."""
        self.newest_B11 = positions_B1[:, None].repeat(self.L, 1, 1)
        positions = self.newest_B11.expand(-1, self.H, 1).reshape(-1)
        self.positions.view(-1).index_copy_(0, self.at, positions)
        for name in self.policy.statistics:
            self.state[name].view(-1).index_fill_(0, self.at, 0)
        assert self.score is not None
        if self.score.entry_by_position:
            for name, tensor in self._entry(call).items():
                self.state[name].flatten(0, 2).index_copy_(0, self.at, tensor.flatten(0, 1))

    def _entry(self, call: Call) -> dict[str, Tensor]:
        """What the score notes about the new token [L*B,H,G], computed for AHEAD coming ones at once."""
        assert self.score is not None
        seen = call.slots.seen
        if self.ahead is None or not 0 <= seen - self.ahead[0] < AHEAD:
            coming = self.newest_B11[:, 0] + torch.arange(AHEAD, device=self.device)
            shape = (self.L * self.B, self.H, AHEAD, 1)
            like = torch.empty(1, device=self.device).expand(shape)
            first = self.parallel.first(self.H)
            self.ahead = (seen, self.score.entry(like, coming, call.group, self.layer_of, self.seed, first))
        at = seen - self.ahead[0]
        return {name: tensor[:, :, at] for name, tensor in self.ahead[1].items()}

    def attend(self, call: Call, q_BHGD: Tensor, k_BH1D: Tensor, v_BH1D: Tensor) -> Tensor:
        """A decode step of one layer, [B,H,G,D]; the last layer's also evicts for all."""
        slots, layer, policy = call.slots, call.layer, self.policy
        assert self.score is not None
        with torch.no_grad():
            if layer == 0:
                self.open(call, call.positions_BQ)
            slots.write_kv(k_BH1D, v_BH1D)
            if not self.score.entry_by_position:
                slots.write_entry(call.entry(k_BH1D, v_BH1D, call.positions_BQ, None))
            else:
                slots.write_entry(call.selection_entry(v_BH1D))
        slots.seen += 1
        wanted = policy.rows != "none"
        q_BHG1D, keys = call.renumber(q_BHGD[:, :, :, None], call.keys(slots.used), call.positions_BQ)
        q_BHGD, newest_B11 = q_BHG1D[:, :, :, 0], call.positions_BQ[:, None]
        out, p_BHGT = torch_backend.step(q_BHGD, keys, newest_B11, call.geometry, wanted, self._buffer(call, q_BHGD))
        if layer == self.L - 1:
            with torch.no_grad():
                self._close(call)
        return out

    def _buffer(self, call: Call, q_BHGD: Tensor) -> Tensor | None:
        """Where this layer's probabilities go, [B,H,G,C]."""
        if self.policy.rows == "none":
            return None
        if self.p is None:
            dtype = torch.promote_types(q_BHGD.dtype, torch.float32)
            self.p = torch.empty(self.L * self.B, self.H, call.group, self.C, dtype=dtype, device=self.device)
        return self.p[call.layer * self.B : (call.layer + 1) * self.B]

    def _close(self, call: Call) -> None:
        """Last layer: observe, choose the victims and free their slots, for all layers."""
        assert self.score is not None
        if self.p is not None:
            self._observe(call)
        context = EvictionContext(
            layer=self.layer_of[:, None, None],
            seed=self.seed,
            positions_BHT=self.positions,
            newest_B11=self.newest_B11,
            recent_B11=self.newest_B11 - self.limits.newest,
            state=self.state,
            limits=self.limits,
            group=call.group,
            sliding=self.sliding,
            empty=False,
            aligned=self.policy.aligned,
            parallel=self.parallel,
            keep_BH1=self.keep_B11,
            norms=lambda known, out: self.state["norm"],
        )
        self._free(call.cache, victim(self.policy.eviction_keys(context, None), None))
        self.positions.view(-1).index_fill_(0, self.at, -1)

    def _observe(self, call: Call) -> None:
        assert self.score is not None and self.p is not None
        if self.score.observed_rows:
            self.state["tail"].copy_(self.p.mean(2))
        if not self.policy.statistics:
            return
        N = self.L * self.B * self.H
        noise = self.state.get("noise")

        def place() -> tuple[Tensor, Tensor, Tensor]:
            first = self.parallel.first(self.H) * call.group
            head_HG = (first + torch.arange(self.H * call.group, device=self.device)).view(self.H, -1)
            row_N1 = self.newest_B11.expand(-1, self.H, 1).reshape(N, 1)
            return head_HG.repeat(self.L * self.B, 1), row_N1, self.positions.view(N, -1)

        tau = call.cache.temperature(1)
        if isinstance(tau, Tensor) and tau.ndim:
            tau = tau.to(self.device).repeat(self.L).repeat_interleave(self.H)[:, None, None, None]
        block = Block(
            self.p.view(N, call.group, 1, self.C),
            keys_NR=self._visible_count().view(N, 1) if "count" in self.policy.statistics else None,
            noise_NMG=None if noise is None else noise.flatten(0, 1),
            place=place,
            tau=tau,
            layer=self.layer_of.repeat_interleave(self.H)[:, None, None, None],
            seed=self.seed,
        )
        for name in self.policy.statistics:
            total = self.state[name]
            if name in self.score.statistics and self.score.decay != 1.0:
                total.mul_(self.score.decay)
            total.add_(STATISTICS[name](block, self.score).view_as(total))

    def _visible_count(self) -> Tensor:
        if self.sliding is None:
            return torch.full((self.L * self.B, self.H), self.C, device=self.device)
        return (self.newest_B11 - self.positions < self.sliding).sum(-1)
