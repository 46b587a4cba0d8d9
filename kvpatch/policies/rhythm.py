"""The rhythm of decode eviction, `every=m`: a head that holds its budget and m tokens more evicts these m at once.

Between evictions a step costs what appending costs. Steps are counted on the host, by head: a head's next eviction is so many
steps away as it has slots left.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def list_steps_to_eviction(counts: Iterable[int], goals: Iterable[int]) -> tuple[int, ...]:
    """Return in how many decode steps a layer's heads evict next, without repeats. `SlotLayer.update_pace` calls it.

    counts: tokens that each head holds. goals: the count at which each head evicts: its budget and `every`, the number of
    tokens that it evicts at once.

    Example:
        >>> list_steps_to_eviction([10, 10, 7], goals=[14, 14, 14])
        (4, 7)
    """
    return tuple(sorted({goal - count for count, goal in zip(counts, goals, strict=True)}))


def advance_waits(waiting: tuple[int, ...], steps: int, every: int) -> tuple[int, ...]:
    """Return what `list_steps_to_eviction` would return `steps` decode steps later; `Evicting.count` calls it at each step.

    A wait that is over evicts, and begins again at `every`, the number of tokens that are evicted at once.

    Example:
        >>> advance_waits((4, 7), steps=4, every=4)
        (3, 4)
    """
    return tuple(sorted({wait - steps if wait > steps else (wait - steps - 1) % every + 1 for wait in waiting}))


def list_moves(gone_BHM: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Return columns to fill and columns to move there, [B,H,M] each, so that the first `used` - M hold all tokens that stay.

    `SlotLayer.drop` calls it when M tokens of each head are evicted at once. gone_BHM: columns of these tokens, all different
    within a head. A column among the last M is paired with itself.
    """
    B, H, M = gone_BHM.shape
    empty = torch.zeros(B, H, used, dtype=torch.uint8, device=gone_BHM.device).scatter_(2, gone_BHM, 1)
    # of the last columns those that stay come first, to be moved into the first empty ones
    return gone_BHM.sort(-1).values, used - M + empty[..., used - M :].argsort(stable=True, dim=-1)
