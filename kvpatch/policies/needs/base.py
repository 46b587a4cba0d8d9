"""The one life that all needs have, and the layers that attention/ lets them read.

Layers are asked through the protocol `LayerRead`, so that policies/ knows neither caches nor kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..batched import Batched
from ..context import NewTokens, Observed, View

if TYPE_CHECKING:
    from ..context import EvictionContext, Limits


class Note(Batched):
    """Memory of a need about one layer between passes: a dataclass of tensors whose first axis is the batch.

    The end of a field's name says what its axes are, as in q_BHGWD. Fields that begin with "positions" or "columns" are int64.
    """

    def overwritten_by(self, positions_B1: Tensor) -> Any:
        """Return what `restore` needs to take back a decode step of the tokens at these positions."""
        return self.map_rows(torch.clone)

    def restore(self, overwritten: Any) -> None:
        """Take back a decode step, by what `overwritten_by` returned before it."""
        vars(self).update(vars(overwritten))

    def find_contradiction(self, seen_B11: Tensor) -> Tensor | None:
        """Return a bool tensor that is True where the note contradicts the tokens that were seen; None if nothing can."""
        return None


class LayerRead(Protocol):
    """Layer, as far as a need may ask it. Tensors [B,H,T] have one entry per used slot, as in EvictionContext."""

    @property
    def notes(self) -> dict[str, Any]:
        """The layer's notes, by the name of their need."""

    @property
    def limits(self) -> Limits:
        """Protected sizes, once the prompt's end has set them."""

    @property
    def positions_BHT(self) -> Tensor:
        """Positions of the used slots, int64 [B,H,T]; -1 in empty ones, where keys and states are those of gone tokens."""

    @property
    def scale(self) -> float:
        """Factor of q . k in a logit."""

    @property
    def slopes_HG(self) -> Tensor | None:
        """ALiBi's slopes; None without ALiBi."""

    def statistic(self, name: str) -> Tensor:
        """Return the layer's tensor `name` [B,H,T] of numbers beside the used slots, for a need to read or write.

        A need is what a score or scope reads; its `read`, `step` and `view` call this. A tensor that it lists in its `states`
        begins as zero.

        Raises:
            KVPatchError: no score's or need's entry() stores it with tokens, and no need has it among its `states`.
        """

    def held(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [B,H,T,D]; those of empty slots may be anything."""

    def plain_keys(self) -> Tensor:
        """Return the keys without their rotation [B,H,T,D], in the scores' dtype."""

    def rotated_back(self, x_BHTD: Tensor, positions_BHT: Tensor) -> Tensor:
        """Return queries or keys without their rotation, in the scores' dtype; anything for padding."""

    def mean_rotation(self, future: int, like: Tensor) -> Tensor | None:
        """Return the mean rotation [B,1,1,D,D] of each row's next `future` positions; None if nothing is rotated."""

    def attend_to_slots(
        self, q_BHGWD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, positions_BW: Tensor, index_BHK: Tensor, real_BHK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [B,H,G,W,D] of queries that follow all used slots, and log-sum-exps [B,H,G,W] over kept slots alone.

        `Refit.values` finds new values for kept tokens by it as a prompt ends, before the others go. index_BHK, real_BHK: as in
        `Kept`. k_BHTD, v_BHTD: of the used slots. positions_BW: of the queries. A query that sees no slot, such as one at
        position -1, has output 0. One that sees no kept slot has any log-sum-exp, and `weigh_slots` gives it weights of 0.
        """

    def weigh_slots(self, q_BHGWD: Tensor, k_BHMD: Tensor, positions_BW: Tensor, index_BHM: Tensor, lse_BHGW: Tensor) -> Tensor:
        """Return the attention [B,H,G,W,M] that queries of `attend_to_slots` give to slots `index_BHM`. k_BHMD: keys of these.

        `Refit.values` reads it as a prompt ends. lse_BHGW: the log-sum-exps of `attend_to_slots`, by which the attention to all
        kept slots sums to one.
        """

    def logits(self, q_BHGWD: Tensor, positions_BW: Tensor, first_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [B,H,G,W,T] of a layer's last queries, and the tokens before position `first_B1`, bool [B,H,T]."""


Fold = Callable[[Observed], Tensor]


@dataclass
class PromptRead:
    """A prompt, or a piece of one, that a layer has written and attended with.

    Attributes:
        layer: the layer, the prompt's tokens included.
        q_BHGQD: queries as attention used them.
        plain_BHGQD: queries as they came: the same, but without positions where these are renumbered.
        k_BHQD, v_BHQD: keys and values that were written.
        positions_BQ: positions of the columns, int64; -1 for padding.
        rows_BQ: the same, as attention's rows have them.
        lse_BHGQ: log-sum-exp of the queries' logits, if the kernel gave it.
        past: used columns before, empty slots among them.
        ends: whether the prompt (or block) ends here, so that tokens are evicted next.
        newest: newest() returns the position of the newest token [B,1,1].
        sinks: first tokens that are protected.
        at_once: numbers of a temporary tensor that are worth holding; 0 for as few as possible.
        attention: attention(q_BHGWD, rows_BW, lse_BHGW=None, fold=None, join="sum", last=False) returns what some queries give
            to each used slot [B,H,T], by the fastest backend that can: their probabilities summed over rows and averaged over
            the group, or what `fold` makes of each block of rows, joined by "sum" or "max". A row of -1 does not count.
            lse_BHGW: of these rows, where it is known. last: True promises that they are the last rows, in their order; a mask
            is then cheaper.
        once: once(name, make) returns a tensor that is the same for all layers, made by the first of them.
    """

    layer: LayerRead
    q_BHGQD: Tensor
    plain_BHGQD: Tensor
    k_BHQD: Tensor
    v_BHQD: Tensor
    positions_BQ: Tensor
    rows_BQ: Tensor
    lse_BHGQ: Tensor | None
    past: int
    ends: bool
    newest: Callable[[], Tensor]
    sinks: int
    at_once: int
    attention: Callable[..., Tensor]
    once: Callable[[str, Callable[[], Tensor]], Tensor]


@dataclass
class StepRead:
    """A decode step that a layer, or several stacked along B, has written and attended with.

    Attributes:
        layer: the layer, the new token included.
        q_BHGD: the token's queries as they came; None for stacked layers.
        k_BH1D, v_BH1D: its key and value; None for stacked layers.
        p_BHGT: the token's probabilities; given to needs whose `rows` are not "none", but to Sums: kernels may have added them.
        positions_B1: the token's position.
    """

    layer: LayerRead
    q_BHGD: Tensor | None
    k_BH1D: Tensor | None
    v_BH1D: Tensor | None
    p_BHGT: Tensor | None
    positions_B1: Tensor


@dataclass(frozen=True)
class Need(Generic[View]):
    """Base of what a score or scope reads besides positions. Subclasses are frozen dataclasses; see the package's page.

    Attributes:
        name: key of its note in a layer and in files.
        note: class of a note that lives on while decode steps evict; None if it keeps none, or of a prompt alone.
        states: names of the state tensors [B,H,T] that it keeps up to date.
        lasts: whether these tensors stay where no later step evicts.
        rows: rows of a prompt whose attention it needs: "none", "window" (the last few) or "all". All but "none" get the
            probabilities of decode steps, too.
        alone: False promises that `step` and `view` read attention and state alone, no queries, keys, values or notes. Layers
            that are alike are then stepped as one, stacked along the batch.
        is_read: whether it reads a prompt as it passes, so that a cache filled elsewhere cannot be taken over.
        entry_by_position: whether `entry` depends on positions alone, so that it can be computed ahead of the tokens.
        projects: whether it asks for the output projection.
    """

    name: ClassVar[str] = ""
    note: ClassVar[type[Note] | None] = None
    states: ClassVar[tuple[str, ...]] = ()
    lasts: ClassVar[bool] = True
    rows: ClassVar[Literal["none", "window", "all"]] = "none"
    alone: ClassVar[bool] = True
    is_read: ClassVar[bool] = False
    entry_by_position: ClassVar[bool] = False

    @property
    def projects(self) -> bool:
        return False

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        """Statistics that a pass must compute, each with the kernels' name for it, None if no kernel can; else empty."""
        return () if self.rows == "none" else ((type(self).__name__, None),)

    @property
    def lookahead(self) -> int | None:
        """Positions after the newest token whose rotation it needs; None if it takes queries and keys as they are rotated."""
        return None

    @property
    def protects(self) -> int:
        """Newest tokens that stay because their queries are what it reads."""
        return 0

    @property
    def refuses(self) -> Mapping[str, str]:
        """Features that it cannot go with, by their names in served.py: what a user reads; {name} is the policy's."""
        return {}

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        """Return the values to store with tokens that enter the cache, by name: [B,H,Q], or [B,H,Q,n] of n numbers."""
        return {}

    def read(self, prompt: PromptRead) -> None:
        """Read a prompt, or a piece of one, for `read_prompt`, after attention; may change the layer's notes and states."""

    def read_again(self, layer: LayerRead, q_BHGQD: Tensor, positions_BQ: Tensor, repeated_B: Sequence[int]) -> None:
        """Read the queries of a chunk that repeats a part of the prompt (KVzip's second reading); may change `layer.notes`.

        `reread_chunk` calls it in each layer; the repeated tokens are not cached. repeated_B: tokens that each row repeats in
        all.
        """

    def step(self, step: StepRead) -> None:
        """Read a decode step once the layer has attended; may change what this need keeps. `_end_step` calls it.

        That is its memory in `layer.notes` and the tensors named in `states`. Not called for a need that reads attention
        (`rows`) where decode steps evict nothing.
        """

    def view(self, context: EvictionContext) -> View:
        """Return the object that a score or scope gets from context.view(this class), such as statistics or queries."""
        raise NotImplementedError(f"{type(self).__name__} has no view")

    def end(self, layer: LayerRead, state: dict[str, Tensor], evicts: bool) -> None:
        """Remove what this need keeps of a layer (note and tensors) if no later step reads it.

        `_compress_layer` calls it as a prompt or block ends, once the tokens that stay are chosen. lasts: tensors stay. state:
        the layer's tensors beside the keys. evicts: whether more of this text may be evicted.
        """
        if evicts:
            return
        layer.notes.pop(self.name, None)
        for name in () if self.lasts else self.states:
            state.pop(name, None)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the note's axes by letter, beside those of B, H, G and D."""
        return {}

    def saved(self, sizes: Mapping[str, int]) -> dict[str, tuple[int | None, ...]]:
        """Return the shape of each tensor of this need's note (memory between passes), by field; `load` checks a file by it.

        None: any size. sizes: of axes by letter; a field's name ends with its axes, as in q_BHGWD.
        """
        letters = {"1": 1, **sizes, **self.sizes}  # size of each axis
        named = [] if self.note is None else [field.name for field in fields(self.note)]  # type: ignore[arg-type]
        return {name: tuple(letters.get(letter) for letter in name.rpartition("_")[2]) for name in named}


AnyNeed: TypeAlias = Need[Any]
"""A need whatever its view is."""
