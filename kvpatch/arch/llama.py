"""Llama: rotary positions, grouped queries."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .adapter import Adapter, heads_first, source_module


class LlamaAdapter(Adapter):
    name = "llama"
    summary = "Llama 1 to 3 and their kin: rotary positions, GQA and MQA"
    classes = ("transformers.models.llama.modeling_llama.LlamaAttention",)

    def project(
        self, attn: Any, hidden_BQE: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (heads_first(proj(hidden_BQE), attn.head_dim) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = source_module(attn).apply_rotary_pos_emb(q, k, *position_embeddings)
        return q, k, v

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        return attn.o_proj(y_BQE)

    def kv_shape(self, attn: nn.Module) -> tuple[int, int]:
        return attn.config.num_key_value_heads, attn.head_dim  # type: ignore[union-attr, return-value]
