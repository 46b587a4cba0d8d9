"""vLLM's backends for CPUs whose keys and values are one latent vector: its own, which do not start with kvpatch's settings."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from .configuration import check_current


class CpuLatent(CPUMLABackend):
    """The backend CPU_MLA."""

    @staticmethod
    def get_impl_cls() -> Any:
        check_current()
        return CPUMLABackend.get_impl_cls()


class AmxLatent(AMXMLABackend):
    """The backend AMX_MLA."""

    @staticmethod
    def get_impl_cls() -> Any:
        check_current()
        return AMXMLABackend.get_impl_cls()
