"""GPT-2 and Cerebras-GPT: learned positions, added to the hidden state before attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .adapter import IN_HIDDEN_STATES, Adapter, heads_first


class GPT2Adapter(Adapter):
    """GPT-2 and models with its attention class."""

    name = "gpt2"
    summary = "GPT-2 and Cerebras-GPT: learned positions"
    classes = ("transformers.models.gpt2.modeling_gpt2.GPT2Attention",)

    projection = "c_proj"
    why_not = IN_HIDDEN_STATES
    turns_back = True  # nothing is rotated

    def project(self, attn: Any, hidden_BQE: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (heads_first(t, attn.head_dim) for t in attn.c_attn(hidden_BQE).split(attn.split_size, dim=2))
        return q, k, v

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        return attn.resid_dropout(attn.c_proj(y_BQE))

    def scale(self, attn: Any) -> float:
        scale = attn.head_dim**-0.5 if attn.scale_attn_weights else 1.0
        return scale / (attn.layer_idx + 1) if attn.scale_attn_by_inverse_layer_idx else scale

    def dropout(self, attn: Any) -> float:
        return attn.attn_dropout.p

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_heads, attn.head_dim

    def max_positions(self, config: Any) -> int | None:
        return config.max_position_embeddings
