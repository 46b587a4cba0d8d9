"""GPT-NeoX Japanese: partial rotary positions; head by head the fused projection is its query, its key, its value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .adapter import Core, Forward, source_module
from .llama import LlamaAdapter


class GPTNeoXJapaneseAdapter(LlamaAdapter):
    """GPT-NeoX Japanese."""

    name = "gpt_neox_japanese"
    summary = "GPT-NeoX Japanese: partial rotary positions"
    classes = ("transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention",)

    projection = "dense"

    def run(self, attn: Any, own: Forward, core: Core, hidden_BQE: Tensor, call: dict[str, Any]) -> Any:
        return *super().run(attn, own, core, hidden_BQE, call), attn.dense_bias

    def project(
        self, attn: Any, hidden_BQE: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values, for `run`; rotate the first `rotary_ndims` channels of q and k."""
        q, k, v = self.project_unrotated(attn, hidden_BQE)
        n = attn.rotary_ndims  # channels that turn
        turned = source_module(attn).apply_rotary_pos_emb(q[..., :n], k[..., :n], *position_embeddings)
        q, k = (torch.cat([one, rest[..., n:]], -1) for one, rest in zip(turned, (q, k), strict=True))
        return q, k, v

    def project_unrotated(self, attn: Any, hidden_BQE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = attn.query_key_value(hidden_BQE).unflatten(-1, (attn.num_attention_heads, 3, attn.head_size))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        return q, k, v

    def scale(self, attn: Any) -> float:
        return 1.0 / attn.norm_factor

    def dropout(self, attn: Any) -> float:
        return attn.attention_dropout.p

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_attention_heads, attn.head_size
