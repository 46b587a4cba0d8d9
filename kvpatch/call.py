"""One call of one layer: the names that its prompt and its decode steps share, and the score state they add to."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends.torch_backend import Geometry, Keys, Rows
from .cache import EvictingCache, Forward
from .policies.scores import STATISTICS, Block, Moment
from .slots import SlotLayer

AHEAD = 64  # decode steps


class Call:
    """A forward pass (`now`) reaching one layer of a cache. score is None where the layer never evicts."""

    def __init__(self, cache: EvictingCache, layer: int, geometry: Geometry, group: int, device: torch.device) -> None:
        assert cache.now is not None, "EvictingCache.begin() runs in the decoder's pre-hook"
        self.cache, self.layer, self.geometry, self.group = cache, layer, geometry, group
        self.now: Forward = cache.now
        self.slots: SlotLayer = cache.layers[layer]
        self.policy = cache.policy
        self.score = cache.policy.score if cache.acting[layer] else None
        self.positions_BQ = self.now.on(device)

    def entry(self, k_BHQD: Tensor, positions_BQ: Tensor, protect_BQ: Tensor | None) -> dict[str, Tensor]:
        """What the score (and `protect=`) notes about tokens when they enter."""
        if self.score is None:
            return {}
        entry = self.score.entry(k_BHQD, positions_BQ, self.group, self.layer, self.cache.seed)
        if protect_BQ is not None:
            own = protect_BQ[:, None, : positions_BQ.shape[1]].to(k_BHQD.device)
            entry["protect"] = own.expand(k_BHQD.shape[:3]).contiguous()
        return entry

    def step_entry(self, k_BH1D: Tensor, positions_B1: Tensor) -> dict[str, Tensor]:
        """`entry` of one decoded token; what depends on positions alone is computed for AHEAD of them at once."""
        if self.score is None or not self.score.entry_by_position:
            return self.entry(k_BH1D, positions_B1, None)
        slots = self.slots
        if slots.ahead is None or not 0 <= slots.seen - slots.ahead[0] < AHEAD:
            coming = positions_B1 + torch.arange(AHEAD, device=positions_B1.device)
            slots.ahead = (slots.seen, self.entry(k_BH1D.expand(-1, -1, AHEAD, -1), coming, None))
        at = slots.seen - slots.ahead[0]
        return {name: tensor[:, :, at : at + 1] for name, tensor in slots.ahead[1].items()}

    def keys(self, past: int) -> Keys:
        """The used slots, as a backend takes them."""
        slots = self.slots
        keys, values, positions = slots.view()
        return Keys(keys, values, positions, holes=slots.holes, past=past, ordered=slots.contiguous)

    def moment(self, newest_B11: Tensor, t: int) -> Moment:
        """What scores and scopes are read from. t: column of the pass, for what all layers share."""
        slots, score = self.slots, self.score
        assert slots.limits is not None and score is not None
        _, _, positions = slots.view()
        state = slots.state_view()
        if score.across_layers:
            assert self.cache.shared is not None
            state = {**state, score.statistics[0]: self.cache.shared.gather(-1, positions + 1)}
        recent_B11 = self.now.recent.get((id(slots.limits), t))
        if recent_B11 is None:
            recent_B11 = self.now.recent[id(slots.limits), t] = newest_B11 - slots.limits.newest
        return Moment(
            layer=self.layer,
            seed=self.cache.seed,
            positions_BHS=positions,
            newest_B11=newest_B11,
            recent_B11=recent_B11,
            state=state,
            limits=slots.limits,
            group=self.group,
            sliding=self.geometry.sliding,
            empty=slots.holes,
        )

    def sums(self, rows: Rows, rows_BQ: Tensor, tau: float) -> dict[str, Tensor]:
        """The policy's statistics [N,M] of some rows' probabilities; rows_BQ are the positions of all rows."""
        assert self.score is not None
        slots, heads, columns = self.slots, slice(rows.n0, rows.n1), slice(rows.lo, rows.hi)
        noise = slots.state.get("noise")

        def place() -> tuple[Tensor, Tensor, Tensor]:
            H = slots.positions.shape[1]
            n = torch.arange(rows.n0, rows.n1, device=rows_BQ.device)
            head_NG = (n % H)[:, None] * self.group + torch.arange(self.group, device=rows_BQ.device)
            row_NR = rows_BQ[:, None, rows.start : rows.stop].expand(-1, H, -1).flatten(0, 1)[heads]
            return head_NG, row_NR, slots.positions.flatten(0, 1)[heads, columns]

        block = Block(
            rows.p_NGRM,
            keys_NR=rows.keys_NR,
            noise_NMG=None if noise is None else noise.flatten(0, 1)[heads, columns],
            place=place,
            tau=tau,
            layer=self.layer,
            seed=self.cache.seed,
        )
        return {name: STATISTICS[name](block, self.score) for name in self.policy.statistics}

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add increments [B,H,T] to the state; a score's own sums are damped first."""
        assert self.score is not None
        slots = self.slots
        for name, increment in sums.items():
            own = name in self.score.statistics
            if own and self.score.across_layers:
                self._add_shared(increment, slots.view()[2])
                continue
            total = slots.statistic(name)
            if total.shape[2] != increment.shape[2]:
                total = total[:, :, : increment.shape[2]]
            if own and self.score.decay != 1.0:
                total.mul_(self.score.decay)
            total.add_(increment)

    def _add_shared(self, increment: Tensor, positions: Tensor) -> None:
        """One running sum for all layers, by original position: a token may be gone here and held elsewhere."""
        assert self.score is not None
        cache = self.cache
        B, H, _ = positions.shape
        needed = self.slots.seen + 1
        if cache.shared is None:
            cache.shared = increment.new_zeros(B, H, needed)
        if cache.shared.shape[-1] < needed:
            more = increment.new_zeros(B, H, needed + needed // 4 + 64 - cache.shared.shape[-1])
            cache.shared = torch.cat([cache.shared, more], -1)
        index = positions + 1  # column 0 is the empty slots'
        total = cache.shared.gather(-1, index) * self.score.decay + increment
        cache.shared.scatter_(-1, index, total)
