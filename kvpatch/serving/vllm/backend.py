"""vLLM's backend for CPUs, which serves the models whose configuration has kvpatch's settings otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

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
from .terms import Terms


class Backend(CPUAttentionBackend):
    """The backend CPU_ATTN.

    terms: of the newest model, found when its layers are made; no terms without settings: all is vLLM's own.
    """

    terms: ClassVar[Terms | None] = None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec if cls.terms is None else budgeted_spec(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        if Backend.terms is None:
            return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> Any:
        Backend.terms = settings_now()
        return CPUAttentionBackendImpl if Backend.terms is None else BudgetedAttention

    @staticmethod
    def get_builder_cls() -> Any:
        return CPUAttentionMetadataBuilder if Backend.terms is None else PassBuilder
