"""Arguments that the kernels of a prompt share: limits, layouts, and the spans of real rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOG2E = math.log2(math.e)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NOISE_BLOCK = 128  # keys of the widest tile
WIDEST = 256  # largest head size: a wider tile does not fit in shared memory
# specializing on lengths that are multiples of 16 would cost seconds of compilation and gain nothing
LENGTHS = ["positions_b", "positions_h", "Q", "T", "past", "sliding"]


def reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the prompt kernels cannot take queries of this dtype and size, or None.

    `check` calls it, and `reason` of triton_backend, when a backend is chosen.
    """
    if dtype not in DTYPES:
        return f"the Triton kernels take float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > WIDEST:
        return f"the Triton kernels take head sizes up to {WIDEST}, not {head_dim}"
    return None


def check(q_BHGQD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor | None = None, noise_BHTG: Tensor | None = None) -> None:
    """Raise ValueError for tensors that the kernels of a prompt would misread.

    `forward.attend` and others call it before a launch.
    """
    why = reason(q_BHGQD.dtype, q_BHGQD.shape[-1])
    if why is not None:
        raise ValueError(f"{why}; use the torch backend")
    if k_BHTD.dtype != q_BHGQD.dtype:
        raise ValueError(f"queries are {q_BHGQD.dtype} and keys {k_BHTD.dtype}; cast one to the other's dtype")
    if v_BHTD is not None and (v_BHTD.shape != k_BHTD.shape or v_BHTD.dtype != k_BHTD.dtype):
        sizes = f"{k_BHTD.dtype} {tuple(k_BHTD.shape)} and values {v_BHTD.dtype} {tuple(v_BHTD.shape)}"
        raise ValueError(f"keys are {sizes}, but the Triton kernels take values like the keys; use the torch backend")
    if noise_BHTG is not None and noise_BHTG.shape != (noise_shape := (*k_BHTD.shape[:3], q_BHGQD.shape[2])):
        raise ValueError(f"noise has shape {tuple(noise_BHTG.shape)}, but [B,H,T,G] is {noise_shape}: one for each query head")


def padded_size(D: int) -> int:
    """Return the width of a tile that holds heads of size D: a power of two, 16 or more."""
    return max(16, 1 << (D - 1).bit_length())


def tile_constants(
    G: int, D: int, tile: tuple[int, int, int, int], *, sliding: int | None, softcap: float | None, by_position: bool
) -> dict[str, Any]:
    """Return the constants and options that the launches of a prompt's kernels share. tile: keys, rows, warps and stages.

    `column_statistics` and `forward.attend` pass them on. by_position: the causal mask compares positions, not columns.
    """
    keys, rows, warps, stages = tile
    sizes = {"G": G, "D": D, "PADDED": padded_size(D), "BLOCK_N": keys, "BLOCK_M": rows}
    kind = {"SLIDING": sliding is not None, "BY_POSITION": by_position, "CAPPED": softcap is not None}
    return {**sizes, **kind, "num_warps": warps, "num_stages": stages}


def last_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, copied unless its last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def flatten_float(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor as contiguous float32; None stays None."""
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def noise_tiles(noise_BHTG: Tensor | None, tau: float, logarithm: bool) -> Tensor | None:
    """Return Keyformer's noise [B,H,G,T'] as kernels read it: exp(noise), a factor of exp(logits), from noise_BHTG.

    `column_statistics` and `forward.attend` call it before a launch; None stays None. logarithm: instead noise / tau in base 2,
    to be added to logits / tau. T' is a multiple of NOISE_BLOCK, so that a tile's loads are wide and need no mask.
    """
    if noise_BHTG is None:
        return None
    noise_BHGT = noise_BHTG.transpose(2, 3).to(torch.float32)
    if logarithm:
        noise_BHGT = noise_BHGT.log() * (LOG2E / tau)
    return F.pad(noise_BHGT, (0, -noise_BHGT.shape[-1] % NOISE_BLOCK)).contiguous()


def logit_units(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return `unit` and `inner`, factors by which kernels make logits in base 2, unit * x; `decode.step` and others call it.

    x is q k, or with a cap tanh(scale q k / softcap) = 1 - 2 / (1 + exp2(inner q k)).
    """
    return (scale * LOG2E, 0.0) if softcap is None else (softcap * LOG2E, 2.0 * scale * LOG2E / softcap)


def spans(rows_BQ: Tensor) -> Tensor:
    """Return where each text's query rows without padding lie, int64 [B,4].

    `_find_spans` computes it once for all layers of a prompt; else each launch does. The four numbers: the first real row; one
    past the last; 1 if all between are real and at consecutive positions, else 0; and, if so, what a row's position exceeds
    its index by. The host reads none of them, since that would wait for the device.
    """
    Q = rows_BQ.shape[1]
    index, real = torch.arange(Q, device=rows_BQ.device), rows_BQ >= 0
    first = torch.where(real, index, Q).amin(1)
    last = torch.where(real, index, -1).amax(1) + 1
    shifts = rows_BQ - index
    shift = shifts.gather(1, first.clamp(max=Q - 1)[:, None])
    regular = ((index < first[:, None]) | (index >= last[:, None]) | (real & (shifts == shift))).all(1)
    return torch.stack([first, last, regular.long(), shift[:, 0]], 1)
