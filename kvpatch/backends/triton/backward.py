"""Gradients of a replay's attention as two Triton kernels: one for the queries, one for keys and values.

Probabilities are computed again from the forward kernel's log-sum-exp, a tile at a time, so that memory grows with the text and
not with its square. With p = exp(x - lse), the output o and its gradient do:

    delta = sum(do * o)      ds = p * (do v - delta)      dq = scale * ds k      dk = scale * ds q      dv = p do

dk and dv are sums over rows and over the heads of the group. A program owns what it writes: there are no atomics, and results
are the same bits every time. columns.py says which columns a row sees; besides, a row at t sees a key only if t < deaths_BHT.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import LENGTHS, LOG2E, check, flatten_float, last_contiguous, logit_units, padded_size, spans

LOG2 = tl.constexpr(LOG2E)


def gradients(
    q_BHGQD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    positions_BHT: Tensor,
    rows_BQ: Tensor,
    deaths_BHT: Tensor,
    out_BHGQD: Tensor,
    lse_BHGQ: Tensor,
    grad_BHGQD: Tensor,
    *,
    scale: float,
    slopes_HG: Tensor | None = None,
    sliding: int | None = None,
    holes: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of a replay, by two kernels; 0 for padding.

    `gradients` of triton_backend calls it in the backward pass. A replay reads a text in one pass, for training; a row sees a
    key only before `deaths_BHT`, where a cache would evict it. out_BHGQD, lse_BHGQ: what `forward.attend` returned for these
    arguments. grad_BHGQD: gradient of the output. The columns are the rows' own tokens. holes: whether rows may be padding.
    """
    check(q_BHGQD, k_BHTD, v_BHTD)
    (B, H, G, Q, D), T = q_BHGQD.shape, k_BHTD.shape[2]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q_BHGQD, k_BHTD, v_BHTD))
    if not dq.numel():
        return dq, dk, dv
    # delta: sum of grad * out for each row, as in FlashAttention's backward; terms: log-sum-exp in base 2, +inf for padding
    real = (rows_BQ >= 0)[:, None, None]
    product = (grad_BHGQD.to(torch.float32) * out_BHGQD.to(torch.float32)).sum(-1)
    delta = torch.where(real, product, 0.0).contiguous()
    terms = torch.where(real & lse_BHGQ.isfinite(), lse_BHGQ * LOG2E, math.inf).contiguous()
    q, k, v, grad, positions = map(last_contiguous, (q_BHGQD, k_BHTD, v_BHTD, grad_BHGQD.to(q_BHGQD.dtype), positions_BHT))
    unit, _ = logit_units(scale, None)
    shared = (
        *(q, k, v, grad, positions, deaths_BHT.contiguous(), rows_BQ.contiguous(), spans(rows_BQ), terms, delta),
        flatten_float(slopes_HG),
    )
    strides = (*q.stride()[:4], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:4], *positions.stride()[:2])
    sizes = (H, Q, T, sliding or 0, unit, scale)

    def constants(tile: tuple[int, int, int, int]) -> dict[str, Any]:
        """Return the constants and options of a launch with this tile: keys, rows, warps and stages."""
        keys, rows, warps, stages = tile
        kind = {"PADDED": padded_size(D), "BLOCK_N": keys, "BLOCK_M": rows, "SLIDING": sliding is not None, "HOLES": holes}
        return {"G": G, "D": D, **kind, "num_warps": warps, "num_stages": stages}

    tiles = _choose_tiles(q.dtype, padded_size(D), Q)
    with torch.cuda.device_of(q):
        _queries_kernel[(B * H * G, triton.cdiv(Q, tiles[0][1]))](*shared, dq, *strides, *sizes, **constants(tiles[0]))
        _keys_kernel[(B * H, triton.cdiv(T, tiles[1][0]))](*shared, dk, dv, *strides, *sizes, **constants(tiles[1]))
    return dq, dk, dv


def _choose_tiles(dtype: torch.dtype, padded: int, Q: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return keys, rows, warps and stages of a tile of both gradient kernels, for the launches of `gradients`.

    Larger tiles, or fewer warps, spill registers. padded: head size of a tile. Q: query rows.
    """
    rows = max(16, triton.next_power_of_2(Q))
    if dtype == torch.float32:  # no tensor cores
        return (16, min(rows, 32), 8, 2), (32, min(rows, 16), 8, 2)
    if padded > 128:
        return (32, min(rows, 32), 8, 2), (32, min(rows, 32), 8, 2)
    return (32, min(rows, 64), 4, 2), (64, min(rows, 32), 4 if padded <= 64 else 8, 2)


@triton.jit(do_not_specialize=LENGTHS)
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, positions_ptr, deaths_ptr, rows_ptr, spans_ptr, terms_ptr, delta_ptr, slopes_ptr, dq_ptr,
    q_b, q_h, q_g, q_r, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_g, grad_r, positions_b, positions_h,
    H, Q, T, sliding, unit, scale,
    G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SLIDING: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dq of one block of queries of one query head, sums over the keys that they see; for `gradients`.

    terms: the rows' log-sum-exp in base 2. dq = scale * ds k with ds = p * (do v - delta). Programs of the rows that see most
    start first.
    """
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    bhg = tl.program_id(0).to(tl.int64)
    bh, g = bhg // G, bhg % G
    b, h = bh // H, bh % H
    m, d = m0 + tl.arange(0, BLOCK_M), tl.arange(0, PADDED)
    rows = tl.load(rows_ptr + b * Q + m, mask=m < Q, other=-1)
    origin = tl.max(rows, 0)
    row_place = (rows - origin).to(tl.float32)
    real = (rows >= 0)[:, None] & (d < D)[None, :]  # padding may hold any value
    far = m.to(tl.int64)[:, None]
    q = tl.load(q_ptr + b * q_b + h * q_h + g * q_g + far * q_r + d[None, :], mask=real, other=0.0)
    grad = tl.load(grad_ptr + b * grad_b + h * grad_h + g * grad_g + far * grad_r + d[None, :], mask=real, other=0.0)
    term = tl.load(terms_ptr + bhg * Q + m, mask=m < Q, other=float("inf"))
    delta = tl.load(delta_ptr + bhg * Q + m, mask=m < Q, other=0.0)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + h * G + g) * LOG2
        term += slope * row_place

    first = tl.load(spans_ptr + b * 4).to(tl.int32)
    last = tl.load(spans_ptr + b * 4 + 1).to(tl.int32)
    lo = first
    if SLIDING:
        regular = tl.load(spans_ptr + b * 4 + 2) != 0
        lo = tl.where(regular, tl.maximum(lo, m0 - sliding + 1), lo)
    lo = lo // BLOCK_N * BLOCK_N
    hi = tl.where(origin < 0, lo, tl.maximum(tl.minimum(m0 + BLOCK_M, last), lo))
    dq = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for step in range(tl.cdiv(hi - lo, BLOCK_N)):
        n0 = lo + step * BLOCK_N
        n = n0 + tl.arange(0, BLOCK_N)
        positions = tl.load(positions_ptr + b * positions_b + h * positions_h + n, mask=n < T, other=-1)
        deaths = tl.load(deaths_ptr + bh * T + n, mask=n < T, other=0)
        here = (n < T)[:, None] & (d < D)[None, :]
        if HOLES:  # an empty slot may hold any value
            here = here & (positions >= 0)[:, None]
        near = tl.arange(0, BLOCK_N)[:, None]
        k_tile = k_ptr + b * k_b + h * k_h + tl.cast(n0, tl.int64) * k_t + near * k_t + d[None, :]
        v_tile = v_ptr + b * v_b + h * v_h + tl.cast(n0, tl.int64) * v_t + near * v_t + d[None, :]
        k, v = tl.load(k_tile, mask=here, other=0.0), tl.load(v_tile, mask=here, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * unit - term[:, None]
        visible = (n[None, :] <= m[:, None]) & (row_place[:, None] < (deaths - origin).to(tl.float32)[None, :])
        if HOLES:
            visible = visible & (positions >= 0)[None, :]
        if SLIDING or slopes_ptr is not None:
            place = (positions - origin).to(tl.float32)
        if SLIDING:
            visible = visible & (row_place[:, None] - place[None, :] < sliding)
        if slopes_ptr is not None:
            x += (slope * place)[None, :]
        p = tl.exp2(tl.where(visible, x, float("-inf")))
        ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq_tile = dq_ptr + (bhg * Q + m)[:, None] * D + d[None, :]
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(m < Q)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, positions_ptr, deaths_ptr, rows_ptr, spans_ptr, terms_ptr, delta_ptr, slopes_ptr,
    dk_ptr, dv_ptr,
    q_b, q_h, q_g, q_r, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_g, grad_r, positions_b, positions_h,
    H, Q, T, sliding, unit, scale,
    G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SLIDING: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dk and dv of one block of keys and values of one KV head, summed over the rows; for `gradients`.

    terms: the rows' log-sum-exp in base 2. dk = scale * ds q with ds = p * (do v - delta), and dv = p do.
    Rows from the block's last death (the position at which its last key is evicted) on are left out. The programs of the first
    keys, which most rows may see, start first.
    """
    n0 = tl.program_id(1) * BLOCK_N
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    n, d = n0 + tl.arange(0, BLOCK_N), tl.arange(0, PADDED)
    positions = tl.load(positions_ptr + b * positions_b + h * positions_h + n, mask=n < T, other=-1)
    deaths = tl.load(deaths_ptr + bh * T + n, mask=n < T, other=0)
    held = (positions >= 0)[:, None] & (d < D)[None, :]  # an empty slot may hold any value
    far = n.to(tl.int64)[:, None]
    k = tl.load(k_ptr + b * k_b + h * k_h + far * k_t + d[None, :], mask=held, other=0.0)
    v = tl.load(v_ptr + b * v_b + h * v_h + far * v_t + d[None, :], mask=held, other=0.0)
    origin = tl.max(positions, 0)
    key_place, death_place = (positions - origin).to(tl.float32), (deaths - origin).to(tl.float32)

    first = tl.load(spans_ptr + b * 4).to(tl.int32)
    last = tl.load(spans_ptr + b * 4 + 1).to(tl.int32)
    regular = tl.load(spans_ptr + b * 4 + 2) != 0
    shift = tl.load(spans_ptr + b * 4 + 3)  # of a row's position and its index
    lo = tl.maximum(first, n0) // BLOCK_M * BLOCK_M
    end = tl.max(tl.where(positions >= 0, deaths, 0), 0).to(tl.int64)
    if SLIDING:
        end = tl.minimum(end, origin + sliding)
    hi = tl.where(regular, tl.minimum(last.to(tl.int64), end - shift), last)
    hi = tl.where(origin < 0, lo, tl.maximum(hi, lo)).to(tl.int32)
    dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED], tl.float32)
    # one loop over rows and heads, so that the next queries are prefetched across both
    for step in range(tl.cdiv(hi - lo, BLOCK_M) * G):
        g, m0 = tl.cast(step % G, tl.int64), lo + step // G * BLOCK_M
        m = m0 + tl.arange(0, BLOCK_M)
        rows = tl.load(rows_ptr + b * Q + m, mask=m < Q, other=-1)
        here = (m < Q)[:, None] & (d < D)[None, :]
        if HOLES:
            here = here & (rows >= 0)[:, None]
        near = tl.arange(0, BLOCK_M)[:, None]
        q_tile = q_ptr + b * q_b + h * q_h + g * q_g + tl.cast(m0, tl.int64) * q_r + near * q_r + d[None, :]
        grad_tile = grad_ptr + b * grad_b + h * grad_h + g * grad_g + tl.cast(m0, tl.int64) * grad_r + near * grad_r
        q = tl.load(q_tile, mask=here, other=0.0)
        grad = tl.load(grad_tile + d[None, :], mask=here, other=0.0)
        term = tl.load(terms_ptr + (bh * G + g) * Q + m, mask=m < Q, other=float("inf"))
        delta = tl.load(delta_ptr + (bh * G + g) * Q + m, mask=m < Q, other=0.0)
        row_place = (rows - origin).to(tl.float32)
        x = tl.dot(k, tl.trans(q), input_precision="ieee") * unit
        visible = (n[:, None] <= m[None, :]) & (row_place[None, :] < death_place[:, None])
        visible = visible & (positions >= 0)[:, None]
        if SLIDING:
            visible = visible & (row_place[None, :] - key_place[:, None] < sliding)
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + h * G + g) * LOG2
            x += (slope * key_place)[:, None]
            term += slope * row_place
        p = tl.exp2(tl.where(visible, x - term[None, :], float("-inf")))
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    at, mask = (bh * T + n)[:, None] * D + d[None, :], (n < T)[:, None] & (d < D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=mask)
