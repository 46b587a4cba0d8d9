"""The observation window: the attention of a prompt's last rows, and of each decode step's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor

from ..context import EvictionContext
from .base import Fold, Need, Note, PromptRead, StepRead


@dataclass
class WindowRows(Note):
    """Queries and positions of the last rows of a prompt that has not ended."""

    q_BHGWD: Tensor
    rows_BW: Tensor


@dataclass(frozen=True)
class WindowAttention(Need[Tensor]):
    """Attention that an observation window gives to each held key: context.state["observed"] [B,H,T].

    At the end of a prompt the mean over its last rows, averaged over the group; at a decode step the attention of its token. If
    a prompt is read in blocks, the rows are the last ones of each block, or all rows of a shorter block.

    Attributes:
        width: query rows of the window.
        fold: fold(rows) returns what a block of the window's rows gives each key [N,M], in place of the mean attention.
        join: "max" or "sum", how the folds of several blocks are joined.
        protected: whether the window's own tokens are kept.
    """

    width: int
    fold: Fold | None = None
    join: Literal["max", "sum"] = "sum"
    protected: bool = False
    name: ClassVar[str] = "window"
    states: ClassVar[tuple[str, ...]] = ("observed",)
    lasts: ClassVar[bool] = False
    rows: ClassVar[Literal["none", "window", "all"]] = "window"
    alone: ClassVar[bool] = False
    is_read: ClassVar[bool] = True

    @property
    def protects(self) -> int:
        return self.width if self.protected else 0

    def read(self, prompt: PromptRead) -> None:
        """Write the attention that a prompt's last `width` rows give each key to the layer's tensor "observed" [B,H,T].

        `read_prompt` calls it; it writes as the prompt ends (`ends`). An earlier piece of the prompt leaves its last queries in
        the layer's notes instead, for the next piece.
        """
        layer, q_BHGQD, rows_BW, lse = prompt.layer, prompt.q_BHGQD, prompt.rows_BQ, prompt.lse_BHGQ
        # put the queries that waited before this piece's, and take the last W
        if (earlier := layer.notes.pop(self.name, None)) is not None:
            # the log-sum-exp of earlier rows was not kept
            q_BHGQD, rows_BW, lse = torch.cat([earlier.q_BHGWD, q_BHGQD], 3), torch.cat([earlier.rows_BW, rows_BW], 1), None
        # prompt.once shares a tensor that is equal in all layers
        once, W = prompt.once if earlier is None else _make_now, min(self.width, rows_BW.shape[1])
        # the newest rows of each text, wherever its padding lies
        index_BW = once(f"columns of {W} rows", lambda: rows_BW.topk(W, dim=1).indices.sort(1).values)
        q_BHGWD, lse = pick_rows(q_BHGQD, lse, index_BW)
        if not prompt.ends:
            layer.notes[self.name] = WindowRows(q_BHGWD, rows_BW.gather(1, index_BW))
            return
        n_observed = layer.limits.observed

        def mark_rows() -> Tensor:
            """Return the window's positions, -1 for rows beyond the room that the budget has for it."""
            last_BW = rows_BW.gather(1, index_BW)
            return last_BW.masked_fill(last_BW <= prompt.newest()[:, 0] - n_observed[:, 0], -1)

        counted_BW = once(f"{W} rows under {id(layer.limits)}", mark_rows)  # layers of equal limits share them
        # the sum over the window's rows (written as a mean), or what the score's `fold` makes of them
        attention = prompt.attention(q_BHGWD, counted_BW, lse, self.fold, self.join, last=True)
        layer.statistic("observed").copy_(attention if self.fold else attention / n_observed.clamp(min=1))

    def step(self, step: StepRead) -> None:
        """Write a decode step's attention, averaged over the group, to the layer's tensor "observed". `_end_step` calls it."""
        if step.p_BHGT is not None:  # else kernels have written it
            step.layer.statistic("observed").copy_(step.p_BHGT.mean(2))

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        return ()  # nothing beside attention: kernels of decode steps write "observed" themselves

    def view(self, context: EvictionContext) -> Tensor:
        return context.state["observed"]


def _make_now(name: str, make: Callable[[], Tensor]) -> Tensor:
    """Return make(), in place of `PromptRead.once`, where a tensor is not shared by the layers."""
    return make()


def pick_rows(q_BHGQD: Tensor, lse_BHGQ: Tensor | None, index_BR: Tensor) -> tuple[Tensor, Tensor | None]:
    """Pick a prompt's queries at R columns of each row, [B,H,G,R,D], and their log-sum-exps, to compute attention of some rows.

    `WindowAttention.read` calls it, and `_sum_rows` of attention/prefill.py for a sample of rows.
    """
    b = torch.arange(len(index_BR), device=index_BR.device)[:, None]
    q = rearrange(rearrange(q_BHGQD.detach(), "b h g q d -> b q h g d")[b, index_BR], "b r h g d -> b h g r d")
    return q, None if lse_BHGQ is None else rearrange(lse_BHGQ[b, :, :, index_BR], "b r h g -> b h g r")
