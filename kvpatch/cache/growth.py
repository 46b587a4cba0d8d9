"""Slot counts of a layer's heads: one rule for appended columns, for dense slots and for ragged ones.

A buffer has room for its tokens plus 1/16, at least 8 entries per head: that amortizes growth and bounds waste. A head that
evicts never needs more than its budget and one slot for the incoming token. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LEAST, PART = 8, 16
SPARE = 50  # a layer becomes ragged if dense slots would waste more than 1/50


@dataclass(frozen=True)
class Layout:
    """Sizes of slots to allocate.

    capacities: slots of each head, or one number for all in a dense layer. filled: in a ragged layer, the slots of each head
    that queries attend to; None: the layer is dense.
    """

    capacities: list[int]
    filled: list[int] | None = None


def slack(tokens: int) -> int:
    """Return the number of spare slots for a head of so many tokens."""
    return max(LEAST, tokens // PART)


def capacities(counts: list[int], goals: list[int] | None, more: int) -> list[int]:
    """Return how many slots to make per head for `counts` tokens and `more` to come, as `plan` or `HeadOffsets` makes buffers.

    goals: slots of each head at its budget, the most that it ever needs; None: nothing is evicted.
    """
    if goals is None:
        return [count + more for count in counts]
    return [min(count + more, goal) for count, goal in zip(counts, goals, strict=True)]


def plan(counts: list[int], goals: list[int] | None, more: Callable[[int], int] = slack, exactly: bool = False) -> Layout:
    """Plan each head's slots as a prompt ends or caches are joined: dense, or ragged if heads need too different numbers.

    `_compress_layer`, `_make_buffers` and `pack` call it. counts: tokens of each head. goals: slots of each head at its budget;
    None: nothing is evicted. more: returns how many coming tokens a head of so many tokens gets room for. exactly: a ragged
    layer gets room for all of these; else it starts with half.
    """
    # dense slots waste those that other heads need; a layer is ragged if that is more than 1 in SPARE, and, while heads fill
    # up, more than LEAST per head. An evicting head needs a slot for the next token
    fills = goals is not None and any(count + 1 < goal for count, goal in zip(counts, goals, strict=True))
    needs = counts if goals is None else [count + 1 for count in counts]
    waste = max(needs) * len(needs) - sum(needs)  # of dense slots: as many for every head
    if waste * SPARE <= sum(needs) or waste <= (LEAST if fills else 0) * len(needs):
        return Layout(capacities(counts, goals, more(max(counts))))
    spare = more(sum(counts) // len(counts))
    half = max(spare // 2, LEAST)  # start with half of the slack
    sizes = capacities(counts, goals, spare if exactly else min(spare, half))
    # all slots of an evicting head are in use while it attends, once it has reached its budget
    return Layout(sizes, counts if goals is None else list(map(min, sizes, goals)))
