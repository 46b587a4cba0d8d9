"""BLOOM: ALiBi, one fused projection interleaved by heads; the attention module adds the residual itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Adapter, Core, Forward, source_module


@functools.cache
def _read_slopes(build: Callable[[Tensor, int, torch.dtype], Tensor], num_heads: int) -> Tensor:
    """Read ALiBi's slopes, for `alibi_slopes`, from the model's table for two tokens, where the newer one's bias is the slope.

    build: the model's function that makes the table.
    """
    return build(torch.ones(1, 2, dtype=torch.int64, device="cpu"), num_heads, torch.float32)[:, 0, 1]


def alibi_slopes(attn: Any) -> Tensor:
    """Return ALiBi's slopes [H*G] of an attention module of BLOOM or Falcon, which build ALiBi from the padding mask."""
    return _read_slopes(source_module(attn).build_alibi_tensor, attn.num_heads)


def _no_alibi(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Stand in for the decoder's `build_alibi_tensor` while it is patched: attention adds ALiBi itself, and reads no table."""
    return mask


class BloomAdapter(Adapter):
    """BLOOM, whose attention module also adds the residual."""

    name = "bloom"
    summary = "BLOOM: ALiBi"
    classes = ("transformers.models.bloom.modeling_bloom.BloomAttention",)

    projection = "dense"
    distances_from_mask = True
    renumbers = turns_back = True

    def project(self, attn: Any, hidden_BQE: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = attn.query_key_value(hidden_BQE).unflatten(-1, (attn.num_heads, 3, attn.head_dim)).transpose(1, 2).unbind(3)
        return q, k, v

    def run(self, attn: Any, own: Forward, core: Core, hidden_BQE: Tensor, call: dict[str, Any]) -> Any:
        out_BQE, weights = super().run(attn, own, core, hidden_BQE, call)
        return call["residual"] + nn.functional.dropout(out_BQE, attn.hidden_dropout, attn.training), weights

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        omits_bias = attn.pretraining_tp > 1 and attn.slow_but_exact  # the model then leaves its bias out
        return nn.functional.linear(y_BQE, attn.dense.weight) if omits_bias else super().output(attn, y_BQE)

    def overrides(self, decoder: Any) -> dict[str, Any]:
        return {"build_alibi_tensor": _no_alibi}

    def scale(self, attn: Any) -> float:
        return attn.inv_norm_factor

    def slopes(self, attn: Any) -> Tensor | None:
        return alibi_slopes(attn)

    def dropout(self, attn: Any) -> float:
        return attn.attention_dropout.p

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_heads, attn.head_dim
