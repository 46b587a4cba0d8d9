"""vLLM's backend for CPUs, which serves the models whose configuration has kvpatch's settings otherwise."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .attention import BudgetedAttention, make_budgeted_spec
from .configuration import find_current_settings
from .scheduled import PassBuilder


class Backend(CPUAttentionBackend):
    """The backend CPU_ATTN. It asks for the settings of the model at hand each time: a process may have several."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec of a layer's pages, under the budget if there is one. vLLM calls this at the start."""
        return spec if find_current_settings() is None else make_budgeted_spec(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        if find_current_settings() is None:
            return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> Any:
        return CPUAttentionBackendImpl if find_current_settings() is None else BudgetedAttention

    @staticmethod
    def get_builder_cls() -> Any:
        return CPUAttentionMetadataBuilder if find_current_settings() is None else PassBuilder
