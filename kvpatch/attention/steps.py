"""Decode steps bound to the layers of a cache: what attention/ keeps there from pass to pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..cache.forward_context import Forward
from ..cache.state import BoundSteps, TextState
from .layer_call import Call
from .stacked import LayerStack


@dataclass(eq=False)
class Steps(BoundSteps):
    """The bound Call of each layer that has run, the step of each that is bound to its buffers, and the stacked layers.

    None of these leads back here or to the cache, so that all go with the cache, without a garbage collection.
    """

    calls: dict[int, Call] = field(default_factory=dict)
    bound: dict[int, Any] = field(default_factory=dict)
    stack: LayerStack | None = None
    now: Forward | None = None
    running: list[Any] = field(default_factory=list)

    @property
    def stacked(self) -> bool:
        return self.stack is not None

    def unbind(self) -> None:
        self.stack = self.now = None
        self.bound.clear()
        self.running.clear()


def find_steps(cache: TextState) -> Steps:
    """Return `cache.steps`, in which a cache keeps Calls, bound steps and stacked layers for the next step.

    `_bind_call`, `_find_stack` and `bind_steps` call it; the first call makes and stores it.
    """
    steps = cache.steps
    if steps is None:
        steps = cache.steps = Steps()
    assert isinstance(steps, Steps)  # cache/, a layer below, knows of it no more than the protocol BoundSteps
    return steps
