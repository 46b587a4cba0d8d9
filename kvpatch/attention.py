"""The one core that every architecture shares: write, attend, observe, evict."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from .backends import torch_backend as backend
from .backends.torch_backend import Geometry, Keys, Rows
from .cache import EvictingCache, Forward
from .policies.scores import STATISTICS, Block, Limits, Moment, accumulator
from .policies.selection import top, victim
from .slots import SlotLayer


def attend(cache: EvictingCache, layer: int, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """Attention of new tokens through the cache; evicts what the policy says.

    q [B,H*G,Q,D], k and v [B,H,Q,D] with positions applied -> [B,Q,H*G*D]. The leading columns that belong to the
    prompt are attended as one; the others one after another, each as a decode step.
    """
    now = cache.now
    assert now is not None, "EvictingCache.begin() runs in the decoder's pre-hook"
    slots: SlotLayer = cache.layers[layer]
    dtype = slots.dtype if slots.is_initialized else v.dtype  # autocast may mix dtypes: the cache's is decided once
    q_BHGQD = rearrange(q, "b (h g) q d -> b h g q d", h=k.shape[1]).to(dtype)
    k, v = k.to(dtype), v.to(dtype)
    call = _Attention(cache, layer, geometry, now, q_BHGQD.shape[2], now.positions_BQ.to(q.device))
    outs = []
    if now.prompt:
        P = now.prompt
        outs.append(call.prompt(q_BHGQD[:, :, :, :P], k[:, :, :P], v[:, :, :P]))
    for t in range(now.prompt, q.shape[2]):
        at = slice(t, t + 1)
        outs.append(call.step(q_BHGQD[:, :, :, t], k[:, :, at], v[:, :, at], t)[:, :, :, None])
    cache.end(layer)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 3)
    return rearrange(out, "b h g q d -> b q (h g d)")


class _Attention:
    """One call of one layer: the names that its steps share."""

    def __init__(
        self, cache: EvictingCache, layer: int, geometry: Geometry, now: Forward, group: int, positions_BQ: Tensor
    ) -> None:
        self.cache, self.layer, self.geometry, self.now, self.group = cache, layer, geometry, now, group
        self.slots: SlotLayer = cache.layers[layer]
        self.policy = cache.policy
        self.score = cache.policy.score if cache.acting[layer] else None
        self.positions_BQ = positions_BQ  # of this pass, on this layer's device

    # ---- prompt ----

    def prompt(self, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
        slots, now = self.slots, self.now
        rows_BQ = self.positions_BQ[:, : now.prompt]
        past = slots.used
        if slots.free_BH is not None:  # a new prompt is appended; its end makes slots again
            slots.free_BH, slots.holes = None, True
        with torch.no_grad():
            entry = self._entry(k_BHQD, rows_BQ, now.protect_BQ)
            whole = past == 0 and now.ends_prompt
            (slots.adopt if whole else slots.append)(k_BHQD, v_BHQD, rows_BQ, entry)
        slots.holes |= now.padded
        slots.seen += now.prompt
        keys = self._keys(past)
        if torch.is_grad_enabled() and k_BHQD.requires_grad:  # the cache's own copies are detached
            keys.k_BHTD = torch.cat([keys.k_BHTD[:, :, :past], k_BHQD], 2)
            keys.v_BHTD = torch.cat([keys.v_BHTD[:, :, :past], v_BHQD], 2)
        if now.ends_prompt and self.score is not None:
            self._limit()
        if self.score is None or self.policy.rows != "all":
            out = backend.prompt(q_BHGQD, keys, rows_BQ, self.geometry)
        else:
            out = self._observed_prompt(q_BHGQD, keys, rows_BQ)
        with torch.no_grad():
            if self.score is not None and self.score.tail:
                self._observe_tail(q_BHGQD, keys, rows_BQ)
            if now.ends_prompt:
                self._end_prompt(past)
        return out

    def _observed_prompt(self, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> Tensor:
        """Attention, and the statistics of all its rows added to the state."""
        assert self.score is not None
        B, H, G, _, _ = q_BHGQD.shape
        T, dtype = keys.k_BHTD.shape[2], accumulator(q_BHGQD.dtype)
        sums = {name: torch.zeros(B * H, T, dtype=dtype, device=q_BHGQD.device) for name in self.policy.statistics}
        score, tau = self.score, self.score.temperature(0, self.cache.new_tokens)

        def observe(rows: Rows) -> None:
            block = self._block(rows, rows_BQ, tau)
            for name, total in sums.items():
                total[rows.n0 : rows.n1, rows.lo : rows.hi] += STATISTICS[name](block, score)

        out = backend.prompt(q_BHGQD, keys, rows_BQ, self.geometry, observe, count="count" in sums)
        with torch.no_grad():
            self._add({name: total.view(B, H, T) for name, total in sums.items()})
        return out

    def _observe_tail(self, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> None:
        """The prompt's last rows: kept until the prompt ends, then their mean attention becomes the state "tail"."""
        assert self.score is not None
        slots, rows_BW = self.slots, rows_BQ
        if slots.tail_rows is not None:
            q_BHGQD = torch.cat([slots.tail_rows[0], q_BHGQD], 3)
            rows_BW = torch.cat([slots.tail_rows[1], rows_BQ], 1)
        width = min(self.score.tail, rows_BW.shape[1])
        # the newest rows of each text, wherever its padding lies
        index_BW = rows_BW.topk(width, dim=1).indices.sort(1).values
        rows_BW = rows_BW.gather(1, index_BW)
        b = torch.arange(len(rows_BW), device=rows_BW.device)[:, None]
        q_BHGWD = rearrange(q_BHGQD.detach(), "b h g q d -> b q h g d")[b, index_BW]
        q_BHGWD = rearrange(q_BHGWD, "b w h g d -> b h g w d")
        if not self.now.ends_prompt:
            slots.tail_rows = (q_BHGWD, rows_BW)
            return
        slots.tail_rows = None
        assert slots.limits is not None
        p_BHGWT = backend.tail(q_BHGWD, keys, rows_BW, self.geometry)
        tail = slots.limits.tail
        counts = (rows_BW > self._newest()[:, 0] - tail[:, 0])[:, None, None, :, None]
        slots.statistic("tail")[:, :, : slots.used] = (p_BHGWT * counts).sum(3).mean(2) / tail.clamp(min=1)

    def _end_prompt(self, past: int) -> None:
        """Keep each row's budget, in buffers of their final size."""
        slots, cache = self.slots, self.cache
        if self.score is None:
            slots.settle(None, None, slots.used + (cache.new_tokens or slots.used // 4 + 64))
            return
        budgets, held_B = self._budgets(), self.now.n_B
        if past:
            held_B = (slots.positions[:, 0, : slots.used] >= 0).sum(-1).tolist()
        room = [b - n for b, n in zip(budgets, held_B, strict=True)]
        slots.evicting = self.policy.schedule != "prompt"
        index = kept = None
        if slots.holes or min(room) < 0:
            empty = slots.positions[:, :, : slots.used] < 0
            order = self.policy.order(self._moment(), empty)
            index, kept = top(order, [min(b, n) for b, n in zip(budgets, held_B, strict=True)])
        slots.holes = kept is not None
        slots.filling = max(0, *room) if slots.evicting else 0
        held = min(max(budgets), max(held_B))
        if not slots.evicting:
            slots.settle(index, kept, held + (cache.new_tokens or held // 4 + 64))
            slots.state.pop("tail", None)
        elif slots.holes or not slots.filling:
            slots.settle(index, kept, max(budgets) + 1)
            slots.used = max(budgets) + 1
            slots.free_BH = slots.positions.argmin(-1)
        else:
            slots.settle(index, kept, min(max(budgets) + 1, held + held // 4 + 64))

    def _limit(self) -> None:
        """Protected sizes of each row, clamped inside its budget."""
        assert self.score is not None
        cache, slots, now = self.cache, self.slots, self.now
        B, device = len(now.n_B), slots.positions.device
        budgets = tuple(cache.budget.tokens(self.layer, n) for n in now.n_B)
        own: list[list[int]] = [[] for _ in range(B)]
        if "protect" in slots.state:
            marked = slots.positions[:, 0, : slots.used].masked_fill(~slots.state["protect"][:, 0, : slots.used], -1)
            own = [sorted(p for p in row if p >= 0) for row in marked.tolist()]
        keep_prompt = self.policy.schedule == "decode"
        sizes = tuple(
            self.policy.scope.limits(b, n, mine, self.score, keep_prompt)
            for b, n, mine in zip(budgets, now.n_B, own, strict=True)
        )
        if (sizes, device) not in cache.limits_of:  # layers of one budget and device share them
            cache.limits_of[sizes, device] = Limits.of(sizes, device)
        slots.limits = cache.limits_of[sizes, device]
        slots.budget_B11 = torch.tensor(self._budgets(), device=device)[:, None, None]

    def _budgets(self) -> list[int]:
        """Tokens that each row may hold: its budget, and its prompt where only generated tokens count."""
        keep = self.policy.schedule == "decode"
        return [self.cache.budget.tokens(self.layer, n) + (n if keep else 0) for n in self.now.n_B]

    # ---- decode ----

    def step(self, q_BHGD: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, t: int) -> Tensor:
        slots, now = self.slots, self.now
        positions_B1 = self.positions_BQ[:, t : t + 1]
        newest_B11 = positions_B1[:, None]
        with torch.no_grad():
            if now.recording:
                slots.note(self.cache.shared)
            slots.write(k_BH1D, v_BH1D, positions_B1, self._entry(k_BH1D, positions_B1, None))
        slots.seen += 1
        keys = self._keys(slots.used)
        scoring = self.score is not None and slots.evicting
        wanted = scoring and self.policy.rows != "none"
        out, p_BHGT = backend.step(q_BHGD, keys, newest_B11, self.geometry, wanted)
        if scoring:
            with torch.no_grad():
                if p_BHGT is not None:
                    self._observe_step(p_BHGT, keys, newest_B11, t)
                self._evict(newest_B11, t)
        return out

    def _observe_step(self, p_BHGT: Tensor, keys: Keys, newest_B11: Tensor, t: int) -> None:
        assert self.score is not None
        B, H, _, T = p_BHGT.shape
        if self.score.tail:
            self.slots.statistic("tail")[:, :, :T] = p_BHGT.mean(2)
        if not self.policy.statistics:
            return
        seen = self._visible_count(keys, newest_B11) if "count" in self.policy.statistics else None
        rows = Rows(0, B * H, 0, 1, 0, T, p_BHGT.flatten(0, 1)[:, :, None], seen)
        since_prompt = self.now.first_step + t - self.now.prompt + 1
        tau = self.score.temperature(since_prompt, self.cache.new_tokens)
        block = self._block(rows, newest_B11[:, 0], tau)
        sums = {name: STATISTICS[name](block, self.score).view(B, H, T) for name in self.policy.statistics}
        self._add(sums)

    def _visible_count(self, keys: Keys, newest_B11: Tensor) -> Tensor:
        """Keys that the new token attends to, [N,1]."""
        visible = keys.positions_BHT >= 0
        if self.geometry.sliding is not None:
            visible = visible & (newest_B11 - keys.positions_BHT < self.geometry.sliding)
        return visible.sum(-1).reshape(-1, 1)

    def _evict(self, newest_B11: Tensor, t: int) -> None:
        """Name the slot of each head that the next token goes to."""
        slots = self.slots
        if slots.filling and not slots.holes:
            slots.filling -= 1
            return
        positions = slots.positions[:, :, : slots.used]
        empty = positions < 0 if slots.holes else None
        lowest = victim(self.policy.order(self._moment(newest_B11, t), None), empty)
        if not slots.holes:
            slots.free(lowest)
            return
        # rows with room left evict nothing; any empty slot is as good as another
        over = (positions >= 0).sum(-1) > slots.budget_B11[:, :, 0]  # type: ignore[index]
        at = lowest[..., None]
        slots.positions.scatter_(2, at, torch.where(over[..., None], -1, slots.positions.gather(2, at)))
        slots.free_BH = slots.positions.argmin(-1)
        slots.filling = max(slots.filling - 1, 0)

    # ---- shared ----

    def _entry(self, k_BHQD: Tensor, positions_BQ: Tensor, protect_BQ: Tensor | None) -> dict[str, Tensor]:
        if self.score is None:
            return {}
        entry = self.score.entry(k_BHQD, positions_BQ, self.group, self.layer, self.cache.seed)
        if protect_BQ is not None:
            own = protect_BQ[:, None, : positions_BQ.shape[1]].to(k_BHQD.device)
            entry["protect"] = own.expand(k_BHQD.shape[:3]).contiguous()
        return entry

    def _keys(self, past: int) -> Keys:
        slots, T = self.slots, self.slots.used
        assert slots.keys is not None and slots.values is not None
        return Keys(
            slots.keys[:, :, :T],
            slots.values[:, :, :T],
            slots.positions[:, :, :T],
            holes=slots.holes,
            past=past,
            ordered=slots.contiguous,
        )

    def _newest(self) -> Tensor:
        """Position of the newest token of each row at the end of a prompt, [B,1,1]."""
        return torch.tensor(self.now.n_B, device=self.slots.positions.device)[:, None, None] - 1

    def _moment(self, newest_B11: Tensor | None = None, t: int = -1) -> Moment:
        slots, T = self.slots, self.slots.used
        assert slots.limits is not None
        positions = slots.positions[:, :, :T]
        state = {name: tensor[:, :, :T] for name, tensor in slots.state.items()}
        if self.score is not None and self.score.across_layers:
            assert self.cache.shared is not None
            state[self.score.statistics[0]] = self.cache.shared.gather(-1, positions + 1)
        newest_B11 = self._newest() if newest_B11 is None else newest_B11
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
        )

    def _block(self, rows: Rows, rows_BQ: Tensor, tau: float) -> Block:
        slots, heads, columns = self.slots, slice(rows.n0, rows.n1), slice(rows.lo, rows.hi)
        noise = slots.state.get("noise")

        def place() -> tuple[Tensor, Tensor, Tensor]:
            H = slots.positions.shape[1]
            n = torch.arange(rows.n0, rows.n1, device=rows_BQ.device)
            head_NG = (n % H)[:, None] * self.group + torch.arange(self.group, device=rows_BQ.device)
            row_NR = rows_BQ[:, None, rows.start : rows.stop].expand(-1, H, -1).flatten(0, 1)[heads]
            return head_NG, row_NR, slots.positions.flatten(0, 1)[heads, columns]

        return Block(
            rows.p_NGRM,
            keys_NR=rows.keys_NR,
            noise_NMG=None if noise is None else noise.flatten(0, 1)[heads, columns],
            place=place,
            tau=tau,
            layer=self.layer,
            seed=self.cache.seed,
        )

    def _add(self, sums: dict[str, Tensor]) -> None:
        """Add increments [B,H,T] to the state; a score's own sums are damped first."""
        assert self.score is not None
        slots = self.slots
        for name, increment in sums.items():
            T = increment.shape[-1]
            decay = self.score.decay if name in self.score.statistics else 1.0
            if self.score.across_layers and name in self.score.statistics:
                self._add_shared(increment, slots.positions[:, :, :T], decay)
                continue
            total = slots.statistic(name)[:, :, :T]
            (total if decay == 1.0 else total.mul_(decay)).add_(increment)

    def _add_shared(self, increment: Tensor, positions: Tensor, decay: float) -> None:
        """One running sum for all layers, by original position: a token may be gone here and held elsewhere."""
        cache = self.cache
        B, H, _ = positions.shape
        needed = self.slots.seen + 1
        if cache.shared is None:
            cache.shared = increment.new_zeros(B, H, needed)
        if cache.shared.shape[-1] < needed:
            more = increment.new_zeros(B, H, needed + needed // 4 + 64 - cache.shared.shape[-1])
            cache.shared = torch.cat([cache.shared, more], -1)
        index = positions + 1  # column 0 is the empty slots'
        cache.shared.scatter_(-1, index, cache.shared.gather(-1, index) * decay + increment)
