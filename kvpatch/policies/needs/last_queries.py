"""The last queries of a layer, of prompts and decode steps, and what they look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..context import EvictionContext
from .base import Need, Note, PromptRead, StepRead


@dataclass
class NewestQueries(Note):
    """The last W queries of a layer. The query at position p lies in column p modulo W, so that no counter says where.

    Attributes:
        q_BHGWD: the queries as attention used them; without positions if these are renumbered.
        positions_BW: their positions, int64; -1 where there is none yet.
    """

    q_BHGWD: Tensor
    positions_BW: Tensor

    @classmethod
    def make_empty(cls, width: int, like_BHGQD: Tensor, dtype: torch.dtype) -> NewestQueries:
        """Make the object for a layer's last `width` queries, still empty, as `LastQueries.read` reads the first prompt."""
        (B, H, G, _, D), device = like_BHGQD.shape, like_BHGQD.device
        positions = torch.full((B, width), -1, dtype=torch.long, device=device)
        return cls(torch.zeros(B, H, G, width, D, dtype=dtype, device=device), positions)

    def read(self, q_BHGQD: Tensor, positions_BQ: Tensor) -> NewestQueries:
        """Return a new object that also has the last queries of a prompt, or a piece of it, for `LastQueries.read`.

        Position -1: padding. The query at position p is kept in column p modulo W.
        """
        W = self.positions_BW.shape[1]
        positions, index = positions_BQ.topk(min(W, positions_BQ.shape[1]), dim=1)
        q = q_BHGQD.take_along_dim(index[:, None, None, :, None], 3)
        newest = torch.maximum(positions.amax(1, keepdim=True), self.positions_BW.amax(1, keepdim=True))
        among_last = (positions >= 0) & (positions > newest - W)  # an edit reads tokens in the middle of the text
        column = torch.where(among_last, positions % W, W)  # column W takes the others, and is cut off again
        wider = NewestQueries(F.pad(self.q_BHGWD, (0, 0, 0, 1)), F.pad(self.positions_BW, (0, 1)))
        wider.restore((column, q, positions))
        return NewestQueries(wider.q_BHGWD[:, :, :, :W].contiguous(), wider.positions_BW[:, :W].contiguous())

    def restore(self, overwritten: tuple[Tensor, Tensor, Tensor]) -> None:
        """Write queries [B,H,G,Q,D] and positions [B,Q] to columns [B,Q] of this object, in place.

        The name is for `restore_step`, which undoes a decode step by it; `LastQueries.step` writes new queries by it.
        """
        column_BQ, q_BHGQD, positions_BQ = overwritten
        index = column_BQ[:, None, None, :, None].expand(q_BHGQD.shape)
        self.q_BHGWD.scatter_(3, index, q_BHGQD.to(self.q_BHGWD.dtype))
        self.positions_BW.scatter_(1, column_BQ, positions_BQ)

    def overwritten_by(self, positions_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return column (position modulo W), query and position that a decode step will overwrite, for `restore` to undo it.

        `_end_step` logs them if steps may be rolled back.
        """
        column = positions_B1 % self.positions_BW.shape[1]
        return column, self.q_BHGWD.take_along_dim(column[:, None, None, :, None], 3), self.positions_BW.gather(1, column)

    def find_contradiction(self, seen_B11: Tensor) -> Tensor:
        """Return True [B,W] for held queries that cannot be: of tokens not yet seen, or in a wrong column.

        `check_cache` asks, under strict=True and for a loaded cache. All are True if no query is held.
        """
        width, held = self.positions_BW.shape[1], self.positions_BW >= 0
        placed = (self.positions_BW % width == torch.arange(width, device=held.device)) | (self.positions_BW == -1)
        return ~(placed & (self.positions_BW < seen_B11[:, 0]) & held.any())


@dataclass
class LastLogits:
    """Logits of the last queries, for the tokens before these queries' own.

    Attributes:
        x_BHGWT: logits; the least number of the dtype where the token is no candidate, or is outside the sliding window.
        candidate_BHT: bool, the tokens before.
        counted_BW: bool, the queries that count: fewer than W where the budget has no room for more of their tokens.
    """

    x_BHGWT: Tensor
    candidate_BHT: Tensor
    counted_BW: Tensor

    def mean(self, p_BHWT: Tensor) -> Tensor:
        """Average the last queries' attention p_BHWT, as `Redundancy.value` asks: [B,H,T]; 0 for tokens not before these.

        Queries whose own tokens the budget has no room for do not count.
        """
        counted_B1W1 = self.counted_BW[:, None, :, None].to(p_BHWT.dtype)
        mean_BHT = (p_BHWT * counted_B1W1).sum(2) / counted_B1W1.sum(2).clamp_min(1)
        return mean_BHT.masked_fill(~self.candidate_BHT, 0.0)


@dataclass(frozen=True)
class LastQueries(Need[LastLogits]):
    """Logits of a layer's last queries: context.view(LastQueries) returns LastLogits.

    Attributes:
        width: how many.
        protected: whether the tokens of these queries are kept.
    """

    width: int
    protected: bool = True
    name: ClassVar[str] = "recent"
    note: ClassVar[type[Note] | None] = NewestQueries
    is_read: ClassVar[bool] = True

    @property
    def protects(self) -> int:
        return self.width if self.protected else 0

    @property
    def refuses(self) -> Mapping[str, str]:
        """Features (by names in served.py) that last queries exclude, with the reason that `why_not` puts in an error."""
        return {
            "insert": "it keeps a layer's last queries by their positions",
            "vllm": "it keeps a layer's last queries, for which a request claims no pages: use 'h2o'",
        }

    def read(self, prompt: PromptRead) -> None:
        """Put the last queries of a prompt, or a piece of one, into the layer's note, for `read_prompt`."""
        notes, q = prompt.layer.notes, prompt.plain_BHGQD.detach()
        note: NewestQueries = notes.get(self.name) or NewestQueries.make_empty(self.width, q, q.dtype)
        notes[self.name] = note.read(q, prompt.positions_BQ)

    def step(self, step: StepRead) -> None:
        """Write the query of a decode step over the oldest query in the layer's note. `_end_step` calls it."""
        note = step.layer.notes.get(self.name)
        if note is None:  # steps evict nothing
            return
        assert step.q_BHGD is not None, "layers that evict by themselves are not stacked"
        column = step.positions_B1 % self.width
        note.restore((column, step.q_BHGD.detach()[:, :, :, None], step.positions_B1))

    def view(self, context: EvictionContext) -> LastLogits:
        """Return the logits of the layer's last queries for the tokens before them, as `Redundancy.value` asks at an eviction.

        `protected`: the budget keeps the tokens of these queries, of which it may have room for fewer (`limits.observed`).
        """
        note: NewestQueries = context.layer_read.notes[self.name]
        width = context.limits.observed[:, 0] if self.protected else self.width
        first_B1 = context.newest_B11[:, 0] + 1 - width
        x_BHGWT, candidate_BHT = context.layer_read.logits(note.q_BHGWD, note.positions_BW, first_B1)
        return LastLogits(x_BHGWT, candidate_BHT, (note.positions_BW >= 0) & (note.positions_BW >= first_B1))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"W": self.width}
