"""Sums of the attention that each held key received, over all rows of a prompt and every decode step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..context import EvictionContext
from ..statistics import kernel_of
from .base import AnyNeed, Need


@dataclass(frozen=True)
class Sums(Need[Tensor]):
    """A statistic, summed per held key over query rows and the query heads of a group: context.state[key] [B,H,T].

    Attributes:
        key: its row in statistics.STATISTICS.
        sampled: whether the sums of a long prompt are taken from a sample of its rows (sampling.py).
        decay: factor applied to the sum before each addition.
        across_layers: whether all layers share one running sum.
    """

    key: str
    sampled: bool = False
    decay: float = 1.0
    across_layers: bool = False
    rows: ClassVar[Literal["none", "window", "all"]] = "all"
    alone: ClassVar[bool] = False
    is_read: ClassVar[bool] = True

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.key,)

    @property
    def fresh(self) -> bool:
        """Tell whether noise is drawn anew for every query and key."""
        return False

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        return ((self.key, kernel_of(self.key)),)

    @property
    def refuses(self) -> Mapping[str, str]:
        return _SHARED if self.across_layers else {}

    def view(self, context: EvictionContext) -> Tensor:
        return context.state[self.key]


def has_sums(needs: Iterable[AnyNeed]) -> bool:
    """Tell whether a score of these needs is a sum over the text, which steps add to instead of measuring it anew."""
    return any(isinstance(need, Sums) for need in needs)


_SHARED = {
    "block": "with shared=True a layer's choice needs the scores that later layers gave the blocks before, but a layer reads "
    "all blocks before the next layer runs. Use shared=False, or feed the blocks one by one.",
    "blocks of an engine": "layers share a score",
    "drafts": "with shared=True a layer's choice needs the scores that later layers gave the tokens before. Use shared=False, "
    "or feed them one by one.",
    "vllm": "with shared=True its layers share a score: use shared=False",
    "kernels": "layers share a score",
    "stack": "layers share a score",
    "trace": "layers share a score",
}
