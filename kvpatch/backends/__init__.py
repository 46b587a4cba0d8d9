"""Backends for attention and statistics: torch on any device, flash kernels and Triton on a GPU."""

from .dispatch import BACKENDS, Choice, backend, check, check_name
from .protocol import Backend, Case, Geometry, Keys, Task

__all__ = ["BACKENDS", "Backend", "Case", "Choice", "Geometry", "Keys", "Task", "backend", "check", "check_name"]
