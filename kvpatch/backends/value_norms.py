"""Norms of projected values ||v W_O|| for two-stage selection, computed in blocks: no [B,H*G,T,E] tensor exists."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..policies.context import accumulator

CPU_BLOCK = 1 << 18  # elements of a block of projected values: 1 MiB of float32, about a core's L2 cache
DEVICE_BLOCK = 1 << 26


def projected_norms(v_BHTD: Tensor, rows_HGDE: Tensor, norm: int, wanted_BHT: Tensor | None = None) -> Tensor:
    """Norm (1 or 2) of v @ W_O for each query head, averaged over the group [B,H,T]; what is not wanted may be zero.

    As many heads as fit in a block go through one product: all of them for a new token, less than one for a long prompt.
    """
    (B, H, T, _), (_, G, _, E) = v_BHTD.shape, rows_HGDE.shape
    device, dtype = v_BHTD.device, accumulator(v_BHTD.dtype)
    on_cpu = device.type == "cpu"
    block = CPU_BLOCK if on_cpu else DEVICE_BLOCK
    v_HND, heads = rearrange(v_BHTD, "b h t d -> h (b t) d"), block // (G * E * max(B * T, 1))
    if heads:
        parts = zip(v_HND.split(heads), rows_HGDE.split(heads), strict=True)
        out_HN = torch.cat([_few(v.to(dtype), rows.to(device, dtype), norm) for v, rows in parts])
        return rearrange(out_HN, "h (b t) -> b h t", b=B).contiguous()
    out_HN, size = torch.zeros(H, B * T, dtype=dtype, device=device), max(block // (G * E), 16)
    for h in range(H):
        weight = rearrange(rows_HGDE[h], "g d e -> d (g e)").to(device, dtype)
        v_ND, at = v_HND[h], None
        if wanted_BHT is not None and on_cpu:  # on a device, finding the indices costs more than it saves
            at = wanted_BHT[:, h].reshape(-1).nonzero()[:, 0]
            v_ND = v_ND[at]
        norms = torch.cat([_many(part, weight, G, norm) for part in v_ND.to(dtype).split(size)])
        if at is None:
            out_HN[h] = norms
        else:
            out_HN[h, at] = norms
    return rearrange(out_HN, "h (b t) -> b h t", b=B).contiguous()


def _few(v_HND: Tensor, rows_HGDE: Tensor, norm: int) -> Tensor:
    """Norms [H,N] of a few tokens: one product for all heads, in which a weight is read as it lies."""
    v_KND = v_HND.repeat_interleave(rows_HGDE.shape[1], 0)
    y_KNE = torch.bmm(v_KND, rows_HGDE.flatten(0, 1))
    norms_KN = torch.linalg.vector_norm(y_KNE, norm, dim=-1)
    return norms_KN.unflatten(0, rows_HGDE.shape[:2]).mean(1)


def _many(v_ND: Tensor, weight: Tensor, G: int, norm: int) -> Tensor:
    """Norms [N] of many tokens of a head: one product for its group."""
    y_NE = v_ND @ weight
    if norm == 1:  # the mean over the group is one sum over all its elements, faster than vector_norm
        return y_NE.abs_().sum(-1) / G
    return torch.linalg.vector_norm(y_NE.unflatten(-1, (G, -1)), dim=-1).mean(-1)
