"""Norms of projected values ||v W_O|| for two-stage selection, computed in blocks: no [B,H*G,T,E] tensor exists."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..policies.context import accumulator

CPU_BLOCK = 1 << 18  # elements of a block of projected values: 1 MiB of float32, about a core's L2 cache
DEVICE_BLOCK = 1 << 26
WIDE_SUMS = ("cuda", "meta")  # devices on which torch.bmm takes out_dtype


def projected_norms(v_BHTD: Tensor, rows_HGDE: Tensor, norm: int, wanted_BHT: Tensor | None = None) -> Tensor:
    """Return the norm ||v W_O|| of each projected value, averaged over the query heads that share a KV head: [B,H,T].

    `Call._project_norms` calls it for selections that weigh values, such as CriticalKV's. Changes nothing. Heads are multiplied
    together as far as they fit into a block: all heads for a new token, parts of one for a long prompt. On CUDA products of
    16-bit numbers are summed in float32 without a float32 copy of the weight.

    Args:
        v_BHTD: values.
        rows_HGDE: rows of the output projection W_O that belong to each query head; E is the hidden size.
        norm: 1 or 2.
        wanted_BHT: bool, tokens whose norms are computed; those of others may be zero. None: all tokens.
    """
    (B, H, T, _), (_, G, _, E) = v_BHTD.shape, rows_HGDE.shape
    device, dtype = v_BHTD.device, accumulator(v_BHTD.dtype)  # float32 for 16 bits
    on_cpu, block = device.type == "cpu", _choose_block(device)
    v_HTD = v_BHTD.transpose(0, 1).flatten(1, 2)
    if E * B * T <= block:
        out_NT = torch.empty(H * G, B * T, dtype=dtype, device=device)
        head_norms(v_HTD, rows_HGDE, norm, out_NT)
        return rearrange(out_NT.unflatten(0, (H, G)).mean(1), "h (b t) -> b h t", b=B).contiguous()
    out_HT, size = torch.zeros(H, B * T, dtype=dtype, device=device), max(block // (G * E), 16)
    for h in range(H):
        weight = rearrange(rows_HGDE[h], "g d e -> d (g e)").to(device, dtype if on_cpu else None)
        v_TD, token_index = v_HTD[h], None
        if wanted_BHT is not None and on_cpu:  # on a device, finding the indices costs more than it saves
            token_index = wanted_BHT[:, h].reshape(-1).nonzero()[:, 0]
            v_TD = v_TD[token_index]
        norms = torch.cat([_norm_many(part, weight, G, norm) for part in v_TD.split(size)])
        if token_index is None:
            out_HT[h] = norms
        else:
            out_HT[h, token_index] = norms
    return rearrange(out_HT, "h (b t) -> b h t", b=B).contiguous()


def head_norms(v_HTD: Tensor, rows_HGDE: Tensor, norm: int, out_NT: Tensor) -> None:
    """Write the norms ||v W_O|| of a few tokens to `out_NT` [H*G,T]: a row for each query head.

    `Call.write_norms` calls it in each decode step, and `projected_norms` where a text is short. norm: 1 or 2.
    """
    (_, T, _), (_, G, _, E) = v_HTD.shape, rows_HGDE.shape
    v_NTD = v_HTD if G == 1 else v_HTD.repeat_interleave(G, 0)
    rows_NDE, size = rows_HGDE.flatten(0, 1), max(_choose_block(v_HTD.device) // (E * max(T, 1)), 1)
    if size >= len(v_NTD):  # a decode step, whose Python counts
        torch.linalg.vector_norm(_multiply_values(v_NTD, rows_NDE), norm, dim=-1, out=out_NT)
        return
    for n in range(0, len(v_NTD), size):
        heads = slice(n, n + size)
        torch.linalg.vector_norm(_multiply_values(v_NTD[heads], rows_NDE[heads]), norm, dim=-1, out=out_NT[heads])


def _choose_block(device: torch.device) -> int:
    """Return how many elements of projected values may exist at a time on this device."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


def _multiply_values(v_NTD: Tensor, rows_NDE: Tensor) -> Tensor:
    """Return projected values v W_O, for `head_norms` and `_norm_many`, in float32 if values have 16 bits."""
    dtype, device = accumulator(v_NTD.dtype), v_NTD.device
    if v_NTD.dtype == rows_NDE.dtype != dtype and device.type in WIDE_SUMS:  # 16 bits, float32 sums
        return torch.bmm(v_NTD, rows_NDE.to(device), out_dtype=dtype)
    return torch.bmm(v_NTD.to(dtype), rows_NDE.to(device, dtype))


def _norm_many(v_TD: Tensor, weight: Tensor, G: int, norm: int) -> Tensor:
    """Return the norms ||v W_O|| [T] of tokens of one KV head, averaged over the G query heads that share it.

    For `projected_norms` where a prompt is long; `head_norms` serves few tokens. weight [D,G*E]: the blocks of W_O, [D,E],
    of these query heads, side by side; E is the hidden size. norm: 1 or 2.
    """
    y_TE = _multiply_values(v_TD[None], weight[None])[0]
    if norm == 1:  # the mean over the group is one sum over all its elements, faster than vector_norm
        return y_TE.abs_().sum(-1) / G
    return torch.linalg.vector_norm(y_TE.unflatten(-1, (G, -1)), dim=-1).mean(-1)
