"""Falcon: rotary positions or ALiBi; one fused projection whose heads may share keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .bloom import alibi_slopes
from .llama import LlamaAdapter


class FalconAdapter(LlamaAdapter):
    """Falcon, with rotary positions or ALiBi by its configuration."""

    name = "falcon"
    summary = "Falcon: rotary positions or ALiBi, MQA and GQA"
    classes = (
        "transformers.models.falcon.modeling_falcon.FalconAttention",
        "transformers.models.falcon.modeling_falcon.FalconFlashAttention2",
    )

    projection = "dense"
    distances_from_mask = True

    def project(
        self, attn: Any, hidden_BQE: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values, for `run`; rotate the first two, unless positions are ALiBi's."""
        if attn.config.alibi:
            return self.project_unrotated(attn, hidden_BQE)
        return super().project(attn, hidden_BQE, position_embeddings)

    def project_unrotated(self, attn: Any, hidden_BQE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values [B,heads,Q,D], for `project`; the fused weight is by KV head."""
        qkv = attn.query_key_value(hidden_BQE).unflatten(-1, (attn.num_kv_heads, -1, attn.head_dim))
        q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]  # last of each KV head: its key, its value
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        return x_BHTD if attn.config.alibi else super().rotate(attn, x_BHTD, places_BHT, table)

    def scale(self, attn: Any) -> float:
        return attn.inv_norm_factor

    def slopes(self, attn: Any) -> Tensor | None:
        return alibi_slopes(attn) * attn.inv_norm_factor if attn.config.alibi else None

    def coarse(self, attn: Any) -> float | None:
        """Return the factor of ALiBi, whose slopes, positions and products the model rounds to bfloat16; None without ALiBi."""
        return attn.inv_norm_factor if attn.config.alibi else None

    def overrides(self, decoder: Any) -> dict[str, Any]:
        return {"use_alibi": False} if decoder.config.alibi else {}

    def dropout(self, attn: Any) -> float:
        return attn.attention_dropout.p if attn.config.alibi else 0.0  # the model has no dropout with rotary positions

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_kv_heads, attn.head_dim
