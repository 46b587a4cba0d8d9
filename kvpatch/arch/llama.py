"""Llama: rotary positions, grouped queries."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .adapter import Adapter, project_heads, source_module
from .rotary import Rotary


class LlamaAdapter(Rotary, Adapter):
    """Llama, and base class of adapters of models with its rotary positions."""

    name = "llama"
    summary = "Llama 1 to 3 and their kin: rotary positions, GQA and MQA"
    classes: tuple[str, ...] = ("transformers.models.llama.modeling_llama.LlamaAttention",)

    projection = "o_proj"

    def project(
        self, attn: Any, hidden_BQE: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values [B,heads,Q,D], for `run`, and rotate queries and keys."""
        q, k, v = self.project_unrotated(attn, hidden_BQE)
        q, k = source_module(attn).apply_rotary_pos_emb(q, k, *position_embeddings)
        return q, k, v

    def project_unrotated(self, attn: Any, hidden_BQE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values [B,heads,Q,D]; `project` calls this, then rotates the first two."""
        return project_heads(hidden_BQE, attn.head_dim, attn.q_proj, attn.k_proj, attn.v_proj)

    def kv_shape(self, attn: nn.Module) -> tuple[int, int]:
        return attn.config.num_key_value_heads, attn.head_dim  # type: ignore[union-attr, return-value]
