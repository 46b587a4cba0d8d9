"""Room for Python's frames: how deep a call is must not change how long it takes.

CPython (seen in 3.11) keeps frames in chunks of 16 KB. A loop that happens to call across the end of a chunk maps a new one and
unmaps it again at each call, and takes two to three times as long: for some depths of the stack, and not for others.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LOCALS = 40_000  # 320 kB: the chunk of such a frame is the next power of two, and the rest of it is for the calls within


def roomy(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, called from a frame so large that the calls within find the rest of its chunk, about 190 kB, free."""
    return functools.wraps(function)(functools.partial(_large_frame(), function))


@functools.cache
def _large_frame() -> Callable:
    unused = " = ".join(f"local_{i}" for i in range(LOCALS))
    made: dict[str, Callable] = {}
    exec(f"def call(function, *args, **kwargs):\n if not function: {unused} = None\n return function(*args, **kwargs)", made)
    return made["call"]
