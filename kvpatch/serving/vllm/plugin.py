"""The entry point `vllm.general_plugins`, which vLLM runs in each of its processes, before the configuration is known."""

from __future__ import annotations

import os


def register() -> None:
    """Name the backend that vLLM asks for on a CPU; without kvpatch's settings it is vLLM's own in all it does (backend.py).

    Raises:
        KVPatchError: the environment asks for a budget where vLLM does not run on a CPU.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu() and os.environ.get("KVPATCH_VLLM"):
        from ...errors import KVPatchError  # not above: this runs in every process of vLLM

        raise KVPatchError(
            "KVPATCH_VLLM is set, and kvpatch serves budgets in vLLM's build for CPUs alone, which this is not: unset it, or "
            "use transformers' server on a GPU (kvpatch serve)."
        )
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvpatch.serving.vllm.backend.Backend")
