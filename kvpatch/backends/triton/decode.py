"""One decode step over slots in two launches: write the new token, attend, observe, and choose a victim.

`split_kernel` has one program per KV head and segment of its slots: an online softmax over the segment, for all query heads
of the group at once, so that each key and value is read once. `combine_kernel` has one program per KV head: it merges the
segments, adds to the statistics and finds the slot with the lowest eviction key of policies/selection.py. Logits pass between
them through a scratch buffer [B*H,G,C] and are in base 2 throughout. Nothing waits for the host, no size depends on data and
there are no atomics: a step can be captured in a CUDA graph and gives the same bits whenever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import KVPatchError
from ...policies import selection

STATISTICS = ("sum", "squares", "count", "gumbel", "observed")
VALUES = ("sum", "mean", "count", "gumbel", "observed", "recency")
MAX_HEAD, MAX_GROUP = 256, 64
PROGRAMS = 264  # two for each of an H100's or H200's 132 multiprocessors
SHORTEST = 128  # slots of a segment: with fewer, merging costs more than it saves
TILE = 1 << 14  # bytes of one tile of keys or values in shared memory
CELLS = 1 << 11  # probabilities that a combining program holds at a time

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LAST: tl.constexpr = tl.constexpr(selection.LAST)
TIER: tl.constexpr = tl.constexpr(1 << 62)
NOWHERE: tl.constexpr = tl.constexpr((1 << 31) - 1)


@dataclass(frozen=True)
class Rule:
    """Statistics that a step updates, and the rule of its eviction.

    statistics: of STATISTICS; "observed" is overwritten with the group's mean probability, the others are sums. Those in
    `decayed` are multiplied by `decay` before the addition. value: of VALUES, the token with the lowest is evicted; None: the
    kernel evicts none. evicts: False if every token stays and the caller names the next slot.
    """

    statistics: tuple[str, ...] = ()
    decay: float = 1.0
    decayed: tuple[str, ...] = ()
    value: str | None = None
    evicts: bool = True

    def __post_init__(self) -> None:
        if unknown := set(self.statistics) - set(STATISTICS):
            raise KVPatchError(f"statistics={self.statistics!r} has {sorted(unknown)}: use some of {STATISTICS}.")
        if wrong := set(self.decayed) - (set(self.statistics) - {"observed"}):
            raise KVPatchError(f"decayed={self.decayed!r} has {sorted(wrong)}: only sums among `statistics` can decay.")
        if self.value not in (None, *VALUES):
            raise KVPatchError(f"value={self.value!r} must be None or one of {VALUES}.")


def reason(dtype: torch.dtype, head_dim: int, group: int) -> str | None:
    """Return the reason that the kernels do not support such queries, or None."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its kernels take float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD:
        return f"its kernels take head sizes up to {MAX_HEAD}, not {head_dim}"
    if group > MAX_GROUP:
        return f"its kernels take up to {MAX_GROUP} query heads per key-value head, not {group}"
    return None


def step(
    q_BHGD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_BHC: Tensor,
    slot_BH: Tensor,
    newest_B: Tensor,
    state: dict[str, Tensor],
    rule: Rule,
    *,
    scale: float,
    slopes_HG: Tensor | None = None,
    sliding: int | None = None,
    begin_N: Tensor | None = None,
    capacity_N: Tensor | None = None,
    keep_BH: Tensor | None = None,
    first_B: Tensor | None = None,
    recent_B: Tensor | None = None,
    tau: float | Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Write one token per head into its slot, attend, observe and evict, all in place; return the output [B,H,G,D].

    Args:
        q_BHGD: the new token's queries; any strides, but the last dimension is contiguous.
        k_BHD: its keys, likewise.
        v_BHD: its values, likewise.
        keys: slots [B,H,C,D], or entries [F,D] of which head n has capacity_N[n] from begin_N[n] on.
        values: like keys.
        positions_BHC: int64, -1 for an empty slot.
        slot_BH: int64, the token's slot; overwritten with the next token's.
        newest_B: int64, the token's position.
        state: float32 [B,H,C] by name, and "noise" [B,H,C,G], exp(noise), which already holds the new token's.
        rule: statistics to update and the victim's rule.
        scale: factor of the logits.
        sliding: the attention window in tokens.
        slopes_HG: slopes of ALiBi.
        begin_N: first entry of each head, of ragged slots.
        capacity_N: entries of each head, of ragged slots.
        keep_BH: int64, tokens that each head may hold, fewer than it has slots; None if no slot is empty after the write.
        first_B: int64; positions below it are never evicted.
        recent_B: int64; so many newest positions are never evicted.
        tau: temperature of "gumbel", a number or a float32 tensor with one element.
        splits: programs that share a head's slots; None: chosen by the number of multiprocessors.

    Raises:
        KVPatchError: a tensor that is written or indexed flat is not contiguous.
    """
    (B, H, G, D), C = q_BHGD.shape, positions_BHC.shape[-1]
    flat = keys, values, positions_BHC, slot_BH, newest_B, begin_N, capacity_N, keep_BH, first_B, recent_B, slopes_HG
    if not all(tensor is None or tensor.is_contiguous() for tensor in (*flat, *state.values())):
        raise KVPatchError("A decode step works in place on flat memory: hand it contiguous tensors (q, k, v may be views).")
    width = max(16, triton.next_power_of_2(D))
    lanes = triton.next_power_of_2(G)
    block = max(16, min(128 if lanes <= 16 else 64, TILE // (width * q_BHGD.element_size())))
    span, parts = _segments(C, B * H, block, splits)
    sums = {name: state[name] if name in rule.statistics else None for name in STATISTICS}
    noise = state.get("noise") if "gumbel" in rule.statistics else None
    if noise is not None and noise.shape != (B, H, C, G):
        raise KVPatchError(f"noise has shape {tuple(noise.shape)}, but [B,H,C,G] is {(B, H, C, G)}: one for each query head.")
    value = rule.value if rule.evicts else None
    ranked = "sum" if value == "mean" else value  # a statistic that the step does not update is read as it is
    other = None if ranked is None or ranked in ("recency", *rule.statistics) else state[ranked]

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q_BHGD.device)

    out = torch.empty((B, H, G, D), dtype=q_BHGD.dtype, device=q_BHGD.device)
    partial, softmax = scratch(B * H, parts, G, D), scratch(B * H, parts, 5, G)
    logits = scratch(B * H, G, C) if rule.statistics else None
    heat, heat_at = (1.0, tau) if isinstance(tau, Tensor) else (1.0 if tau is None else float(tau), None)
    with torch.cuda.device_of(q_BHGD):  # a kernel starts on the current device, which may be another layer's
        split_kernel[B * H, parts](
            *(q_BHGD, k_BHD, v_BHD, keys, values, positions_BHC, slot_BH, newest_B, begin_N, capacity_N, slopes_HG, noise),
            *(heat_at, heat, logits, partial, softmax, scale, sliding, *q_BHGD.stride()[:3], *k_BHD.stride()[:2]),
            *(*v_BHD.stride()[:2], H, C, span, G, max(16, lanes), D, width, block, "gumbel" in rule.statistics),
            num_warps=4 if lanes <= 16 else 8,
            num_stages=3,
        )
        combine_kernel[B * H,](
            *(positions_BHC, slot_BH, newest_B, capacity_N, noise, heat_at, heat, logits, partial, softmax, out),
            *(*sums.values(), other, keep_BH, first_B, recent_B, sliding, rule.decay),
            *(H, C, span, G, lanes, D, width, triton.next_power_of_2(parts), max(64, CELLS // lanes)),
            *(value, *(name in rule.decayed for name in STATISTICS[:4])),
            num_warps=8,
        )
    return out


def _segments(C: int, heads: int, block: int, splits: int | None) -> tuple[int, int]:
    """Return the slots of a segment, in whole blocks, and the number of segments that cover C slots."""
    if splits is None:
        splits = min(triton.cdiv(C, SHORTEST), max(PROGRAMS // heads, 1))
    span = triton.cdiv(triton.cdiv(C, splits), block) * block
    return span, triton.cdiv(C, span)


@triton.jit
def _rest(maximum):
    """Return the maximum of an online softmax, or 0 before its first logit, so that -inf - maximum is no NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def split_kernel(
    Q, K, V, KEYS, VALUES, POSITIONS, SLOT, NEWEST, BEGIN, CAPACITY, SLOPES, NOISE, TAU, tau, LOGITS, PARTIAL, SOFTMAX,
    scale, sliding, q_b, q_h, q_g, k_b, k_h, v_b, v_h, H, C, SPAN,
    G: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GUMBEL: tl.constexpr,
):  # fmt: skip
    """Attend to slots [lo, hi) of head n.

    Writes the new key, value and position if their slot lies there, then logits, p V, and the maximum and normalizer of the
    segment's own softmax.
    """
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = n // H, n % H
    if BEGIN is None:
        begin, capacity = n * C, C
    else:
        begin, capacity = tl.load(BEGIN + n), tl.load(CAPACITY + n).to(tl.int32)
    lo = part * SPAN
    if lo >= capacity:
        return
    hi = tl.minimum(lo + SPAN, capacity)
    slot, newest = tl.load(SLOT + n).to(tl.int32), tl.load(NEWEST + b)
    g, d = tl.arange(0, LANES), tl.arange(0, WIDTH)
    real_g, real_d = g < G, d < D
    q = tl.load(Q + b * q_b + h * q_h + g[:, None] * q_g + d[None, :], mask=real_g[:, None] & real_d[None, :], other=0.0)
    k_new = tl.load(K + b * k_b + h * k_h + d, mask=real_d, other=0.0)
    v_new = tl.load(V + b * v_b + h * v_h + d, mask=real_d, other=0.0)
    scale *= LOG2_E
    # the new token starts the softmax of its segment; the previous contents of its slot are never read
    own = (slot >= lo) & (slot < hi)
    mine = own & (newest >= 0)
    # compared block by block: Triton 3.9's interpreter fails on a mask broadcast from a scalar condition
    own_g, own_d = g < tl.where(own, G, 0), d < tl.where(own, D, 0)
    at = n * C + slot
    tl.store(KEYS + (begin + slot) * D + d, k_new, mask=own_d)
    tl.store(VALUES + (begin + slot) * D + d, v_new, mask=own_d)
    tl.store(POSITIONS + at, newest, mask=own)
    x_new = tl.where(mine, tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale, float("-inf"))
    maximum, total = x_new, tl.where(x_new > float("-inf"), 1.0, 0.0)
    acc = total[:, None] * v_new.to(tl.float32)[None, :]
    seen = tl.where(mine, 1, 0)
    if LOGITS is not None:
        tl.store(LOGITS + (n * G + g) * C + slot, x_new, mask=own_g)
    if SLOPES is not None:
        slope = tl.load(SLOPES + h * G + g, mask=real_g, other=0.0).to(tl.float32) * LOG2_E
    if GUMBEL:
        if TAU is not None:
            tau = tl.load(TAU)
        cooling = 1.0 / tau
        if NOISE is not None:
            x_new += tl.log2(tl.load(NOISE + at * G + g, mask=own_g, other=1.0))
        maximum_y, total_y = x_new * cooling, total
    for start in range(lo, hi, BLOCK):
        c = start + tl.arange(0, BLOCK)
        old = (c < hi) & (c != slot)
        position = tl.load(POSITIONS + n * C + c, mask=old, other=-1)
        visible = position >= 0
        if sliding is not None:
            visible = visible & (newest - position < sliding)
        row = (begin + c)[:, None] * D + d[None, :]
        k = tl.load(KEYS + row, mask=visible[:, None] & real_d[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SLOPES is not None:
            x += slope[:, None] * (position - newest).to(tl.float32)[None, :]
        x = tl.where(visible[None, :], x, float("-inf"))
        if LOGITS is not None:
            tl.store(LOGITS + (n * G + g[:, None]) * C + c[None, :], x, mask=real_g[:, None] & old[None, :])
        higher = tl.maximum(maximum, tl.max(x, 1))
        p, fade = tl.exp2(x - _rest(higher)[:, None]), tl.exp2(maximum - _rest(higher))
        v = tl.load(VALUES + row, mask=visible[:, None] & real_d[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        maximum, total = higher, total * fade + tl.sum(p, 1)
        seen += tl.sum(visible.to(tl.int32), 0)
        if GUMBEL:
            if NOISE is not None:
                noise = NOISE + (n * C + c[None, :]) * G + g[:, None]
                x += tl.log2(tl.load(noise, mask=real_g[:, None] & visible[None, :], other=1.0))
            higher = tl.maximum(maximum_y, tl.max(x * cooling, 1))
            p, fade = tl.exp2(x * cooling - _rest(higher)[:, None]), tl.exp2(maximum_y - _rest(higher))
            maximum_y, total_y = higher, total_y * fade + tl.sum(p, 1)
    segment = n * tl.num_programs(1) + part
    tl.store(PARTIAL + (segment * G + g[:, None]) * D + d[None, :], acc, mask=real_g[:, None] & real_d[None, :])
    found = SOFTMAX + segment * 5 * G + g
    tl.store(found, maximum, mask=real_g)
    tl.store(found + G, total, mask=real_g)
    tl.store(found + 2 * G, tl.full([LANES], 0.0, tl.float32) + seen.to(tl.float32), mask=real_g)
    if GUMBEL:
        tl.store(found + 3 * G, maximum_y, mask=real_g)
        tl.store(found + 4 * G, total_y, mask=real_g)


@triton.jit
def _merged(found, there, G: tl.constexpr):
    """Merge the segments at `found` [PARTS, LANES] into a head's softmax: its maximum and 1 / normalizer [LANES]."""
    own = tl.load(found, mask=there, other=float("-inf"))
    maximum = _rest(tl.max(own, 0))
    total = tl.sum(tl.load(found + G, mask=there, other=0.0) * tl.exp2(own - maximum[None, :]), 0)
    # IEEE division, so that n equal keys get 1/n; a NaN logit makes the row NaN, as in a softmax
    return maximum, tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total == 0.0, 1.0, total))


@triton.jit
def _added(STATE, at, inside, fresh, more, decay, DECAYED: tl.constexpr):
    """Return the state plus `more`; for a fresh token the previous contents of its slot are ignored."""
    old = tl.load(STATE + at, mask=inside & (fresh == 0), other=0.0)
    if DECAYED:
        old *= decay
    tl.store(STATE + at, old + more, mask=inside)
    return old + more


@triton.jit
def combine_kernel(
    POSITIONS, SLOT, NEWEST, CAPACITY, NOISE, TAU, tau, LOGITS, PARTIAL, SOFTMAX, OUT,
    SUM, SQUARES, COUNT, GUMBEL, OBSERVED, OTHER, KEEP, FIRST, RECENT, sliding, decay, H, C, SPAN,
    G: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    VALUE: tl.constexpr, DECAY_SUM: tl.constexpr, DECAY_SQUARES: tl.constexpr, DECAY_COUNT: tl.constexpr,
    DECAY_GUMBEL: tl.constexpr,
):  # fmt: skip
    """Compute the output, the statistics and the victim's slot of head n."""
    n = tl.program_id(0).to(tl.int64)
    b = n // H
    capacity = C
    if CAPACITY is not None:
        capacity = tl.load(CAPACITY + n).to(tl.int32)
    parts, most = tl.cdiv(capacity, SPAN), tl.cdiv(C, SPAN)
    g, d, s = tl.arange(0, LANES), tl.arange(0, WIDTH), tl.arange(0, PARTS)
    real_g = g < G
    found = SOFTMAX + (n * most + s[:, None]) * 5 * G + g[None, :]
    there = (s[:, None] < parts) & real_g[None, :]
    maximum, inverse = _merged(found, there, G)
    cells = real_g[:, None] & (d < D)[None, :]
    acc = tl.zeros([LANES, WIDTH], tl.float32)
    for part in range(parts):
        own = tl.load(SOFTMAX + (n * most + part) * 5 * G + g, mask=real_g, other=0.0)
        o = tl.load(PARTIAL + ((n * most + part) * G + g[:, None]) * D + d[None, :], mask=cells, other=0.0)
        acc += o * tl.exp2(own - maximum)[:, None]
    out = acc * inverse[:, None]
    tl.store(OUT + (n * G + g[:, None]) * D + d[None, :], out.to(OUT.dtype.element_ty), mask=cells)
    if (LOGITS is not None) | (VALUE is not None):
        newest, slot = tl.load(NEWEST + b), tl.load(SLOT + n).to(tl.int32)
        if COUNT is not None:
            seen = tl.sum(tl.load(found + 2 * G, mask=there & (g == 0)[None, :], other=0.0))
        if GUMBEL is not None:
            maximum_y, inverse_y = _merged(found + 3 * G, there, G)
            if TAU is not None:
                tau = tl.load(TAU)
            cooling = 1.0 / tau
        if FIRST is not None:
            first = tl.load(FIRST + b)
        if RECENT is not None:
            recent = tl.load(RECENT + b)
        lowest, lowest_at = tl.full([BLOCK], LAST, tl.int64), tl.zeros([BLOCK], tl.int32)
        held, gap = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], NOWHERE, tl.int32)
        for start in range(0, capacity, BLOCK):
            c = start + tl.arange(0, BLOCK)
            inside, fresh = c < capacity, c == slot
            at = n * C + c
            position = tl.load(POSITIONS + at, mask=inside, other=-1)
            value = position.to(tl.float32)
            if OTHER is not None:
                value = tl.load(OTHER + at, mask=inside, other=0.0)
            if LOGITS is not None:
                cell = real_g[:, None] & inside[None, :]
                x = tl.load(LOGITS + (n * G + g[:, None]) * C + c[None, :], mask=cell, other=float("-inf"))
                p = tl.exp2(x - maximum[:, None]) * inverse[:, None]
                if SUM is not None:
                    new = _added(SUM, at, inside, fresh, tl.sum(p, 0), decay, DECAY_SUM)
                    if (VALUE == "sum") | (VALUE == "mean"):
                        value = new
                if SQUARES is not None:
                    mean = tl.sum(p, 0) / G
                    _added(SQUARES, at, inside, fresh, mean * mean, decay, DECAY_SQUARES)
                if COUNT is not None:
                    above = tl.sum((p * seen > 1.0).to(tl.float32), 0)
                    new = _added(COUNT, at, inside, fresh, above, decay, DECAY_COUNT)
                    if VALUE == "count":
                        value = new
                if OBSERVED is not None:
                    new = tl.sum(p, 0) / G
                    tl.store(OBSERVED + at, new, mask=inside)
                    if VALUE == "observed":
                        value = new
                if GUMBEL is not None:
                    if NOISE is not None:
                        noise = tl.load(NOISE + at[None, :] * G + g[:, None], mask=cell & (x > float("-inf")), other=1.0)
                        x += tl.log2(noise)
                    p = tl.exp2(x * cooling - maximum_y[:, None]) * inverse_y[:, None]
                    new = _added(GUMBEL, at, inside, fresh, tl.sum(p, 0), decay, DECAY_GUMBEL)
                    if VALUE == "gumbel":
                        value = new
            if VALUE is not None:
                if VALUE == "mean":
                    rows = newest + 1 - position
                    if sliding is not None:
                        rows = tl.minimum(rows, sliding)
                    value = tl.div_rn(value, rows.to(tl.float32))
                if ((VALUE == "mean") | (VALUE == "count")) & (G > 1):
                    value = tl.div_rn(value, tl.full([BLOCK], G, tl.float32))
                value = tl.where(value == value, value, 0.0)
                # eviction keys of policies/selection.py: the value, then the position; tokens outside the window are lowest
                key = (value.to(tl.int32, bitcast=True).to(tl.int64) << 30) | position
                if sliding is not None:
                    key = tl.where(newest + 1 - position >= sliding, key - TIER, key)
                if FIRST is not None:
                    key = tl.where(position < first, LAST, key)
                if RECENT is not None:
                    key = tl.where(position > newest - recent, LAST, key)
                key = tl.where(position < 0, LAST, key)
                lowest_at = tl.where(key < lowest, c, lowest_at)
                lowest = tl.minimum(lowest, key)
                held += (position >= 0).to(tl.int32)
                gap = tl.minimum(gap, tl.where(inside & (position < 0), c, NOWHERE))
        if VALUE is not None:
            victim = tl.min(tl.where(lowest == tl.min(lowest, 0), lowest_at, NOWHERE), 0)
            if KEEP is None:
                tl.store(POSITIONS + n * C + victim, -1)
                tl.store(SLOT + n, victim.to(tl.int64))
            else:
                over = tl.sum(held, 0) > tl.load(KEEP + n)
                tl.store(POSITIONS + n * C + victim, -1, mask=over)
                free = tl.minimum(tl.min(gap, 0), tl.where(over, victim, NOWHERE))
                tl.store(SLOT + n, tl.where(free == NOWHERE, slot, free).to(tl.int64))
