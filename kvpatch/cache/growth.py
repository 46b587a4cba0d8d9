"""How many slots the heads of a layer get: one rule for appended columns, for slots of one width and for ragged ones.

A buffer is made for what it holds and a sixteenth more, at least 8 entries a head: that amortizes moving it and bounds what
stands empty. A head that evicts never needs more than its budget and the slot of the token that comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..backends.head_offsets import FEW, wasteful

LEAST, PART = 8, 16


@dataclass(frozen=True)
class Layout:
    """Slots to be made. capacities: of each head. filled: where segments differ (a ragged layer), slots of each head that are
    in use while a query attends; else None, and every head gets as many as the one that needs most."""

    capacities: list[int]
    filled: list[int] | None = None

    @property
    def ragged(self) -> bool:
        return self.filled is not None


def slack(tokens: int) -> int:
    """Free slots for a head of so many tokens."""
    return max(LEAST, tokens // PART)


def capacities(counts: list[int], goals: list[int] | None, more: int) -> list[int]:
    """Slots for heads that hold `counts` tokens and `more` each; goals: slots that a head never needs more than."""
    if goals is None:
        return [count + more for count in counts]
    return [min(count + more, goal) for count, goal in zip(counts, goals, strict=True)]


def plan(
    counts: list[int], goals: list[int] | None, more: Callable[[int], int] = slack, exactly: bool = False
) -> Layout:
    """Slots of each head at the end of a prompt, ragged where dense ones would waste too much.

    more: tokens that a head of so many gets room for. exactly: no fewer, wherever capacities are rounded up.
    """
    fills = goals is not None and any(count + 1 < goal for count, goal in zip(counts, goals, strict=True))
    ragged = wasteful(counts if goals is None else [count + 1 for count in counts], LEAST if fills else 0)
    if not ragged:
        return Layout(capacities(counts, goals, more(max(counts))))
    free = more(sum(counts) // len(counts))
    # half of the slack is enough to begin with, and of many heads capacities are rounded up (HeadOffsets)
    half = max(free // 2, LEAST if len(counts) <= FEW else LEAST // 2)
    sizes = capacities(counts, goals, free if exactly else min(free, half))
    # an evicting head's slots are all in use while it attends, once it is full
    return Layout(sizes, counts if goals is None else list(map(min, sizes, goals)))
