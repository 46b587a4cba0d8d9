"""Backends for attention and statistics: torch on any device, flash kernels and Triton on a GPU.

Names are imported where they are first used, so that `entry_sizes`, which needs no torch, can be read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "dispatch": ("BACKENDS", "Choice", "backend", "check", "check_name"),
    "protocol": ("Backend", "Case", "Geometry", "Keys", "Task"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["BACKENDS", "Backend", "Case", "Choice", "Geometry", "Keys", "Task", "backend", "check", "check_name"]

if TYPE_CHECKING:  # for type checkers, which do not run __getattr__
    from .dispatch import BACKENDS, Choice, backend, check, check_name
    from .protocol import Backend, Case, Geometry, Keys, Task
else:

    def __getattr__(name: str) -> Any:
        """Import a public name where it is first used."""
        if name not in _MODULE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
        value = globals()[name] = getattr(import_module(f".{_MODULE[name]}", __name__), name)
        return value
