"""MPT: ALiBi, one fused projection that may be clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .adapter import Adapter, heads_first, source_module


@functools.cache
def _read_slopes(build: Callable[[int, int], Tensor], n_heads: int) -> Tensor:
    """Read ALiBi's slopes, for `slopes`, from the model's table for two tokens: the older one's bias is minus the slope."""
    return -build(n_heads, 2)[:, 0, 0]


class MptAdapter(Adapter):
    """MPT."""

    name = "mpt"
    summary = "MPT: ALiBi"
    classes = ("transformers.models.mpt.modeling_mpt.MptAttention",)

    projection = "out_proj"
    renumbers = turns_back = True

    def project(self, attn: Any, hidden_BQE: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values, for `run`, clipped if the model says so; none is rotated."""
        qkv = attn.Wqkv(hidden_BQE)
        if attn.clip_qkv:
            qkv = qkv.clamp(-attn.clip_qkv, attn.clip_qkv)
        q, k, v = (heads_first(t, attn.head_dim) for t in qkv.chunk(3, dim=2))
        return q, k, v

    def scale(self, attn: Any) -> float:
        return attn.softmax_scale

    def slopes(self, attn: Any) -> Tensor | None:
        return _read_slopes(source_module(attn).build_mpt_alibi_tensor, attn.n_heads)

    def dropout(self, attn: Any) -> float:
        return attn.attn_dropout_p

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.n_heads, attn.head_dim
