"""Norms of projected values ||v W_O||, for two-stage selection; never [B,Hq,T,E] at once."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..policies.context import accumulator

CPU_BLOCK = 1 << 18  # numbers of a block of projected values: 1 MiB of float32, about a core's L2 cache
DEVICE_BLOCK = 1 << 26


def projected_norms(v_BHTD: Tensor, rows_HGDE: Tensor, norm: int, wanted_BHT: Tensor | None = None) -> Tensor:
    """Norm (1 or 2) of v @ W_O for each query head, averaged over the group [B,H,T]; zero where it is not wanted."""
    B, H, T, _ = v_BHTD.shape
    dtype = accumulator(v_BHTD.dtype)
    G, E = rows_HGDE.shape[1], rows_HGDE.shape[3]
    out = torch.zeros(B, H, T, dtype=dtype, device=v_BHTD.device)
    on_cpu = v_BHTD.device.type == "cpu"
    size = max((CPU_BLOCK if on_cpu else DEVICE_BLOCK) // (G * E), 16)
    for h in range(H):
        weight = rearrange(rows_HGDE[h], "g d e -> d (g e)").to(v_BHTD.device, dtype)
        for b in range(B):
            v_TD, at = v_BHTD[b, h], None
            if wanted_BHT is not None and on_cpu:  # elsewhere finding them out costs more than it saves
                at = wanted_BHT[b, h].nonzero()[:, 0]
                v_TD = v_TD[at]
            norms = torch.cat([_norms(block, weight, G, norm) for block in v_TD.to(dtype).split(size)])
            if at is None:
                out[b, h] = norms
            else:
                out[b, h, at] = norms
    return out


def _norms(v_TD: Tensor, weight: Tensor, G: int, norm: int) -> Tensor:
    y_TE = v_TD @ weight
    if norm == 1:  # the mean of the group's norms is that of all its numbers together; faster than vector_norm
        return y_TE.abs_().sum(-1) / G
    return torch.linalg.vector_norm(y_TE.unflatten(-1, (G, -1)), dim=-1).mean(-1)
