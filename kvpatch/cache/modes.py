"""The modes of a layer: where its next token goes, and the fields that exist only in this mode.

    Empty -> Reading a prompt -> Appending | Filling | Growing | Evicting | Moving -> Reading the next prompt
                                             Filling -> Evicting, once the budget is reached

A layer's `mode` is one of these records. SlotLayer's methods `begin_prompt`, `start_*`, `free` and `reset` are the transitions.
Code that must tell modes apart asks for the record's class or its constants; another mode is another class here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..policies.batched import Batched
from ..policies.rhythm import advance_waits

if TYPE_CHECKING:
    from collections.abc import Mapping


class Mode(Batched):
    """State of a layer that says where its next token goes and if its heads evict: the interface of all modes.

    name: in a saved cache. fills_free_slots: the next token goes into a free slot of each head, `free_BH` (the index after a
    head's last slot if all are taken); else after the used columns. evicts: decode steps evict. croppable: the last columns are
    the last tokens, and nothing was evicted for them, so that they can be cut off.

    steps_until_full: until every row has as many tokens as it may hold between steps. has_short_heads: some head may need more
    slots than it has. all_heads_short: all have fewer than their budget, and nothing is evicted until buffers have moved.
    """

    name: ClassVar[str]
    saved: ClassVar[Mapping[str, str]] = {}  # its own counters: their names in a saved cache, and the attributes
    fills_free_slots: ClassVar[bool] = False
    evicts: ClassVar[bool] = False
    croppable: bool = True
    steps_until_full: int = 0
    has_short_heads: bool = False
    all_heads_short: bool = False
    free_BH: Tensor  # of a Slotted mode; in a step by kernels also the column that a token is appended at

    @property
    def due(self) -> bool:
        """Tell if some head may evict at the decode step that runs, or runs next."""
        return True

    @property
    def writes_left(self) -> int:
        """Tokens that can be written before some head needs more slots than it has."""
        return sys.maxsize

    def count(self, tokens: int) -> None:
        """Count tokens written, in decode steps, to every head; this updates the counters of modes that have some."""

    def count_new_slots(self) -> int | None:
        """Return the slots each head has taken since its buffers were made, the current token's too; None: heads may differ."""
        return 1


class Empty(Mode):
    """Mode of a layer that has read no text."""

    name = "empty"


@dataclass
class Reading(Mode):
    """Mode while a prompt is read, alone or in pieces: its tokens are appended."""

    name = "reading"
    croppable: bool = True


class Appending(Mode):
    """Mode after a prompt where nothing is evicted any more: generated tokens are appended."""

    name = "appending"


@dataclass
class Filling(Mode):
    """Mode after a prompt of which all heads hold equally many tokens: generated ones are appended until the budget is full.

    Then all heads evict, and the mode is Evicting; if they evict several tokens at once (every > 1), it stays and counts anew.
    """

    name, saved, evicts = "filling", {"filling": "steps_until_full"}, True
    croppable = False
    steps_until_full: int = 0

    @property
    def due(self) -> bool:
        return not self.steps_until_full

    def count(self, tokens: int) -> None:
        self.steps_until_full = max(self.steps_until_full - tokens, 0)


@dataclass
class Slotted(Mode):
    """Base of the modes in which each head writes its next token into a free slot of its own, wherever that lies.

    If a head may need more slots than it has, `slack` - `grown` more tokens can be written before buffers move; grown
    counts those written since the prompt.
    """

    fills_free_slots = True
    free_BH: Tensor
    slack: int = 0
    grown: int = 0

    @property
    def writes_left(self) -> int:
        return self.slack - self.grown if self.has_short_heads else sys.maxsize


class Growing(Slotted):
    """Mode of a layer that evicts nothing but has slots (ragged, or room=): a head's next one is that after its last."""

    name, saved = "growing", {"slack": "slack", "grown": "grown"}
    has_short_heads = True

    def count(self, tokens: int) -> None:
        self.grown += tokens

    def count_new_slots(self) -> int | None:
        return self.grown + 1


@dataclass
class Evicting(Slotted):
    """Mode under a fixed budget: a head evicts whenever it has no slot left, at every step once it is full, or every so many.

    evict_interval: tokens evicted at once. waits: if these are several, steps until heads evict (policies/rhythm.py).
    """

    name, saved, evicts = "evicting", {"filling": "steps_until_full", **Growing.saved}, True
    croppable = False
    steps_until_full: int = 0
    has_short_heads: bool = False
    all_heads_short: bool = False
    evict_interval: int = 1
    waits: tuple[int, ...] = ()

    @property
    def due(self) -> bool:
        return not self.waits or self.waits[0] == 1  # waits: ascending; the first head evicts in so many steps

    def count(self, tokens: int) -> None:
        self.steps_until_full = max(self.steps_until_full - tokens, 0)
        self.grown += tokens if self.has_short_heads else 0
        self.waits = advance_waits(self.waits, tokens, self.evict_interval)

    def count_new_slots(self) -> int | None:
        # heads that fill up, or wait to evict several, take slots unevenly; full ones reuse the slot of an evicted token
        return None if self.steps_until_full or self.waits else 0


@dataclass
class Moving(Slotted):
    """Mode under a budget that follows the text (policies/moving.py): at a step a head evicts none, one or several tokens.

    packed_BH: tokens of each head when its slots were last planned. A head that shrinks keeps its slots until the next time.
    """

    name, saved, evicts = "moving", Growing.saved, True
    croppable = False
    has_short_heads: bool = True
    packed_BH: Tensor | None = None

    def count(self, tokens: int) -> None:
        self.grown += tokens if self.has_short_heads else 0

    def count_new_slots(self) -> int | None:
        return None


MODES: dict[str, type[Mode]] = {one.name: one for one in (Empty, Reading, Appending, Filling, Growing, Evicting, Moving)}
