"""The entry point `vllm.general_plugins`, which vLLM runs in each of its processes, before the configuration is known."""

from __future__ import annotations

import os

CPU = {
    "CPU_ATTN": "kvpatch.serving.vllm.backend.Backend",
    "CPU_MLA": "kvpatch.serving.vllm.latent.CpuLatent",
    "AMX_MLA": "kvpatch.serving.vllm.latent.AmxLatent",
}
CUDA = "kvpatch.serving.vllm.cuda.Backend"


def register() -> None:
    """Name kvpatch's backends in vLLM's registry.

    On a CPU vLLM has one backend for each kind of attention; without kvpatch's settings those named here are vLLM's own
    in all they do. On CUDA it has many, and kvpatch's is CUSTOM, for which `--attention-backend CUSTOM` asks. Where the
    environment has the settings it takes the place of every other, so that no layer is left without the budget.

    Raises:
        KVPatchError: the environment asks for a budget where none is served.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    asked = bool(os.environ.get("KVPATCH_VLLM"))
    if current_platform.is_cpu():
        for name, path in CPU.items():
            register_backend(AttentionBackendEnum[name], path)
    elif not current_platform.is_cuda():
        _refuse(asked, "kvpatch serves budgets in vLLM on CPUs and on CUDA, and this is neither")
    elif AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() != CUDA:
        _refuse(asked, f"another plugin has taken vLLM's backend CUSTOM ({AttentionBackendEnum.CUSTOM.get_path()})")
    else:
        for member in AttentionBackendEnum if asked else (AttentionBackendEnum.CUSTOM,):
            register_backend(member, CUDA)


def _refuse(asked: bool, why: str) -> None:
    if asked:
        from ...errors import KVPatchError  # not above: this runs in every process of vLLM

        raise KVPatchError(
            f"KVPATCH_VLLM is set, but {why}: unset it, or use transformers' server (kvpatch serve)."
        )
