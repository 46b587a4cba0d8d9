"""Decode steps bound to the layers of a cache: what attention/ keeps there from pass to pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cache.state import BoundSteps, TextState
from .layer_call import Call
from .stacked import LayerStack


@dataclass(eq=False)
class Steps(BoundSteps):
    """The bound Call of each layer that has run, and the stacked layers, if they are."""

    calls: dict[int, Call] = field(default_factory=dict)
    stack: LayerStack | None = None

    @property
    def stacked(self) -> bool:
        return self.stack is not None

    def unstack(self) -> None:
        self.stack = None


def find_steps(cache: TextState) -> Steps:
    """Return what a cache keeps of its bound decode steps; an empty one is made at the first call."""
    steps = cache.steps
    if steps is None:
        steps = cache.steps = Steps()
    assert isinstance(steps, Steps)  # cache/, a layer below, knows of it no more than the protocol BoundSteps
    return steps
