"""Memory that the C library keeps when tensors of many sizes have come and gone: `kvpatch serve` gives it back."""

from __future__ import annotations

import ctypes
import sys

EVERY = 32
"""Requests of a server after which it gives back memory."""


def give_back_memory() -> None:
    """Give the free pages of all of glibc's arenas back to the system; with another C library nothing is done.

    glibc gives back by itself what is free at the end of an arena alone. Prompts and conversations of different lengths leave
    holes before it, which grow in number for as long as a server runs: it calls this at times.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
