"""One line puts a Hugging Face decoder's KV cache on a budget.

Example:
    with kvpatch.patched(model, policy="h2o", k=0.5):
        model.generate(**inputs, max_new_tokens=256)

Dimension key, used in names throughout (`k_BHTD`, `score_BHT`); a digit is a size of that many:
    B batch rows, H KV heads, G query heads per KV head, N heads flattened (any part of B*H or H*G), L layers,
    Q new queries, R query rows and M keys of a block, W observation window, S predictions that are compared,
    T tokens (of a text, or slots in use), C capacity (slots allocated), K tokens kept, F entries of ragged storage, end to end,
    D head size, P pairs of channels that a rotation turns, E model width, V vocabulary.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

_HOME = {
    "arch": ("Adapter", "InterfaceAdapter", "list_architectures", "register_arch", "unregister_arch"),
    "cache.cache": ("EvictingCache",),
    "cache.prefix": ("Prefix",),
    "cache.lifetimes": ("Record",),
    "errors": ("KVPatchError",),
    "evaluation.check": ("check_model",),
    "handle": ("Patch",),
    "hooks.chat": ("Chat",),
    "patching": ("patch", "patched", "replay", "unpatch"),
    "planning.plan": ("Plan", "plan"),
    "policies": (
        "Mass", "Policy", "Scope", "Score", "Share", "Threshold", "adaptive", "chunked", "critical", "get_policy",
        "global_topk", "list_policies", "merged", "pyramid", "refit", "register_policy", "unregister_policy",
    ),
    "report": ("Report",),
    "storage.calibration": ("load_calibration",),
    "storage.record": ("load_record", "save_record"),
    "storage.settings": ("Settings",),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Adapter",
    "Chat",
    "EvictingCache",
    "InterfaceAdapter",
    "KVPatchError",
    "Mass",
    "Patch",
    "Plan",
    "Policy",
    "Prefix",
    "Record",
    "Report",
    "Scope",
    "Score",
    "Settings",
    "Share",
    "Threshold",
    "adaptive",
    "check_model",
    "chunked",
    "critical",
    "get_policy",
    "global_topk",
    "list_architectures",
    "list_policies",
    "load_calibration",
    "load_record",
    "merged",
    "patch",
    "patched",
    "plan",
    "policies",
    "pyramid",
    "refit",
    "register_arch",
    "register_policy",
    "replay",
    "save_record",
    "unpatch",
    "unregister_arch",
    "unregister_policy",
]

if TYPE_CHECKING:  # for type checkers, which do not run __getattr__
    from . import policies
    from .arch import Adapter, InterfaceAdapter, list_architectures, register_arch, unregister_arch
    from .cache.cache import EvictingCache
    from .cache.lifetimes import Record
    from .cache.prefix import Prefix
    from .errors import KVPatchError
    from .evaluation.check import check_model
    from .handle import Patch
    from .hooks.chat import Chat
    from .patching import patch, patched, replay, unpatch
    from .planning.plan import Plan, plan
    from .policies import (
        Mass,
        Policy,
        Scope,
        Score,
        Share,
        Threshold,
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
    from .report import Report
    from .storage.calibration import load_calibration
    from .storage.record import load_record, save_record
    from .storage.settings import Settings
else:  # unseen by them, or every misspelt name would be of type Any

    def __getattr__(name: str) -> Any:
        """Import a public name where it is first used: Python calls this for a name that the module has not yet."""
        if name == "policies":
            return importlib.import_module(".policies", __name__)
        if name not in _MODULE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
        value = globals()[name] = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    """List the public names alone, also for completion in a shell."""
    return sorted(["__version__", *__all__])
