"""The modes of a layer: where its next token goes, and the fields that exist only in this mode.

    Empty -> Reading a prompt -> Appending | Filling | Growing | Evicting | Moving -> Reading the next prompt
                                             Filling -> Evicting, once the budget is reached

A layer's `mode` is one of these records. SlotLayer's methods `begin_prompt`, `start_*`, `free` and `reset` are the transitions.
Code that must tell modes apart asks for the record's class or its constants; another mode is another class here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..policies.batched import Batched
from ..policies.rhythm import advance_waits


class Mode(Batched):
    """Interface of all modes.

    name: in a saved cache. slotted: the next token goes into a free slot of each head, `free_BH` (the index after a head's
    last slot if all are taken); else after the used columns. adds: used columns that it adds. evicts: tokens are evicted while
    decoding. croppable: the last columns are the last tokens, and nothing was evicted for them.

    filling: steps until every row has as many tokens as it may hold between steps. growing: some head may need more slots than
    it has. unfilled: every head has fewer slots than its budget, so that nothing is evicted until buffers have moved.
    """

    name: ClassVar[str]
    saved: ClassVar[tuple[str, ...]] = ()  # its own counters, in a saved cache
    slotted: ClassVar[bool] = False
    adds: ClassVar[int] = 1
    evicts: ClassVar[bool] = False
    croppable: bool = True
    filling: int = 0
    growing: bool = False
    unfilled: bool = False
    free_BH: Tensor  # of a Slotted mode; in a step by kernels also the column that a token is appended at

    @property
    def due(self) -> bool:
        """Tell if some head may evict at the next step."""
        return True

    @property
    def room(self) -> int:
        """Tokens that can be written before some head needs more slots than it has."""
        return sys.maxsize

    def count(self, tokens: int) -> None:
        """Count tokens written; each brings every head that is below budget closer to it."""

    def count_new_slots(self) -> int | None:
        """Return the slots each head has taken since its buffers were made, the current token's included; None: unevenly."""
        return 1


class Empty(Mode):
    """No text has been read."""

    name = "empty"


@dataclass
class Reading(Mode):
    """A prompt is being appended."""

    name = "reading"
    croppable: bool = True


class Appending(Mode):
    """Tokens are appended, and none is evicted."""

    name = "appending"


@dataclass
class Filling(Mode):
    """Tokens are appended until the heads, which all hold equally many, reach their budget and evict.

    filling: steps until then. After an eviction of several tokens (`every` > 1) the mode stays and counts down anew.
    """

    name, saved, evicts = "filling", ("filling",), True
    croppable = False
    filling: int = 0

    @property
    def due(self) -> bool:
        return not self.filling

    def count(self, tokens: int) -> None:
        self.filling = max(self.filling - tokens, 0)


@dataclass
class Slotted(Mode):
    """Tokens go into free slots.

    If a head may need more slots than it has, `slack` - `grown` more tokens can be written before buffers move; grown
    counts those written since the prompt.
    """

    slotted, adds = True, 0
    free_BH: Tensor
    slack: int = 0
    grown: int = 0

    @property
    def room(self) -> int:
        return self.slack - self.grown if self.growing else sys.maxsize


class Growing(Slotted):
    """Nothing is evicted: each head's next slot is the one after its last."""

    name, saved = "growing", ("slack", "grown")
    growing = True

    def count(self, tokens: int) -> None:
        self.grown += tokens

    def count_new_slots(self) -> int | None:
        return self.grown + 1


@dataclass
class Evicting(Slotted):
    """Each head evicts whenever it has no slot left: at every step once it has reached its budget, or every so many.

    every: tokens evicted at once. waits: if these are several, steps until heads evict (policies/rhythm.py).
    """

    name, saved, evicts = "evicting", ("filling", "slack", "grown"), True
    croppable = False
    filling: int = 0
    growing: bool = False
    unfilled: bool = False
    every: int = 1
    waits: tuple[int, ...] = ()

    @property
    def due(self) -> bool:
        return not self.waits or self.waits[0] == 1

    def count(self, tokens: int) -> None:
        self.filling = max(self.filling - tokens, 0)
        self.grown += tokens if self.growing else 0
        self.waits = advance_waits(self.waits, tokens, self.every)

    def count_new_slots(self) -> int | None:
        return None if self.filling or self.waits else 0


@dataclass
class Moving(Slotted):
    """Each head evicts none, one or several tokens at a step, as a budget says that follows the text (policies/moving.py).

    packed_BH: tokens of each head when slots were last given back. A head that has shrunk since keeps its slots until then.
    """

    name, saved, evicts = "moving", ("slack", "grown"), True
    croppable = False
    growing: bool = True
    packed_BH: Tensor | None = None

    def count(self, tokens: int) -> None:
        self.grown += tokens if self.growing else 0

    def count_new_slots(self) -> int | None:
        return None


MODES: dict[str, type[Mode]] = {one.name: one for one in (Empty, Reading, Appending, Filling, Growing, Evicting, Moving)}
