"""The entry point `vllm.general_plugins`, which vLLM runs in each of its processes, before the configuration is known."""

from __future__ import annotations


def register() -> None:
    """Name the backend that vLLM asks for on a CPU; without kvpatch's settings it is vLLM's own in all it does (backend.py)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpatch.serving.vllm.backend.Backend")
