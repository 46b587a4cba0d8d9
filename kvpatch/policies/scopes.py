"""Which tokens may be evicted at all? Protection is a boolean mask; its sizes are clamped inside the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import share
from .context import EvictionContext
from .scores import Score
from .selection import in_top, score_keys

TURNS = ("all", "each", "first")


def check_size(name: str, value: object) -> None:
    """A protected size is a number of tokens (int >= 0) or a share of the budget (float in [0, 1])."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise KVPatchError(f"{name}={value!r} must be a number of tokens (int) or a share of the budget (float).")
    if isinstance(value, float) and value > 1.0:
        raise KVPatchError(
            f"{name}={value!r} is more than the whole budget; write {int(value)} for {int(value)} tokens."
        )


@dataclass(frozen=True)
class Scope:
    """Protects the first `sinks` tokens, the `recent` newest ones, and the user's own.

    sinks: tokens. recent: tokens (int) or a share of the budget (float). protect: a boolean mask over the prompt's
    columns ([n] or [B,n]), or token ids (ints) that are protected wherever they occur in the prompt. turns: what the prompt
    of a later turn of a chat counts under schedule "prompt": "all" budgets the whole text so far; "each" leaves what
    earlier turns hold and budgets this turn's prompt; "first" evicts nothing after the first.
    """

    sinks: int = 0
    recent: int | float = 0
    protect: Any = None
    turns: str = "all"
    statistics: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise KVPatchError(f"sinks={self.sinks!r} must be a number of tokens, 0 or more.")
        check_size("recent", self.recent)
        if self.turns not in TURNS:
            raise KVPatchError(f"turns={self.turns!r} must be one of {', '.join(map(repr, TURNS))}.")
        if self.protect is not None:
            protect_tensor(self.protect)

    @property
    def deviation(self) -> int | float:
        """RoCo's r; 0 where the scope has none."""
        return 0

    def limits(
        self, budget: int, n: int, own: Sequence[int], score: Score, fixed: int, rows: int
    ) -> tuple[int, ...]:
        """The fields of Limits for one row, in order.

        budget: tokens; n: the row's prompt; own: positions that `protect=` marks, ascending; fixed: all tokens below this
        position are kept outside the budget; rows: query rows of the prompt or block.
        """
        own, start = [p for p in own if p >= fixed], fixed
        if len(own) > budget:
            raise KVPatchError(
                f"protect= marks {len(own)} tokens of a prompt of {n}, but the budget is {budget}: raise k to at "
                f"least {len(own)} tokens or protect fewer."
            )
        # sinks are tokens of the prompt that is cut down: none where all of it is kept
        first = min(max(self.sinks, start), start + budget) if start < n else start
        while first - start + sum(p >= first for p in own) > budget:
            first -= 1
        free = budget - (first - start) - sum(p >= first for p in own)
        observed = min(score.observed_rows, free, rows) if score.protects_window else score.observed_rows
        recent = min(share(self.recent, budget), free)
        deviation = min(share(self.deviation, budget), free - recent)
        newest = max(recent, observed) if score.protects_window else recent
        return first, newest, fixed, deviation, observed, budget - free + newest + deviation

    def mask(self, context: EvictionContext) -> Tensor | None:
        """bool [B,H,T]: the tokens that must stay; None where there are none."""
        position, limits = context.positions_BHT, context.limits
        protected = context.state.get("protect")
        if limits.any_newest:
            recent = position > context.recent_B11
            protected = recent if protected is None else protected | recent
        if limits.any_first:
            first = position < limits.first
            protected = first if protected is None else protected | first
        return protected


@dataclass(frozen=True)
class DeviationScope(Scope):
    """Also protects the top r by standard deviation of a token's attention [RoCo 4.3].

    std[i] = sqrt(max(0, sum a^2 / c - (sum a / c)^2)), over the rows that could see i; ranked among all that the head
    holds. protected: r, tokens or a share of the budget. Differs from the paper: the 10 newest are protected, as in the
    authors' code, for a token that one row has seen has deviation 0.
    """

    protected: int | float = 0.5
    statistics: ClassVar[tuple[str, ...]] = ("sum", "squares")

    def check(self) -> None:
        super().check()
        check_size("protected", self.protected)

    @property
    def deviation(self) -> int | float:
        return self.protected

    def mask(self, context: EvictionContext) -> Tensor | None:
        position, limits = context.positions_BHT, context.limits
        mean, seen = context.mean, context.rows_seen
        # the order of variances is that of deviations
        variance = (context.state["squares"] / seen).sub_(mean * mean).clamp_min_(0)
        ranked = score_keys(variance, position, signed=False)
        if limits.any_prompt:  # an empty slot is at -1 already, for its position is
            ranked = ranked.masked_fill(position < limits.prompt, -1)
        steady, others = in_top(ranked, limits.deviation, limits.deviation_count), super().mask(context)
        return steady if others is None else steady | others


def protect_tensor(protect: Any) -> Tensor:
    """`protect=` as a tensor: bool for a mask, int64 for token ids. Raises KVPatchError for anything else."""
    if isinstance(protect, list | tuple) and not len(protect):
        raise KVPatchError(f"protect={protect!r} marks nothing: give token ids or a boolean mask, or leave it out (None).")
    try:
        tensor = torch.as_tensor(protect)
    except (TypeError, ValueError, RuntimeError) as error:
        raise KVPatchError(
            f"protect={protect!r} must be a boolean mask over the prompt ([n] or [B, n]) or token ids."
        ) from error
    if tensor.dtype == torch.bool and tensor.ndim in (1, 2):
        return tensor
    if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim <= 1:
        if tensor.numel() and int(tensor.min()) < 0:
            raise KVPatchError(f"protect= names token {int(tensor.min())}: give token ids, 0 or more, or a boolean mask.")
        return tensor.reshape(-1).long()
    raise KVPatchError(
        f"protect= has dtype {tensor.dtype} and {tensor.ndim} dimensions: give a boolean mask over the prompt "
        "([n] or [B, n]) or a list of token ids."
    )
