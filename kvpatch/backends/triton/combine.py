"""The last kernels of a decode step: merge the segments of each head, add to the statistics, and choose the victim."""

from __future__ import annotations

import triton
import triton.language as tl

from ...policies import selection
from . import plan
from .split import find_scratch, finite_maximum

LAST: tl.constexpr = tl.constexpr(selection.LAST)
TIER: tl.constexpr = tl.constexpr(1 << 62)
NOWHERE: tl.constexpr = tl.constexpr((1 << 31) - 1)
PARTS: tl.constexpr = tl.constexpr(16)  # segments that are merged at a time
OUTPUTS: tl.constexpr = tl.constexpr(plan.OUTPUTS)


@triton.jit
def _merge_segments(found, parts, g, G: tl.constexpr, LANES: tl.constexpr):
    """Return the softmax of a head over all its segments, for `combine_kernel`: maximum and 1 / normalizer, [LANES].

    `split_kernel` has left five numbers for each segment and query head, [parts,5,G]: maximum and normalizer, keys seen, and
    maximum and normalizer of the softmax with noise. found: where those of the first segment begin; 3 G later for noise.
    PARTS of all `parts` segments are merged at a time. g: the query heads, G of LANES, a power of two.
    """
    maximum, total = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    for start in range(0, parts, PARTS):
        s = start + tl.arange(0, PARTS)
        at = found + s[:, None] * 5 * G + g[None, :]
        there = (s < parts)[:, None] & (g < G)[None, :]
        own = tl.load(at, mask=there, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(own, 0))
        more = tl.load(at + G, mask=there, other=0.0) * tl.exp2(own - finite_maximum(higher)[None, :])
        maximum, total = higher, total * tl.exp2(maximum - finite_maximum(higher)) + tl.sum(more, 0)
    return finite_maximum(maximum), _invert_total(total)


@triton.jit
def _invert_total(total):
    """Return 1 / total, or 1 where no key is seen.

    IEEE division, so that n equal keys get 1/n; a NaN logit makes the row NaN, as in a softmax.
    """
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total == 0.0, 1.0, total))


@triton.jit
def _write_output(PARTIAL, found, OUT, n, segment, parts, e, G: tl.constexpr, D: tl.constexpr):
    """Compute entries `e` of head n's output [G,D] from its `parts` segments, and store them in OUT; for `combine_kernel`.

    PARTIAL: p V of all heads' segments; segment: the number of this head's first. found: as in `_merge_segments`.
    """
    g, real = e // D, e < G * D
    maximum, total = tl.full([OUTPUTS], float("-inf"), tl.float32), tl.zeros([OUTPUTS], tl.float32)
    acc = tl.zeros([OUTPUTS], tl.float32)
    for start in range(0, parts, PARTS):
        s = start + tl.arange(0, PARTS)
        at = found + s[:, None] * 5 * G + g[None, :]
        there = (s < parts)[:, None] & real[None, :]
        own = tl.load(at, mask=there, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(own, 0))
        fade, weight = tl.exp2(maximum - finite_maximum(higher)), tl.exp2(own - finite_maximum(higher)[None, :])
        o = tl.load(PARTIAL + (segment + s[:, None]) * G * D + e[None, :], mask=there, other=0.0)
        acc = acc * fade + tl.sum(o * weight, 0)
        total = total * fade + tl.sum(tl.load(at + G, mask=there, other=0.0) * weight, 0)
        maximum = higher
    tl.store(OUT + n * G * D + e, (acc * _invert_total(total)).to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _add_state(STATE, at, inside, fresh, more, decay, DECAYED: tl.constexpr):
    """Add `more` to a statistic of the slots `at` of STATE in place, and return the sums, by which slots may be ranked.

    `combine_kernel` calls it for each statistic and block of slots. In the new token's slot (fresh) the old number is ignored,
    elsewhere it is multiplied by `decay` first if DECAYED. inside: entries of `at` that are slots of the chunk.
    """
    old = tl.load(STATE + at, mask=inside & (fresh == 0), other=0.0)
    if DECAYED:
        old *= decay
    tl.store(STATE + at, old + more, mask=inside)
    return old + more


@triton.jit
def _vacate_slot(POSITIONS, SLOT, KEEP, n, C, victim, held, gap):
    """Write -1 to the victim's position in head n, if the head holds too many tokens, and its next token's slot to SLOT.

    held: tokens of the head; gap: its first empty slot, or NOWHERE. KEEP: how many each head may hold; None: all heads are full
    and evict. Else the next slot is the victim's, if it is evicted, or `gap`, if that comes first.
    """
    if KEEP is None:
        tl.store(POSITIONS + n * C + victim, -1)
        tl.store(SLOT + n, victim.to(tl.int64))
    else:
        over = held > tl.load(KEEP + n)
        tl.store(POSITIONS + n * C + victim, -1, mask=over)
        free = tl.minimum(gap, tl.where(over, victim, NOWHERE)).to(tl.int64)
        tl.store(SLOT + n, free, mask=free != NOWHERE)


@triton.jit(
    do_not_specialize=["C", "CHUNK"],
    do_not_specialize_on_alignment=[
        *("POSITIONS", "SLOT", "NEWEST", "CAPACITY", "NOISE", "TAU", "LOWEST"),
        *("SUM", "SQUARES", "COUNT", "GUMBEL", "OBSERVED", "OTHER", "KEEP", "FIRST", "RECENT"),
    ],
)
def combine_kernel(
    POSITIONS, SLOT, NEWEST, CAPACITY, NOISE, TAU, tau, SCRATCH, LOWEST, OUT,
    SUM, SQUARES, COUNT, GUMBEL, OBSERVED, OTHER, KEEP, FIRST, RECENT, sliding, decay, H, C, SPAN, CHUNK,
    G: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, OBSERVE: tl.constexpr,
    VALUE: tl.constexpr, DECAY_SUM: tl.constexpr, DECAY_SQUARES: tl.constexpr, DECAY_COUNT: tl.constexpr,
    DECAY_GUMBEL: tl.constexpr,
):  # fmt: skip
    """Update the statistics of a chunk of head n's slots and find its lowest eviction key, or compute a part of the output.

    `decode.step` launches it after `split_kernel`: for each head a program for each chunk (none if nothing is observed or
    evicted), then those for the output. With one chunk the victim is chosen here, else by `evict_kernel`. SUM to OBSERVED:
    statistics to update, or None; OTHER: one to rank by that is not updated. VALUE: a name of VALUES, see Rule. KEEP, FIRST,
    RECENT: keep_BH, first_B and recent_B of `decode.step`.
    """
    n, job = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1) - tl.cdiv(G * D, OUTPUTS)
    capacity = C
    if CAPACITY is not None:
        capacity = tl.load(CAPACITY + n).to(tl.int32)
    parts, most = tl.cdiv(capacity, SPAN), tl.cdiv(C, SPAN)
    LOGITS, PARTIAL, SOFTMAX = find_scratch(SCRATCH, most, SPAN, G, D, OBSERVE)
    found = SOFTMAX + n * most * 5 * G
    if job >= chunks:
        e = (job - chunks) * OUTPUTS + tl.arange(0, OUTPUTS)
        _write_output(PARTIAL, found, OUT, n, n * most, parts, e, G, D)
    elif OBSERVE or VALUE is not None:
        b, g = n // H, tl.arange(0, LANES)
        real_g, room = g < G, most.to(tl.int64) * SPAN
        newest, slot = tl.load(NEWEST + b), tl.load(SLOT + n).to(tl.int32)
        if OBSERVE:
            maximum, inverse = _merge_segments(found, parts, g, G, LANES)
        if COUNT is not None:
            seen = 0.0
            for part in range(parts):
                seen += tl.load(found + (part * 5 + 2) * G)
        if GUMBEL is not None:
            maximum_y, inverse_y = _merge_segments(found + 3 * G, parts, g, G, LANES)
            if TAU is not None:
                tau = tl.load(TAU)
            cooling = 1.0 / tau
        if FIRST is not None:
            first = tl.load(FIRST + b)
        if RECENT is not None:
            recent = tl.load(RECENT + b)
        lo, hi = job * CHUNK, tl.minimum((job + 1) * CHUNK, capacity)
        # in each lane: the lowest key so far and its slot, the number of tokens held, and the first empty slot
        lowest, lowest_at = tl.full([BLOCK], LAST, tl.int64), tl.full([BLOCK], 0, tl.int32) + lo
        held, gap = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], NOWHERE, tl.int32)
        for start in range(lo, hi, BLOCK):
            c = start + tl.arange(0, BLOCK)
            inside, fresh = c < hi, c == slot
            at = n * C + c
            position = tl.load(POSITIONS + at, mask=inside, other=-1)
            value = position.to(tl.float32)
            if OTHER is not None:
                value = tl.load(OTHER + at, mask=inside, other=0.0)
            if OBSERVE:
                cell = real_g[:, None] & inside[None, :]
                x = tl.load(LOGITS + (n * G + g[:, None]) * room + c[None, :], mask=cell, other=float("-inf"))
                p = tl.exp2(x - maximum[:, None]) * inverse[:, None]
                if SUM is not None:
                    new = _add_state(SUM, at, inside, fresh, tl.sum(p, 0), decay, DECAY_SUM)
                    if (VALUE == "sum") | (VALUE == "mean"):
                        value = new
                if SQUARES is not None:
                    mean = tl.sum(p, 0) / G
                    _add_state(SQUARES, at, inside, fresh, mean * mean, decay, DECAY_SQUARES)
                if COUNT is not None:
                    above = tl.sum((p * seen > 1.0).to(tl.float32), 0)
                    new = _add_state(COUNT, at, inside, fresh, above, decay, DECAY_COUNT)
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
                    new = _add_state(GUMBEL, at, inside, fresh, tl.sum(p, 0), decay, DECAY_GUMBEL)
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
            key = tl.min(lowest, 0)
            victim = tl.min(tl.where(lowest == key, lowest_at, NOWHERE), 0)
            if chunks == 1:
                _vacate_slot(POSITIONS, SLOT, KEEP, n, C, victim, tl.sum(held, 0), tl.min(gap, 0))
            else:
                here = LOWEST + (n * chunks + job) * 4
                tl.store(here, key)
                tl.store(here + 1, victim.to(tl.int64))
                tl.store(here + 2, tl.sum(held, 0).to(tl.int64))
                tl.store(here + 3, tl.min(gap, 0).to(tl.int64))


@triton.jit(do_not_specialize=["C", "chunks"], do_not_specialize_on_alignment=["POSITIONS", "SLOT", "KEEP"])
def evict_kernel(POSITIONS, SLOT, KEEP, LOWEST, C, chunks, CHUNKS: tl.constexpr):
    """Choose head n's victim among its chunks' victims, and evict it by `_vacate_slot`.

    `decode.step` launches it after `combine_kernel` if the step evicts and heads have several chunks. A record of LOWEST,
    [B*H,chunks,4], says of a chunk: its lowest eviction key, the slot with that key, the number of tokens held, and the first
    empty slot (gap) or NOWHERE. SLOT, KEEP: each head's next free slot, and the tokens that it may hold, or None. CHUNKS: a
    power of two not below `chunks`.
    """
    n, s = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    here, there = LOWEST + (n * chunks + s) * 4, s < chunks
    key = tl.load(here, mask=there, other=LAST)
    at = tl.load(here + 1, mask=there, other=NOWHERE)
    victim = tl.min(tl.where(key == tl.min(key, 0), at, NOWHERE), 0)
    held = tl.sum(tl.load(here + 2, mask=there, other=0), 0)
    gap = tl.min(tl.load(here + 3, mask=there, other=NOWHERE), 0)
    _vacate_slot(POSITIONS, SLOT, KEEP, n, C, victim, held, gap)
