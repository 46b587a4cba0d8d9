"""GPT-J: rotary positions on the first `rotary_dim` numbers of a head, interleaved in pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter, source_module


class GPTJAdapter(Adapter):
    name = "gptj"
    summary = "GPT-J: partial rotary positions"
    classes = (
        "transformers.models.gptj.modeling_gptj.GPTJAttention",
        "transformers.models.gptj.modeling_gptj.GPTJFlashAttention2",
    )

    def project(self, attn: Any, hidden_BQE: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            proj(hidden_BQE).unflatten(-1, (-1, attn.head_dim)) for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        table = attn.embed_positions.to(hidden_BQE.device)
        sin, cos = table[position_ids.to(hidden_BQE.device)].to(k.dtype).chunk(2, -1)
        turned, rotate = attn.rotary_dim or attn.head_dim, source_module(attn).apply_rotary_pos_emb
        q, k = (torch.cat([rotate(t[..., :turned], sin, cos), t[..., turned:]], -1) for t in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        return attn.resid_dropout(attn.out_proj(y_BQE))

    def scale(self, attn: Any) -> float:
        return attn.head_dim**-0.5

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_attention_heads, attn.head_dim

    def max_positions(self, config: Any) -> int | None:
        return config.max_position_embeddings
