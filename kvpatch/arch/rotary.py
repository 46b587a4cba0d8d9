"""Rotary positions as Llama has them: one table of the decoder, whose halves of a head turn together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .adapter import source_module


class Rotary:
    """Part of an adapter: every layer rotates queries and keys, all channels or the first ones, by `decoder.rotary_emb`."""

    turns_back = True

    def rotary_table(self, decoder: Any, device: torch.device, count: int) -> Any:
        """Build the cosines and sines of positions below `count`."""
        rotary = copy.deepcopy(decoder.rotary_emb)
        if hasattr(rotary, "original_inv_freq"):  # dynamic scaling remembers the longest text: start anew
            rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
        like = torch.empty(0, dtype=next(decoder.parameters()).dtype, device=device)
        return [table[0] for table in rotary(like, torch.arange(count, device=device)[None])]

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Apply positions `places_BHT` to queries or keys."""
        cos, sin = (one.to(x_BHTD.device)[places_BHT] for one in table)
        size = cos.shape[-1]
        if size < x_BHTD.shape[-1]:
            return torch.cat([self.rotate(attn, x_BHTD[..., :size], places_BHT, table), x_BHTD[..., size:]], -1)
        return x_BHTD * cos + source_module(attn).rotate_half(x_BHTD) * sin

    def rotate_back(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Undo `rotate` exactly, also where its table scales."""
        cos, sin = (one.to(x_BHTD.device, x_BHTD.dtype) for one in table)  # divided in the precision of x
        size = cos.square() + sin.square()
        return self.rotate(attn, x_BHTD, places_BHT, [cos / size, -sin / size])
