"""Eviction policies: scores, scopes, budgets, selection, and the table of named policies built from them.

Names are imported where they are first used, so that modules without torch (`uses`, `facts`, `budgets`, `slopes`) can be read
without it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_HOME = {  # each module of this package, and the public names that it defines
    "allocation": ("Adaptive", "Global"),
    "context": ("EvictionContext", "NewTokens"),
    "measures": ("Calibration",),
    "merging": ("Merge", "Merging"),
    "moving": ("Mass", "Share", "Threshold"),
    "policy": ("Policy",),
    "presets": (
        "POLICIES", "adaptive", "chunked", "critical", "get_policy", "global_topk", "list_policies", "merged", "pyramid",
        "refit", "register_policy", "unregister_policy",
    ),
    "refitting": ("Refit",),
    "repeated": ("repeat_instruction",),
    "scopes": ("DeviationScope", "RangeScope", "Scope"),
    "scores": ("Score",),
    "selection": ("Chunked", "Selection", "TwoStage"),
    "slopes": ("Pyramid",),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "POLICIES",
    "Adaptive",
    "Calibration",
    "Chunked",
    "DeviationScope",
    "EvictionContext",
    "Global",
    "Mass",
    "Merge",
    "Merging",
    "NewTokens",
    "Policy",
    "Pyramid",
    "RangeScope",
    "Refit",
    "Scope",
    "Score",
    "Selection",
    "Share",
    "Threshold",
    "TwoStage",
    "adaptive",
    "chunked",
    "critical",
    "get_policy",
    "global_topk",
    "list_policies",
    "merged",
    "pyramid",
    "refit",
    "register_policy",
    "repeat_instruction",
    "unregister_policy",
]

if TYPE_CHECKING:  # for type checkers, which do not run __getattr__
    from .allocation import Adaptive, Global
    from .context import EvictionContext, NewTokens
    from .measures import Calibration
    from .merging import Merge, Merging
    from .moving import Mass, Share, Threshold
    from .policy import Policy
    from .presets import (
        POLICIES,
        adaptive,
        chunked,
        critical,
        get_policy,
        global_topk,
        list_policies,
        merged,
        pyramid,
        refit,
        register_policy,
        unregister_policy,
    )
    from .refitting import Refit
    from .repeated import repeat_instruction
    from .scopes import DeviationScope, RangeScope, Scope
    from .scores import Score
    from .selection import Chunked, Selection, TwoStage
    from .slopes import Pyramid
else:  # type checkers skip this branch: by __getattr__ every misspelt name would have the type Any

    def __getattr__(name: str) -> Any:
        """Import a name of `_HOME`, or a module of this package; Python calls it where kvpatch.policies.NAME is first used.

        `globals` keeps the value of a name, so that the next use does not come here.
        """
        if name in _MODULE:
            value = globals()[name] = getattr(import_module(f".{_MODULE[name]}", __name__), name)
            return value
        module = f"{__name__}.{name}"
        if not name.startswith("_") and find_spec(module) is not None:
            return import_module(module)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__]
