"""Room for Python's frames: how deep a call is must not change how long it takes.

CPython (seen in 3.11) keeps frames in chunks of 16 KB. A loop that happens to call across the end of a chunk maps a new one and
unmaps it again at each call, and takes two to three times as long: for some depths of the stack, and not for others.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

STACK = 40_000  # values, 320 kB: the chunk of such a frame is the next power of two, and the rest of it is for the calls within


def roomy(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, called from a frame so large that the calls within find the rest of its chunk, about 190 kB, free."""
    return functools.wraps(function)(functools.partial(_call, function))


def _call(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    return function(*args, **kwargs)


_call.__code__ = _call.__code__.replace(co_stacksize=STACK)
