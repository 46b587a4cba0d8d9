"""vLLM's attention backends for CPUs, each chosen when a model is made: vLLM's own class, or the one that has a budget.

A plugin is loaded before vLLM's configuration is known, and what it registers holds for each engine that follows. A registered
backend however is a path, which vLLM looks up while it makes a model, within that model's configuration. The paths that the
plugin registers lead to this module, whose attributes are vLLM's own classes where no budget is asked for.
"""

from __future__ import annotations

import os
from pkgutil import resolve_name
from typing import Any

from .versions import VARIABLE, asks_for_budget

BUDGETED = {
    "CPU_ATTN": "kvpatch.serving.vllm.backend.Backend",
    "CPU_MLA": "kvpatch.serving.vllm.latent.CpuLatent",
    "AMX_MLA": "kvpatch.serving.vllm.latent.AmxLatent",
}
OWN: dict[str, str] = {}
"""The paths that stood in vLLM's registry before: its own, or another plugin's."""


def __getattr__(name: str) -> Any:
    """Return the class that vLLM's registry seeks here by a backend's name; Python calls this when vLLM makes a model.

    BUDGETED has the path of kvpatch's class for that backend. OWN has the path that the registry had before; it is the answer
    where no budget is asked for.
    """
    if name not in OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(BUDGETED[name] if _may_need_budget() else OWN[name])


def _may_need_budget() -> bool:
    """Tell `__getattr__` whether the model that is being made, or a later one of this process, may have a budget.

    vLLM keeps the class that it finds here for all models of a process whose layers look alike. A process has one model, unless
    the user's own process runs engines (no multiprocessing). Then the class is always kvpatch's; for each model it looks for
    settings, and leaves models without them to vLLM's class.
    """
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none

    if os.environ.get(VARIABLE) or not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return True
    config = get_current_vllm_config_or_none()
    return config is None or asks_for_budget(config.additional_config)
