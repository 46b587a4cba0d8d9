"""Column statistics of a prompt's attention, and the normalizer of each row, as Triton kernels.

No n x n matrix is stored: probabilities are recomputed from attention's log-sum-exp, a tile at a time. One program owns a
block of keys of one KV head and loops over the query rows that can see it, and over the heads of the group: there are no
atomics, and results are the same bits every time. A tile is K Q^T: each key's numbers are in one or few threads, so that
sums over rows need no exchange between threads.

Row r sees column t iff the row is no padding (rows_BQ >= 0), the slot is not empty (positions_BHT >= 0), t <= past + r (or,
`by_position`, positions_BHT <= rows_BQ), and the row's position minus the column's is below `sliding`. The last Q columns
are the rows' own tokens unless `by_position`. Logits are (scale q k + slope (i - t) + noise) / tau.

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

NAMES = ("sum", "squares", "count")
LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS = 2048  # that a launch is to have at least: some hundred run at once, and the last of them should be short
LEAST_TILES = 16  # of the longest program after a split: its keys are loaded once more
WIDEST = 256  # largest head size: a wider tile does not fit in shared memory


def reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return the reason that the kernels do not support these queries, or None."""
    if dtype not in DTYPES:
        return f"the Triton kernels take float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > WIDEST:
        return f"the Triton kernels take head sizes up to {WIDEST}, not {head_dim}"
    return None


def row_normalisers(
    q_BHGQD: Tensor,
    k_BHTD: Tensor,
    positions_BHT: Tensor,
    rows_BQ: Tensor,
    *,
    scale: float,
    slopes_HG: Tensor | None = None,
    sliding: int | None = None,
    past: int = 0,
    by_position: bool = False,
    noise_BHTG: Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Return the log-sum-exp [B,H,G,Q] of each row's logits, float32; +inf for padding and for rows that see nothing."""
    _check(q_BHGQD, k_BHTD, noise_BHTG=noise_BHTG)
    (B, H, G, Q, D), T = q_BHGQD.shape, k_BHTD.shape[2]
    lse_BHGQ = torch.empty(B, H, G, Q, dtype=torch.float32, device=q_BHGQD.device)
    if not lse_BHGQ.numel():
        return lse_BHGQ
    padded = max(16, triton.next_power_of_2(D))
    block_n, block_m, warps, stages = _row_tile(q_BHGQD.dtype, padded, Q)
    q, k, positions = (_last_contiguous(tensor) for tensor in (q_BHGQD, k_BHTD, positions_BHT))
    with torch.cuda.device_of(q):
        _normalisers_kernel[(B * H * G, triton.cdiv(Q, block_m))](
            q,
            k,
            positions,
            rows_BQ.contiguous(),
            _spans(rows_BQ),
            _flat(slopes_HG),
            _flat(noise_BHTG),
            lse_BHGQ,
            *q.stride()[:4],
            *k.stride()[:3],
            *positions.stride()[:2],
            H,
            Q,
            T,
            past,
            sliding or 0,
            scale * LOG2E / tau,
            LOG2E / tau,
            G=G,
            D=D,
            PADDED=padded,
            BLOCK_N=block_n,
            BLOCK_M=block_m,
            SLIDING=sliding is not None,
            BY_POSITION=by_position,
            num_warps=warps,
            num_stages=stages,
        )
    return lse_BHGQ


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
    past: int = 0,
    by_position: bool = False,
    noise_BHTG: Tensor | None = None,
    tau: float = 1.0,
    keys_BHQ: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return sums over the rows for each key, [B,H,T] float32 by name; zero for a key that no row sees.

    lse_BHGQ: log-sum-exp of the same logits; its values for padding and for rows that see nothing are ignored.
    "sum": of probabilities, over rows and the group's heads. "squares": over rows, of the group's mean probability.
    "count": number of pairs (row, head) that give the key more than an even share of the keys_BHQ keys of the row.
    """
    names = tuple(names)
    _check(q_BHGQD, k_BHTD, names, keys_BHQ, noise_BHTG)
    (B, H, G, Q, D), T = q_BHGQD.shape, k_BHTD.shape[2]
    if not names or not Q or not T:
        return {name: torch.zeros(B, H, T, dtype=torch.float32, device=q_BHGQD.device) for name in names}
    padded = max(16, triton.next_power_of_2(D))
    block_n, block_m, warps, stages = _column_tile(q_BHGQD.dtype, padded, Q)
    blocks = triton.cdiv(T, block_n)
    splits = _row_splits(B * H * blocks, triton.cdiv(Q, block_m), G)
    outs = {name: torch.empty(splits, B, H, T, dtype=torch.float32, device=q_BHGQD.device) for name in names}
    fill = -Q % block_m
    q, k, positions = (_last_contiguous(tensor) for tensor in (q_BHGQD, k_BHTD, positions_BHT))
    with torch.cuda.device_of(q):
        _columns_kernel[(B * H * splits, blocks)](
            q,
            k,
            positions,
            F.pad(rows_BQ, (0, fill), value=-1).contiguous(),
            _spans(rows_BQ),
            _row_terms(lse_BHGQ, rows_BQ, fill),
            _even_shares(keys_BHQ, fill) if keys_BHQ is not None and "count" in names else None,
            _flat(slopes_HG),
            _flat(noise_BHTG),
            *(outs.get(name) for name in NAMES),
            *q.stride()[:4],
            *k.stride()[:3],
            *positions.stride()[:2],
            B * H,
            H,
            Q + fill,
            T,
            past,
            sliding or 0,
            scale * LOG2E / tau,
            LOG2E / tau,
            G=G,
            D=D,
            PADDED=padded,
            BLOCK_N=block_n,
            BLOCK_M=block_m,
            SLIDING=sliding is not None,
            BY_POSITION=by_position,
            num_warps=warps,
            num_stages=stages,
        )
    return {name: out[0] if splits == 1 else out.sum(0) for name, out in outs.items()}


# ---- arguments of the kernels ----


def _check(
    q_BHGQD: Tensor,
    k_BHTD: Tensor,
    names: tuple[str, ...] = (),
    keys_BHQ: Tensor | None = None,
    noise_BHTG: Tensor | None = None,
) -> None:
    why = reason(q_BHGQD.dtype, q_BHGQD.shape[-1])
    if why is not None:
        raise ValueError(f"{why}; use the torch backend")
    if k_BHTD.dtype != q_BHGQD.dtype:
        raise ValueError(f"queries are {q_BHGQD.dtype} and keys {k_BHTD.dtype}; cast one to the other's dtype")
    unknown = set(names).difference(NAMES)
    if unknown:
        raise ValueError(f"no such statistic: {', '.join(sorted(unknown))}; choose among {', '.join(NAMES)}")
    if "count" in names and keys_BHQ is None:
        raise ValueError('"count" compares with an even share: pass keys_BHQ, how many keys each row attends to')
    if noise_BHTG is not None and noise_BHTG.shape != (wanted := (*k_BHTD.shape[:3], q_BHGQD.shape[2])):
        raise ValueError(f"noise has shape {tuple(noise_BHTG.shape)}, but [B,H,T,G] is {wanted}: one for each query head")


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _spans(rows_BQ: Tensor) -> Tensor:
    """Return the span of each batch row's real query rows, int64 [B,4].

    First real row; one past the last; 1 if all between are real and at consecutive positions; and then the difference of a
    row's position and its index. The host reads none of it, since that would wait for the device.
    """
    Q = rows_BQ.shape[1]
    index, real = torch.arange(Q, device=rows_BQ.device), rows_BQ >= 0
    first = torch.where(real, index, Q).amin(1)
    last = torch.where(real, index, -1).amax(1) + 1
    shifts = rows_BQ - index
    shift = shifts.gather(1, first.clamp(max=Q - 1)[:, None])
    regular = ((index < first[:, None]) | (index >= last[:, None]) | (real & (shifts == shift))).all(1)
    return torch.stack([first, last, regular.long(), shift[:, 0]], 1)


def _row_terms(lse_BHGQ: Tensor, rows_BQ: Tensor, fill: int) -> Tensor:
    """Return the normalizer of each row in base 2; +inf, which makes probabilities zero, for rows that do not exist."""
    counts = (rows_BQ >= 0)[:, None, None] & lse_BHGQ.isfinite()
    terms = torch.where(counts, lse_BHGQ.to(torch.float32) * LOG2E, math.inf)
    return F.pad(terms, (0, fill), value=math.inf).contiguous()


def _even_shares(keys_BHQ: Tensor, fill: int) -> Tensor:
    """Return 1 / keys; +inf for a row of one key, whose probability rounds to either side of one."""
    shares = keys_BHQ.to(torch.float32).reciprocal()
    return F.pad(shares.masked_fill(keys_BHQ <= 1, math.inf), (0, fill), value=math.inf).contiguous()


# ---- the grid, and tiles: keys, rows, warps, stages ----


def _row_splits(programs: int, row_blocks: int, group: int) -> int:
    """Return among how many programs to split the rows of one block of keys."""
    return max(1, min(triton.cdiv(PROGRAMS, programs), row_blocks, row_blocks * group // LEAST_TILES))


def _column_tile(dtype: torch.dtype, padded: int, Q: int) -> tuple[int, int, int, int]:
    rows = max(16, triton.next_power_of_2(Q))
    if dtype == torch.float32:  # no tensor cores: taller tiles, or fewer warps, spill registers
        return 64, min(rows, 32), 8, 2
    return 128, min(rows, 64), 4 if padded <= 128 else 8, 3 if padded <= 64 else 2


def _row_tile(dtype: torch.dtype, padded: int, Q: int) -> tuple[int, int, int, int]:
    rows = max(16, triton.next_power_of_2(Q))
    if dtype == torch.float32:
        return 32, min(rows, 64), 8, 2
    return 64, min(rows, 128), 8 if rows > 64 else 4, 3 if padded <= 128 else 2


# ---- kernels ----

# specializing on lengths that are multiples of 16 would cost seconds of compilation and gain nothing
_LENGTHS = ["positions_b", "positions_h", "Q", "T", "past", "sliding"]


@triton.jit(do_not_specialize=_LENGTHS)
def _columns_kernel(
    q_ptr, k_ptr, positions_ptr, rows_ptr, spans_ptr, terms_ptr, shares_ptr, slopes_ptr, noise_ptr,
    sum_ptr, squares_ptr, count_ptr,
    q_b, q_h, q_g, q_r, k_b, k_h, k_t, positions_b, positions_h,
    heads, H, Q, T, past, sliding, factor, bias_factor,
    G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SLIDING: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """Compute the column statistics of one block of keys, over one split of the rows that see it.

    Programs start in the order of the grid: the first keys, which most rows see, of all heads first.
    Q, the stride of rows, is a multiple of BLOCK_M.
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
        noise_tile = noise_ptr + bh * T * G + n * G
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
            x = tl.dot(k, tl.trans(q), input_precision="ieee") * factor - term[None, :]
            if slopes_ptr is not None or BY_POSITION or SLIDING:
                row_place = (tl.load(rows_ptr + b * Q + m) - origin).to(tl.float32)
                age = key_place[:, None] - row_place[None, :]
            if slopes_ptr is not None:
                x += tl.load(slopes_ptr + h * G + g) * bias_factor * age
            if noise_ptr is not None:
                x += (tl.load(noise_tile + g, mask=n < T, other=0.0) * bias_factor)[:, None]
            if part != 1:
                visible = (term != float("inf"))[None, :]
                if BY_POSITION:
                    visible = visible & (age <= 0)
                else:
                    visible = visible & (n[:, None] - past <= m[None, :])
                if SLIDING:
                    visible = visible & (-age < sliding)
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


@triton.jit(do_not_specialize=_LENGTHS)
def _normalisers_kernel(
    q_ptr, k_ptr, positions_ptr, rows_ptr, spans_ptr, slopes_ptr, noise_ptr, lse_ptr,
    q_b, q_h, q_g, q_r, k_b, k_h, k_t, positions_b, positions_h,
    H, Q, T, past, sliding, factor, bias_factor,
    G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SLIDING: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of one block of rows of one query head, updated online over the blocks of keys."""
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # the rows that see most start first, those of all heads
    bhg = tl.program_id(0).to(tl.int64)
    bh, g = bhg // G, bhg % G
    b, h = bh // H, bh % H
    m, d = m0 + tl.arange(0, BLOCK_M), tl.arange(0, PADDED)
    q_tile = q_ptr + b * q_b + h * q_h + g * q_g + m.to(tl.int64)[:, None] * q_r + d[None, :]
    q = tl.load(q_tile, mask=(m < Q)[:, None] & (d < D)[None, :], other=0.0)
    rows = tl.load(rows_ptr + b * Q + m, mask=m < Q, other=-1)
    origin = tl.max(rows, 0)
    row_place = (rows - origin).to(tl.float32)
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + h * G + g) * bias_factor
    if noise_ptr is not None:
        noise_tile = noise_ptr + bh * T * G + g

    # columns [lo, hi) can be seen; all rows see those up to `mid`
    first = tl.load(spans_ptr + b * 4).to(tl.int32)
    last = tl.load(spans_ptr + b * 4 + 1).to(tl.int32)
    lo = tl.zeros([], tl.int32)
    hi = tl.zeros([], tl.int32) + T
    if not BY_POSITION:
        lo = tl.where(past == 0, first, 0)
        if SLIDING:
            regular = tl.load(spans_ptr + b * 4 + 2) != 0
            lo = tl.where(regular & (past == 0), tl.maximum(lo, m0 - sliding + 1), lo)
        hi = tl.minimum(hi, past + tl.minimum(m0 + BLOCK_M, last))
    lo = lo // BLOCK_N * BLOCK_N
    hi = tl.where(origin < 0, lo, tl.maximum(hi, lo))
    mid = lo
    if not (BY_POSITION or SLIDING):
        mid = tl.minimum(lo + tl.maximum(past + m0 + 1 - lo, 0) // BLOCK_N * BLOCK_N, hi)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(2):
        if part == 0:
            start, stop = lo, mid
        else:
            start, stop = mid, hi
        for n0 in range(start, stop, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_tile = k_ptr + b * k_b + h * k_h + tl.cast(n0, tl.int64) * k_t
            k_tile = k_tile + tl.arange(0, BLOCK_N)[:, None] * k_t + d[None, :]
            k = tl.load(k_tile, mask=(n < T)[:, None] & (d < D)[None, :], other=0.0)
            positions = tl.load(positions_ptr + b * positions_b + h * positions_h + n, mask=n < T, other=-1)
            x = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
            if slopes_ptr is not None or BY_POSITION or SLIDING:
                age = (positions - origin).to(tl.float32)[None, :] - row_place[:, None]
            if slopes_ptr is not None:
                x += slope * age
            if noise_ptr is not None:
                x += (tl.load(noise_tile + n * G, mask=n < T, other=0.0) * bias_factor)[None, :]
            visible = (positions >= 0)[None, :]
            if part == 1:
                if BY_POSITION:
                    visible = visible & (age <= 0)
                else:
                    visible = visible & (n[None, :] - past <= m[:, None])
                if SLIDING:
                    visible = visible & (-age < sliding)
            x = tl.where(visible, x, float("-inf"))
            higher = tl.maximum(largest, tl.max(x, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: -inf minus -inf is NaN
            total = total * tl.exp2(largest - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
            largest = higher
    lse = tl.where((rows >= 0) & (total != 0), (largest + tl.log2(total)) * LN2, float("inf"))
    tl.store(lse_ptr + bhg * Q + m, lse, mask=m < Q)
