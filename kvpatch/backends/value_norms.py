"""Norms of projected values ||v W_O|| for two-stage selection, computed in blocks: no [B,H*G,T,E] tensor exists."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..policies.context import accumulator

CPU_BLOCK = 1 << 18  # elements of a block of projected values: 1 MiB of float32, about a core's L2 cache
DEVICE_BLOCK = 1 << 26


def projected_norms(v_BHTD: Tensor, rows_HGDE: Tensor, norm: int, wanted_BHT: Tensor | None = None) -> Tensor:
    """Return ||v W_O|| per query head, averaged over the group, [B,H,T].

    Heads are multiplied together as far as they fit into a block: all heads for a new token, parts of one for a long prompt.

    Args:
        v_BHTD: values.
        rows_HGDE: rows of the output projection per query head.
        norm: 1 or 2.
        wanted_BHT: bool, entries to compute; others may be zero. None computes all.
    """
    (B, H, T, _), (_, G, _, E) = v_BHTD.shape, rows_HGDE.shape
    device, dtype = v_BHTD.device, accumulator(v_BHTD.dtype)
    on_cpu = device.type == "cpu"
    block = CPU_BLOCK if on_cpu else DEVICE_BLOCK
    v_HTD, heads = v_BHTD.transpose(0, 1).flatten(1, 2), block // (G * E * max(B * T, 1))  # einops takes its time in a step
    if heads >= H:
        out_HT = _few(v_HTD.to(dtype), rows_HGDE.to(device, dtype), norm)
        return out_HT.unflatten(1, (B, T)).transpose(0, 1).contiguous()
    if heads:
        parts = zip(v_HTD.split(heads), rows_HGDE.split(heads), strict=True)
        out_HT = torch.cat([_few(v.to(dtype), rows.to(device, dtype), norm) for v, rows in parts])
        return rearrange(out_HT, "h (b t) -> b h t", b=B).contiguous()
    out_HT, size = torch.zeros(H, B * T, dtype=dtype, device=device), max(block // (G * E), 16)
    for h in range(H):
        weight = rearrange(rows_HGDE[h], "g d e -> d (g e)").to(device, dtype)
        v_TD, at = v_HTD[h], None
        if wanted_BHT is not None and on_cpu:  # on a device, finding the indices costs more than it saves
            at = wanted_BHT[:, h].reshape(-1).nonzero()[:, 0]
            v_TD = v_TD[at]
        norms = torch.cat([_many(part, weight, G, norm) for part in v_TD.to(dtype).split(size)])
        if at is None:
            out_HT[h] = norms
        else:
            out_HT[h, at] = norms
    return rearrange(out_HT, "h (b t) -> b h t", b=B).contiguous()


def _few(v_HTD: Tensor, rows_HGDE: Tensor, norm: int) -> Tensor:
    """Return norms [H,T] of a few tokens with one product for all heads, which reads the weights in place."""
    v_NTD = v_HTD.repeat_interleave(rows_HGDE.shape[1], 0)
    y_NTE = torch.bmm(v_NTD, rows_HGDE.flatten(0, 1))
    norms_NT = torch.linalg.vector_norm(y_NTE, norm, dim=-1)
    return norms_NT.unflatten(0, rows_HGDE.shape[:2]).mean(1)


def _many(v_TD: Tensor, weight: Tensor, G: int, norm: int) -> Tensor:
    """Return norms [T] of many tokens of one head with one product for its group."""
    y_TE = v_TD @ weight
    if norm == 1:  # the mean over the group is one sum over all its elements, faster than vector_norm
        return y_TE.abs_().sum(-1) / G
    return torch.linalg.vector_norm(y_TE.unflatten(-1, (G, -1)), dim=-1).mean(-1)
