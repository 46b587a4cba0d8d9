"""Column statistics of a prompt's attention as a Triton kernel.

No n x n matrix is stored: probabilities are recomputed from attention's log-sum-exp, a tile at a time. One program owns a
block of keys of one KV head and loops over the query rows that can see it, and over the heads of the group: there are no
atomics, and results are the same bits every time. A tile is K Q^T: each key's numbers are in one or few threads, so that
sums over rows need no exchange between threads.

Row r sees column t iff the row is no padding (rows_BQ >= 0), the slot is not empty (positions_BHT >= 0), t <= past + r (or,
`by_position`, positions_BHT <= rows_BQ), and the row's position minus the column's is below `sliding`. The last Q columns
are the rows' own tokens unless `by_position`.

Logits are (scale q k + slope (i - t) + noise) / tau, with softcap * tanh(scale q k / softcap) for scale q k if
there is a cap.

Kernels name pointers as their tensors (q_ptr), strides by tensor and axis (q_b), axes in lower case (n: keys of a block,
m: rows of a block).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .arguments import (
    LENGTHS,
    LOG2E,
    check,
    flatten_float,
    last_contiguous,
    logit_units,
    noise_tiles,
    padded_size,
    spans,
    tile_constants,
)  # fmt: skip
from .split import cap_products

NAMES = ("sum", "squares", "count")
PROGRAMS = 2048  # that a launch is to have at least: some hundred run at once, and the last of them should be short
LEAST_TILES = 16  # of the longest program after a split: its keys are loaded once more


def column_statistics(
    q_BHGQD: Tensor,
    k_BHTD: Tensor,
    positions_BHT: Tensor,
    rows_BQ: Tensor,
    lse_BHGQ: Tensor,
    names: Iterable[str],
    *,
    scale: float,
    slopes_HG: Tensor | None = None,
    sliding: int | None = None,
    softcap: float | None = None,
    past: int = 0,
    by_position: bool = False,
    noise_BHTG: Tensor | None = None,
    tau: float = 1.0,
    keys_BHQ: Tensor | None = None,
    spans_B4: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return sums of probabilities over a prompt's rows for each key, [B,H,T] float32 by name, by one kernel.

    `statistics` and `window_sums` call it for policies that score by the attention of a prompt's rows. A key that no row sees
    has zero. lse_BHGQ: log-sum-exp of the same logits (with attention sinks, if there are any); its values for padding and for
    rows that see nothing are ignored. noise_BHTG: exp(noise). spans_B4: `spans` of the rows, if they are known. by_position:
    the causal mask compares positions, since rows are not the last columns; else columns, of which `past` are before the
    prompt.

    "sum": of probabilities, over rows and the group's heads. "squares": over rows, of the group's mean probability. "count":
    number of pairs (row, head) that give the key more than an even share of the keys_BHQ keys of the row.
    """
    names = tuple(names)
    check(q_BHGQD, k_BHTD, None, noise_BHTG)
    unknown = set(names).difference(NAMES)
    if unknown:
        raise ValueError(f"no such statistic: {', '.join(sorted(unknown))}; choose among {', '.join(NAMES)}")
    if "count" in names and keys_BHQ is None:
        raise ValueError('"count" compares with an even share: pass keys_BHQ, how many keys each row attends to')
    (B, H, G, Q, D), T = q_BHGQD.shape, k_BHTD.shape[2]
    if not names or not Q or not T:
        return {name: torch.zeros(B, H, T, dtype=torch.float32, device=q_BHGQD.device) for name in names}
    block_n, block_m, *_ = tile = _column_tile(q_BHGQD.dtype, padded_size(D), Q)
    # a grid of programs: blocks of keys, times `splits` if few blocks would leave the GPU idle (each then takes some rows)
    blocks = triton.cdiv(T, block_n)
    splits = _row_splits(B * H * blocks, triton.cdiv(Q, block_m), G)
    outs = {name: torch.empty(splits, B, H, T, dtype=torch.float32, device=q_BHGQD.device) for name in names}
    fill = -Q % block_m  # rows of padding that complete the last tile
    q, k, positions = (last_contiguous(tensor) for tensor in (q_BHGQD, k_BHTD, positions_BHT))
    unit, inner = logit_units(scale, softcap)
    noise = noise_tiles(noise_BHTG, tau, logarithm=True)
    # tensors, their strides, sizes, factors of the logits, and constants
    with torch.cuda.device_of(q):
        _columns_kernel[(B * H * splits, blocks)](
            q,
            k,
            positions,
            (F.pad(rows_BQ, (0, fill), value=-1) if fill else rows_BQ).contiguous(),
            spans(rows_BQ) if spans_B4 is None else spans_B4,
            _row_terms(lse_BHGQ, rows_BQ, fill),
            _even_shares(keys_BHQ, fill) if keys_BHQ is not None and "count" in names else None,
            flatten_float(slopes_HG),
            noise,
            *(outs.get(name) for name in NAMES),
            *q.stride()[:4],
            *k.stride()[:3],
            *positions.stride()[:2],
            0 if noise is None else noise.shape[-1],
            B * H,
            H,
            Q + fill,
            T,
            past,
            sliding or 0,
            unit / tau,
            inner,
            LOG2E / tau,
            **tile_constants(G, D, tile, sliding=sliding, softcap=softcap, by_position=by_position),
        )
    return {name: out[0] if splits == 1 else out.sum(0) for name, out in outs.items()}  # each split has summed some rows


# ---- arguments of the kernel ----


def _row_terms(lse_BHGQ: Tensor, rows_BQ: Tensor, fill: int) -> Tensor:
    """Return each row's log-sum-exp in base 2, for `column_statistics`. +inf fills up rows that do not exist: they weigh 0."""
    terms = (lse_BHGQ.to(torch.float32) * LOG2E).nan_to_num_(math.inf, math.inf, math.inf)
    terms.masked_fill_((rows_BQ < 0)[:, None, None], math.inf)
    return (F.pad(terms, (0, fill), value=math.inf) if fill else terms).contiguous()


def _even_shares(keys_BHQ: Tensor, fill: int) -> Tensor:
    """Return each row's even share 1 / keys, which "count" compares with; +inf for a row of one key: its share may round."""
    shares = keys_BHQ.to(torch.float32).reciprocal()
    return F.pad(shares.masked_fill(keys_BHQ <= 1, math.inf), (0, fill), value=math.inf).contiguous()


# ---- the grid, and tiles: keys, rows, warps, stages ----


def _row_splits(programs: int, row_blocks: int, group: int) -> int:
    """Return among how many of the GPU's programs to split the rows of one block of keys, so that a launch has enough."""
    return max(1, min(triton.cdiv(PROGRAMS, programs), row_blocks, row_blocks * group // LEAST_TILES))


def _column_tile(dtype: torch.dtype, padded: int, Q: int) -> tuple[int, int, int, int]:
    """Return keys, rows, warps and stages of a tile, for `column_statistics`. padded: head size of a tile. Q: query rows."""
    rows = max(16, triton.next_power_of_2(Q))
    if dtype == torch.float32:  # no tensor cores: taller tiles, or fewer warps, spill registers
        return 64, min(rows, 32), 8, 2
    return 128, min(rows, 64), 4 if padded <= 128 else 8, 3 if padded <= 64 else 2


# ---- the kernel ----


@triton.jit(do_not_specialize=LENGTHS)
def _columns_kernel(
    q_ptr, k_ptr, positions_ptr, rows_ptr, spans_ptr, terms_ptr, shares_ptr, slopes_ptr, noise_ptr,
    sum_ptr, squares_ptr, count_ptr,
    q_b, q_h, q_g, q_r, k_b, k_h, k_t, positions_b, positions_h, noise_g,
    heads, H, Q, T, past, sliding, unit, inner, bias_factor,
    G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SLIDING: tl.constexpr, BY_POSITION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute the column statistics of one block of keys, over one split of the rows that see it; for `column_statistics`.

    terms: the rows' log-sum-exp in base 2; shares: their even shares. The sums' pointers are None for those not wanted. Rows
    that see all of the block need no mask; those before them, and with a window those after them, do. Programs start in the
    order of the grid: the first keys, which most rows see, of all heads first. Q, the stride of rows, is a multiple of BLOCK_M.
    """
    n0 = tl.program_id(1) * BLOCK_N
    split, splits = tl.program_id(0) // heads, tl.num_programs(0) // heads
    bh = (tl.program_id(0) % heads).to(tl.int64)
    b, h = bh // H, bh % H
    n, d = n0 + tl.arange(0, BLOCK_N), tl.arange(0, PADDED)
    k_tile = k_ptr + b * k_b + h * k_h + n.to(tl.int64)[:, None] * k_t + d[None, :]
    k = tl.load(k_tile, mask=(n < T)[:, None] & (d < D)[None, :], other=0.0)
    positions = tl.load(positions_ptr + b * positions_b + h * positions_h + n, mask=n < T, other=-1)
    # positions are subtracted as integers: the differences are small, and exact as float32
    origin = tl.max(positions, 0)
    key_place = (positions - origin).to(tl.float32)

    # rows [lo, hi) can see the block, and [mid, far) see all of it
    first = tl.load(spans_ptr + b * 4).to(tl.int32)
    last = tl.load(spans_ptr + b * 4 + 1).to(tl.int32)
    regular = tl.load(spans_ptr + b * 4 + 2) != 0
    lo = first
    if not BY_POSITION:
        lo = tl.maximum(first, n0 - past)
    lo = lo // BLOCK_M * BLOCK_M
    hi = tl.where(origin < 0, lo, tl.maximum(last, lo))
    far = hi
    if SLIDING:
        leaves = sliding - tl.load(spans_ptr + b * 4 + 3)  # plus a column's position: the first row whose window excludes it
        hi = tl.where(regular, tl.minimum(hi, tl.maximum(origin + leaves, lo)), hi).to(tl.int32)
        oldest = tl.min(tl.where(positions < 0, origin, positions), 0)
        far = tl.maximum(oldest + leaves, 0).to(tl.int32) // BLOCK_M * BLOCK_M
    mid = hi
    if not BY_POSITION:
        below = tl.cdiv(tl.maximum(n0 + BLOCK_N - 1 - past, lo), BLOCK_M) * BLOCK_M
        mid = tl.where(regular, tl.minimum(below, hi), hi)
    far = tl.minimum(tl.maximum(far, mid), hi)
    begin, blocks = lo, tl.cdiv(hi - lo, BLOCK_M)
    lo = begin + blocks * split // splits * BLOCK_M
    hi = tl.minimum(begin + blocks * (split + 1) // splits * BLOCK_M, hi)
    mid, far = tl.minimum(tl.maximum(mid, lo), hi), tl.minimum(tl.maximum(far, lo), hi)

    sums = tl.zeros([BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    counts = tl.zeros([BLOCK_N], tl.float32)
    group = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if noise_ptr is not None:
        noise_tile = noise_ptr + bh * G * noise_g + n
    for part in tl.static_range(3 if SLIDING else 2):
        if part == 0:
            start, stop = lo, mid
        elif part == 1:
            start, stop = mid, far
        else:
            start, stop = far, hi
        # one loop over rows and heads, so that the next queries are prefetched across both
        for step in range(tl.cdiv(stop - start, BLOCK_M) * G):
            g, m0 = step % G, start + step // G * BLOCK_M
            m = m0 + tl.arange(0, BLOCK_M)
            # padding may hold any value: its queries are not read, or are masked if padding stands between rows
            here = (m >= first) & (m < hi)
            q_tile = q_ptr + b * q_b + h * q_h + tl.cast(g, tl.int64) * q_g + tl.cast(m0, tl.int64) * q_r
            q_tile = q_tile + tl.arange(0, BLOCK_M)[:, None] * q_r + d[None, :]
            q = tl.load(q_tile, mask=here[:, None] & (d < D)[None, :], other=0.0)
            term = tl.load(terms_ptr + (bh * G + g) * Q + m)
            x = tl.dot(k, tl.trans(q), input_precision="ieee")
            if CAPPED:
                x = cap_products(x, inner)
            row_term = term
            if slopes_ptr is not None or BY_POSITION or SLIDING:
                row_place = (tl.load(rows_ptr + b * Q + m) - origin).to(tl.float32)
            if slopes_ptr is not None:  # a key's share and a row's, each relative to the block
                slope = tl.load(slopes_ptr + h * G + g) * bias_factor
                row_term += slope * row_place
            x = x * unit - row_term[None, :]
            if slopes_ptr is not None:
                x += (slope * key_place)[:, None]
            if noise_ptr is not None:
                x += tl.load(noise_tile + tl.cast(g, tl.int64) * noise_g)[:, None]
            if part != 1:
                visible = (term != float("inf"))[None, :]
                if BY_POSITION:
                    visible = visible & (key_place[:, None] <= row_place[None, :])
                else:
                    visible = visible & (n[:, None] - past <= m[None, :])
                if SLIDING:
                    visible = visible & (row_place[None, :] - key_place[:, None] < sliding)
                x = tl.where(visible, x, float("-inf"))
            p = tl.exp2(x)
            if sum_ptr is not None:
                sums += tl.sum(p, 1)
            if squares_ptr is not None:
                group = tl.where(g == 0, p, group + p)
                squares += tl.where(g == G - 1, tl.sum(group * group, 1), 0.0)
            if count_ptr is not None:
                share = tl.load(shares_ptr + bh * Q + m)
                counts += tl.sum((p > share[None, :]).to(tl.float32), 1)

    # an empty slot may hold any value: its sums are dropped
    held, at = positions >= 0, (split * heads + bh) * T + n
    if sum_ptr is not None:
        tl.store(sum_ptr + at, tl.where(held, sums, 0.0), mask=n < T)
    if squares_ptr is not None:
        tl.store(squares_ptr + at, tl.where(held, squares * (1.0 / (G * G)), 0.0), mask=n < T)
    if count_ptr is not None:
        tl.store(count_ptr + at, tl.where(held, counts, 0.0), mask=n < T)
