"""Attention of a prompt as a Triton kernel: output, log-sum-exp, and Keyformer's noisy log-sum-exp, in one pass over the keys.

One program owns a block of rows of one query head and loops over the blocks of keys that these rows can see; the softmax is
updated online. There are no gradients. Each result is optional: without values this is the pass that gives the statistics
their normalizers, and with attention's own log-sum-exp the noisy one needs no running maximum.

columns.py says which columns a row sees, what their logits are, and how kernels name things. Attention sinks are further logits
of the softmax; the noisy softmax, over (logits + noise) / tau, has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
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

ROOMY = (9, 10)  # compute capabilities of GPUs that hold a tile's queries in shared memory, of which a block may have 227 KB
ELSEWHERE = (9, 0)  # compute capability that tiles are chosen for where there is no GPU
LN2, LOG2 = tl.constexpr(math.log(2)), tl.constexpr(LOG2E)


@dataclass
class ForwardOutput:
    """Output [B,H,G,Q,D], empty without values, and log-sum-exps [B,H,G,Q], float32, of the logits and of the noisy ones."""

    out: Tensor
    lse: Tensor
    noisy: Tensor | None


def attend(
    q_BHGQD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor | None,
    positions_BHT: Tensor,
    rows_BQ: Tensor,
    *,
    scale: float,
    slopes_HG: Tensor | None = None,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks_HG: Tensor | None = None,
    past: int = 0,
    by_position: bool = False,
    holes: bool = True,
    noise_BHTG: Tensor | None = None,
    tau: float = 1.0,
    lse_BHGQ: Tensor | None = None,
    spans_B4: Tensor | None = None,
    deaths_BHT: Tensor | None = None,
) -> ForwardOutput:
    """Attend from all rows of a prompt by one kernel, or compute their log-sum-exps alone.

    `attend` of triton_backend calls it, and `statistics` and `window_sums` where log-sum-exps are missing. Padding and rows
    that see nothing have output 0 and log-sum-exp +inf. v_BHTD: None for no output. holes: whether slots may be empty or rows
    padding. noise_BHTG: exp(noise); None for no noisy log-sum-exp. lse_BHGQ: log-sum-exp of the logits, if known; then only the
    noisy one is computed. spans_B4: `spans` of the rows, if they are known. deaths_BHT: int32, position of the first row that
    no longer sees a key; None: all later rows do.
    """
    v_BHTD = v_BHTD if lse_BHGQ is None else None
    check(q_BHGQD, k_BHTD, v_BHTD, noise_BHTG)
    (B, H, G, Q, D), T = q_BHGQD.shape, k_BHTD.shape[2]
    # as a model takes it: the heads of a token next to each other
    out = None if v_BHTD is None else q_BHGQD.new_empty(B, Q, H, G, D).permute(0, 2, 3, 1, 4)
    like: dict[str, Any] = {"size": (B, H, G, Q), "dtype": torch.float32, "device": q_BHGQD.device}
    lse = torch.empty(**like) if lse_BHGQ is None else lse_BHGQ
    noisy = None if noise_BHTG is None else torch.empty(**like)
    result = ForwardOutput(q_BHGQD.new_empty(0) if out is None else out, lse, noisy)
    if not B * H * G * Q:
        return result
    tempered = tau != 1.0  # the noisy softmax has a temperature
    noise = noise_tiles(noise_BHTG, tau, logarithm=tempered)
    # a program takes tile[1] query rows of one head
    chip = torch.cuda.get_device_capability(q_BHGQD.device) if q_BHGQD.is_cuda else ELSEWHERE
    tile = _choose_tile(q_BHGQD.dtype, padded_size(D), Q, v_BHTD is not None, chip[0])
    q, k, positions = (last_contiguous(tensor) for tensor in (q_BHGQD, k_BHTD, positions_BHT))
    v = None if v_BHTD is None else last_contiguous(v_BHTD)
    unit, inner = logit_units(scale, softcap)
    # tensors, their strides, sizes, factors of the logits, and constants
    with torch.cuda.device_of(q):
        _forward_kernel[(B * H * G, triton.cdiv(Q, tile[1]))](
            q,
            k,
            v,
            positions,
            rows_BQ.contiguous(),
            spans(rows_BQ) if spans_B4 is None else spans_B4,
            flatten_float(slopes_HG),
            flatten_float(sinks_HG),
            noise,
            None if deaths_BHT is None else deaths_BHT.contiguous(),
            None if lse_BHGQ is None or tempered else lse_BHGQ.contiguous(),
            out,
            lse if lse_BHGQ is None else None,
            noisy,
            *q.stride()[:4],
            *k.stride()[:3],
            *((0, 0, 0) if v is None else v.stride()[:3]),
            *((0, 0, 0, 0) if out is None else out.stride()[:4]),
            *positions.stride()[:2],
            0 if noise is None else noise.shape[-1],
            H,
            Q,
            T,
            past,
            sliding or 0,
            unit,
            inner,
            LOG2E / unit,
            1.0 / tau,
            HOLES=holes or by_position,
            TEMPERED=tempered,
            **tile_constants(G, D, tile, sliding=sliding, softcap=softcap, by_position=by_position),
        )
    return result


def _choose_tile(dtype: torch.dtype, padded: int, Q: int, values: bool, chip: int) -> tuple[int, int, int, int]:
    """Return keys, rows, warps and stages of a tile, for a launch of `attend` on a GPU of compute capability `chip`.

    values: the output is computed, not the log-sum-exp alone. Larger tiles, or fewer warps, spill registers.
    """
    rows, roomy = max(16, triton.next_power_of_2(Q)), chip in ROOMY
    if dtype == torch.float32:  # no tensor cores
        return (16, min(rows, 32), 8, 2) if values else (32, min(rows, 64), 8, 2)
    if values and padded > 128:
        return 32, min(rows, 64), 8 if rows > 32 else 4, 3 if roomy else 2
    keys = 64 if roomy or (values and padded < 128) else 32
    return keys, min(rows, 128), 8 if rows > 64 else 4, 3 if padded <= 128 else 2


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, rows_ptr, spans_ptr, slopes_ptr, sinks_ptr, noise_ptr, deaths_ptr, base_ptr,
    out_ptr, lse_ptr, noisy_ptr,
    q_b, q_h, q_g, q_r, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_g, out_r, positions_b, positions_h, noise_g,
    H, Q, T, past, sliding, unit, inner, log2e_per_unit, inverse_tau,
    G: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    SLIDING: tl.constexpr, BY_POSITION: tl.constexpr, HOLES: tl.constexpr, CAPPED: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """Attend from one block of rows of one query head to the keys that they see; store output and log-sum-exps. For `attend`.

    A program goes over the blocks of keys that all its rows see, and then, with a mask, over the others: an online softmax.
    Logits in base 2 are unit * x, of the noisy ones inverse_tau times that. A pointer is None for what is not there or not
    wanted. Programs start in the order of the grid: the rows that see most, of all heads, first.
    """
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    bhg = tl.program_id(0).to(tl.int64)
    bh, g = bhg // G, bhg % G
    b, h = bh // H, bh % H
    m, d = m0 + tl.arange(0, BLOCK_M), tl.arange(0, PADDED)
    q_tile = q_ptr + b * q_b + h * q_h + g * q_g + m.to(tl.int64)[:, None] * q_r + d[None, :]
    q = tl.load(q_tile, mask=(m < Q)[:, None] & (d < D)[None, :], other=0.0)
    rows = tl.load(rows_ptr + b * Q + m, mask=m < Q, other=-1)
    # positions are subtracted as integers: the differences are small, and exact as float32
    origin = tl.max(rows, 0)
    row_place = (rows - origin).to(tl.float32)
    row_bias = 0.0  # a row's share of ALiBi, in base 2
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + h * G + g)
        row_bias = slope * LOG2 * row_place
    if noise_ptr is not None:
        noise_tile = noise_ptr + bhg * noise_g

    # columns [lo, hi) can be seen, and all rows see all of [begin, mid)
    first = tl.load(spans_ptr + b * 4).to(tl.int32)
    last = tl.load(spans_ptr + b * 4 + 1).to(tl.int32)
    straight = (tl.load(spans_ptr + b * 4 + 2) != 0) & (past == 0)  # positions are columns plus the shift
    column_origin = (origin - tl.load(spans_ptr + b * 4 + 3)).to(tl.int32)
    lo = tl.zeros([], tl.int32)
    hi = tl.zeros([], tl.int32) + T
    begin, mid = lo, lo
    if not BY_POSITION:
        lo = tl.where(past == 0, first, 0)
        if SLIDING:
            lo = tl.where(straight, tl.maximum(lo, m0 - sliding + 1), lo)
        hi = tl.minimum(hi, past + tl.minimum(m0 + BLOCK_M, last))
    lo = lo // BLOCK_N * BLOCK_N
    hi = tl.where(origin < 0, lo, tl.maximum(hi, lo))
    if not BY_POSITION:
        begin = lo
        if HOLES or SLIDING:
            begin = tl.where(past == 0, first, 0)
            if SLIDING:
                begin = tl.maximum(begin, m0 + BLOCK_M - sliding)
            begin = tl.cdiv(begin, BLOCK_N) * BLOCK_N
        mid = tl.minimum((past + m0 + 1) // BLOCK_N * BLOCK_N, hi // BLOCK_N * BLOCK_N)
        if HOLES or SLIDING or slopes_ptr is not None:
            mid = tl.where(straight, mid, 0)
    begin = tl.minimum(tl.maximum(begin, lo), tl.cdiv(hi, BLOCK_N) * BLOCK_N)
    mid = tl.maximum(mid, begin)
    if deaths_ptr is not None:
        begin, mid = lo, lo  # a key of any block may be dead

    # the softmax so far: each row's largest logit, and the sum of exp2(logit - largest); a sink is its first logit
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        largest = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h * G + g) * LOG2 + row_bias
        total += 1.0
    base = largest
    if base_ptr is not None:
        base = tl.load(base_ptr + bhg * Q + m, mask=m < Q, other=float("inf")) * LOG2 + row_bias
    noisy_largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    noisy_total = tl.zeros([BLOCK_M], tl.float32)
    if out_ptr is not None:
        out = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for masked in tl.static_range(2):
        if masked:
            steps = (begin - lo) // BLOCK_N + tl.cdiv(tl.maximum(hi - mid, 0), BLOCK_N)
        else:
            steps = (mid - begin) // BLOCK_N
        for step in range(steps):
            if masked:
                n0 = lo + step * BLOCK_N
                n0 = tl.where(n0 >= begin, n0 + mid - begin, n0)
            else:
                n0 = begin + step * BLOCK_N
            n = n0 + tl.arange(0, BLOCK_N)
            here = (n < T)[:, None] & (d < D)[None, :] if masked else (d < D)[None, :]
            k_tile = k_ptr + b * k_b + h * k_h + tl.cast(n0, tl.int64) * k_t
            k_tile = k_tile + tl.arange(0, BLOCK_N)[:, None] * k_t + d[None, :]
            k = tl.load(k_tile, mask=here, other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            if CAPPED:
                x = cap_products(x, inner)
            if masked:
                if HOLES or SLIDING or slopes_ptr is not None:
                    positions = tl.load(positions_ptr + b * positions_b + h * positions_h + n, mask=n < T, other=-1)
                    place = (positions - origin).to(tl.float32)
                if BY_POSITION:
                    visible = place[None, :] <= row_place[:, None]
                else:
                    visible = n[None, :] - past <= m[:, None]
                if HOLES:
                    visible = visible & (positions >= 0)[None, :]
                if SLIDING:
                    visible = visible & (row_place[:, None] - place[None, :] < sliding)
                if deaths_ptr is not None:
                    deaths = tl.load(deaths_ptr + bh * T + n, mask=n < T, other=0)
                    visible = visible & (row_place[:, None] < (deaths - origin).to(tl.float32)[None, :])
            elif slopes_ptr is not None:
                place = (n - column_origin).to(tl.float32)
            if slopes_ptr is not None:
                x += (slope * log2e_per_unit * place)[None, :]
            if masked:
                x = tl.where(visible, x, float("-inf"))
            if lse_ptr is not None:
                higher = tl.maximum(largest, tl.max(x, 1) * unit)
                base = tl.where(higher == float("-inf"), 0.0, higher) if masked else higher  # -inf minus -inf is NaN
                shrunk = tl.exp2(largest - base)
                largest = higher
                p = tl.exp2(x * unit - base[:, None])
                total = total * shrunk + tl.sum(p, 1)
            if noise_ptr is not None:
                noise = tl.load(noise_tile + n)
                if TEMPERED:  # other logits, which need a maximum of their own
                    y = x * (unit * inverse_tau) + noise[None, :]
                    higher = tl.maximum(noisy_largest, tl.max(y, 1))
                    noisy_base = tl.where(higher == float("-inf"), 0.0, higher)
                    noisy_total = noisy_total * tl.exp2(noisy_largest - noisy_base)
                    noisy_total += tl.sum(tl.exp2(y - noisy_base[:, None]), 1)
                    noisy_largest = higher
                else:
                    if base_ptr is not None:
                        p = tl.exp2(x * unit - base[:, None])
                    else:
                        noisy_total = noisy_total * shrunk
                    noisy_total += tl.sum(p * noise[None, :], 1)
            if out_ptr is not None:
                if masked and HOLES:  # an empty slot may hold any value
                    here = here & (positions >= 0)[:, None]
                v_tile = v_ptr + b * v_b + h * v_h + tl.cast(n0, tl.int64) * v_t
                v_tile = v_tile + tl.arange(0, BLOCK_N)[:, None] * v_t + d[None, :]
                v = tl.load(v_tile, mask=here, other=0.0)
                out = tl.dot(p.to(v.dtype), v, out * shrunk[:, None], input_precision="ieee")

    real = tl.load(rows_ptr + b * Q + m, mask=m < Q, other=-1) >= 0  # once more: registers are short in the loops
    if lse_ptr is not None:
        seen = real & (total != 0)
        lse = tl.where(seen, (largest + tl.log2(total) - row_bias) * LN2, float("inf"))
        tl.store(lse_ptr + bhg * Q + m, lse, mask=m < Q)
    if noisy_ptr is not None:
        if TEMPERED:
            noisy = noisy_largest + tl.log2(noisy_total) - row_bias * inverse_tau
        else:
            noisy = base + tl.log2(noisy_total) - row_bias
        noisy = tl.where(real & (noisy_total != 0), noisy * LN2, float("inf"))
        tl.store(noisy_ptr + bhg * Q + m, noisy, mask=m < Q)
    if out_ptr is not None:
        out = tl.where(seen[:, None], out / total[:, None], 0.0)
        out_tile = out_ptr + b * out_b + h * out_h + g * out_g + m.to(tl.int64)[:, None] * out_r + d[None, :]
        tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=(m < Q)[:, None] & (d < D)[None, :])
