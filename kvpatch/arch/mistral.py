"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from .llama import LlamaAdapter


class MistralAdapter(LlamaAdapter):
    """Mistral."""

    name = "mistral"
    summary = "Mistral: rotary positions, GQA, sliding window"
    classes = ("transformers.models.mistral.modeling_mistral.MistralAttention",)

    def sliding(self, attn: Any) -> int | None:
        return getattr(attn.config, "sliding_window", None)
