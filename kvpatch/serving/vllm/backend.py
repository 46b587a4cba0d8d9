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

from .attention import BudgetedAttention, budgeted_spec
from .configuration import settings_now
from .scheduled import PassBuilder


class Backend(CPUAttentionBackend):
    """The backend CPU_ATTN. It asks for the settings of the model at hand each time: a process may have several."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec if settings_now() is None else budgeted_spec(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        if settings_now() is None:
            return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> Any:
        return CPUAttentionBackendImpl if settings_now() is None else BudgetedAttention

    @staticmethod
    def get_builder_cls() -> Any:
        return CPUAttentionMetadataBuilder if settings_now() is None else PassBuilder
