"""kvpatch's own backend in vLLM on CUDA, under the name CUSTOM that its registry leaves to others. It has not run on a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from ...errors import KVPatchError
from .attention import BudgetedAttention, make_budgeted_spec
from .configuration import find_current_settings
from .scheduled import PassBuilder


class Backend(AttentionBackend):
    """The backend CUSTOM. What it supports is told here, for vLLM compares a backend that is asked for with the model.

    forward_includes_kv_cache_update: tokens are written by `forward`. supported_kv_cache_dtypes: all, for those that are not
    served are refused in words by the layer.
    """

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = []

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return make_budgeted_spec(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout in which a layer's pages are one piece, heads before slots."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @staticmethod
    def get_impl_cls() -> Any:
        """Return the class of a layer's attention. vLLM calls this as it makes a model.

        Raises:
            KVPatchError: the configuration has no settings of kvpatch.
        """
        if find_current_settings() is None:
            raise KVPatchError(
                "vLLM was asked for the attention backend CUSTOM, which is kvpatch's here, without kvpatch's settings: give "
                """--additional-config '{"kvpatch": {"policy": "h2o", "k": 1024}}', or leave --attention-backend out."""
            )
        return BudgetedAttention

    @staticmethod
    def get_builder_cls() -> Any:
        return PassBuilder
