"""Llama: rotary positions, grouped queries."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Adapter, source_module


class LlamaAdapter(Adapter):
    """Llama, and base class of adapters of models with its rotary positions."""

    name = "llama"
    summary = "Llama 1 to 3 and their kin: rotary positions, GQA and MQA"
    classes: tuple[str, ...] = ("transformers.models.llama.modeling_llama.LlamaAttention",)

    projection = "o_proj"
    renumbers = turns_back = True

    def project(
        self, attn: Any, hidden_BQE: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.plain(attn, hidden_BQE)
        q, k = source_module(attn).apply_rotary_pos_emb(q, k, *position_embeddings)
        return q, k, v

    def plain(self, attn: Any, hidden_BQE: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*hidden_BQE.shape[:-1], -1, attn.head_dim)
        q = attn.q_proj(hidden_BQE).view(heads).transpose(1, 2)
        k = attn.k_proj(hidden_BQE).view(heads).transpose(1, 2)
        v = attn.v_proj(hidden_BQE).view(heads).transpose(1, 2)
        return q, k, v

    def rotary_table(self, decoder: Any, device: torch.device, count: int) -> Any:
        rotary = copy.deepcopy(decoder.rotary_emb)
        if hasattr(rotary, "original_inv_freq"):  # dynamic scaling remembers the longest text: start anew
            rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
        like = torch.empty(0, dtype=next(decoder.parameters()).dtype, device=device)
        return [table[0] for table in rotary(like, torch.arange(count, device=device)[None])]

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        cos, sin = (one.to(x_BHTD.device)[places_BHT] for one in table)
        return x_BHTD * cos + source_module(attn).rotate_half(x_BHTD) * sin

    def rotate_back(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        cos, sin = (one.to(x_BHTD.device, x_BHTD.dtype) for one in table)  # divided in the precision of x
        size = cos.square() + sin.square()
        return self.rotate(attn, x_BHTD, places_BHT, [cos / size, -sin / size])

    def kv_shape(self, attn: nn.Module) -> tuple[int, int]:
        return attn.config.num_key_value_heads, attn.head_dim  # type: ignore[union-attr, return-value]
