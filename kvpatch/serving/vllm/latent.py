"""vLLM's backends for CPUs whose keys and values are one latent vector: its own, which do not start with kvpatch's settings."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from .configuration import check_current


class CpuLatent(CPUMLABackend):
    """vLLM's backend CPU_MLA, which raises KVPatchError where kvpatch's settings ask for a budget: it cannot have one."""

    @staticmethod
    def get_impl_cls() -> Any:
        check_current()
        return CPUMLABackend.get_impl_cls()


class AmxLatent(AMXMLABackend):
    """vLLM's backend AMX_MLA, which raises KVPatchError where kvpatch's settings ask for a budget: it cannot have one."""

    @staticmethod
    def get_impl_cls() -> Any:
        check_current()
        return AMXMLABackend.get_impl_cls()
