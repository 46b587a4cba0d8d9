"""Memory that the C library keeps when tensors of many sizes have come and gone: `kvpatch serve` gives it back."""

from __future__ import annotations

import ctypes
import sys

EVERY = 32
"""Requests of a server after which it gives back memory."""


def give_back_memory() -> None:
    """Give free memory of the process (pages of glibc's arenas) back to the system; nothing with another C library.

    glibc gives back by itself what is free at the end of an arena alone. Prompts and conversations of different lengths leave
    holes before that end, ever more of them while a server runs. So `Answers.close` calls this, in a thread, after every EVERY
    requests.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
