"""Scopes: boolean masks of tokens protected from eviction, with sizes clamped inside the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import is_number, share
from .context import EvictionContext
from .needs import AnyNeed, Held, LastQueries, Needs, Sums, WindowAttention
from .quotas import MESSAGES, read_quota
from .selection import LAST, mask_top, score_keys

TURNS = ("all", "each", "first")


def check_size(name: str, value: object) -> None:
    """Raise KVPatchError, called by `Scope.check`, unless `value` is tokens (int >= 0) or a budget's share (float <= 1)."""
    if not is_number(value) or not 0 <= value < float("inf"):
        raise KVPatchError(f"{name}={value!r} must be a number of tokens (int) or a share of the budget (float).")
    if isinstance(value, float) and value > 1.0:
        raise KVPatchError(f"{name}={value!r} is more than the whole budget; write {int(value)} for {int(value)} tokens.")


KINDS = ("image", "text")  # of tokens that `protect=` may name; the model's configuration says which ids they have
SYSTEM = "system"  # the word of `protect=` for the system message of a chat


def fit_window(needs: Needs, room: int) -> int:
    """Return how many newest tokens are protected because a need reads their queries (its window), for `Scope.limits`.

    A window that would fill `room`, the tokens of the budget left for it, takes half of that, rounded up, so that the score
    chooses the rest. A window of the last queries (LastQueries), by which decode steps evict too, may fill it.
    """
    window = needs.protects
    if needs.find(LastQueries) is not None:
        return min(window, room)
    return window if window < room else (room + 1) // 2


@dataclass(frozen=True)
class Scope:
    """Protection of the first tokens, the newest tokens, and tokens that the user names.

    Attributes:
        sinks: number of first tokens.
        recent: number of newest tokens (int), or their share of the budget (float).
        protect: boolean mask over the prompt's columns, [n] or [B,n], or token ids (int) that are protected wherever they
            occur in the prompt, or "image" or "text": the tokens of images, or all others; or "system": the system message of
            a chat, with its header.
        turns: the tokens that the budget of a later turn of a chat covers under schedule "prompt": "all" the whole text so
            far; "each" this turn's prompt alone, keeping what earlier turns hold; "first" evicts nothing after the first
            turn.
        quota: spans of the prompt, as (start, stop) over its columns, stop excluded, or as the number of its span for each
            column, int [n] or [B,n], -1 for none; or "messages": each message of a chat that is no answer. Of n tokens that
            the budget b covers, a span of |s| tokens keeps at least floor(b |s| / n): as many of its highest scores as it has
            too few among the otherwise protected. Padding is no token of a span. Where the spans lack more in all than these
            leave of the budget, each lack is cut in proportion, rounded down. The rest goes to the highest scores, as ever.

    Source of quota: fair eviction [The Pitfalls of KV Cache Compression, arXiv 2510.00231]. Differs from the paper: any number
    of spans, any score, and what is protected otherwise counts.
    """

    sinks: int = 0
    recent: int | float = 0
    protect: Any = None
    turns: str = "all"
    quota: Any = None
    needs: ClassVar[tuple[AnyNeed, ...]] = ()  # what `mask` reads
    ranked: ClassVar[str] = "protected"  # the option that `deviation` is

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise KVPatchError(f"sinks={self.sinks!r} must be a number of tokens, 0 or more.")
        check_size("recent", self.recent)
        if self.turns not in TURNS:
            raise KVPatchError(f"turns={self.turns!r} must be one of {', '.join(map(repr, TURNS))}.")
        if self.protect is not None and not (isinstance(self.protect, str) and self.protect in (*KINDS, SYSTEM)):
            protect_tensor(self.protect)
        if self.quota is not None and not (isinstance(self.quota, str) and self.quota == MESSAGES):
            read_quota(self.quota)

    @property
    def keeps_system(self) -> bool:
        """Tell whether the system message of a chat is protected."""
        return isinstance(self.protect, str) and self.protect == SYSTEM

    @property
    def deviation(self) -> int | float:
        """Number of tokens that subclasses protect by rank (r in RoCo), or its share of the budget; here none."""
        return 0

    def limits(self, budget: int, n: int, marked: Sequence[int], needs: Needs, fixed: int, rows: int) -> tuple[int, ...]:
        """Return the sizes of a batch row's protected parts, clamped inside the budget, in the order of context.SIZES.

        first and prompt (here `fixed`): positions below which all tokens are kept; numbers of newest tokens, of tokens by
        deviation, of window rows, of all protected tokens. `set_limits` calls it as a prompt or block ends. Pure.

        Args:
            budget: tokens that a head may keep.
            n: tokens of the row's prompt.
            marked: positions that `protect=` marks, ascending.
            needs: what the policy reads, for its observation window.
            fixed: position below which all tokens are kept outside the budget.
            rows: query rows of the prompt or block.

        Raises:
            KVPatchError: `protect=` marks more tokens than the budget holds.
        """
        marked = [p for p in marked if p >= fixed]
        if len(marked) > budget:
            raise KVPatchError(
                f"protect= marks {len(marked)} tokens of a prompt of {n}, but the budget is {budget}: raise k to at "
                f"least {len(marked)} tokens or protect fewer."
            )
        # sinks, as far as the budget has room beside marked tokens; none if the schedule keeps the prompt
        first = min(max(self.sinks, fixed), fixed + budget) if fixed < n else fixed
        while first - fixed + sum(p >= first for p in marked) > budget:
            first -= 1
        free = budget - (first - fixed) - sum(p >= first for p in marked)
        # observed: rows of the observation window, whose tokens are protected (`protects`) or only read
        rows = budget if needs.find(LastQueries) is not None else rows  # these are not of the prompt alone
        protects, window = needs.protects > 0, needs.find(WindowAttention)
        observed = min(fit_window(needs, free), rows) if protects else 0 if window is None else window.width
        recent = min(share(self.recent, budget), free)
        newest = max(recent, observed) if protects else recent
        deviation = min(share(self.deviation, budget), free - newest)
        return first, newest, fixed, deviation, observed, budget - free + newest + deviation

    def list_cut_sizes(self, budget: int, needs: Needs) -> Iterator[tuple[str, int, int, int]]:
        """Yield (option, size asked for, size that `limits` cuts it to, budget that would not cut it).

        `_warn_of_cut_sizes` warns of these protected sizes, which the budget has no room for. Sizes that are given as shares of
        the budget always fit; too large a `protect=` is an error of `limits`.
        """
        sinks = min(self.sinks, budget)
        fits = {"window": fit_window(needs, budget - sinks)}
        newest = min(max(share(self.recent, budget), fits["window"]), budget - sinks)
        # option, size, and the tokens that are protected before it; `ranked`: name of the option for tokens by deviation
        for name, size, taken in (
            ("sinks", self.sinks, 0),
            ("window", needs.protects, sinks),
            ("recent", self.recent, sinks),
            (self.ranked, self.deviation, sinks + newest),
        ):
            if isinstance(size, int) and size > fits.get(name, budget - taken):
                yield name, size, fits.get(name, budget - taken), taken + size + 1

    def mask(self, context: EvictionContext) -> Tensor | None:
        """Return the protected tokens as a bool mask [B,H,T], or None. `Policy.eviction_keys` calls it at each eviction."""
        position, limits = context.positions_BHT, context.limits
        protected = context.state.get("protect")
        if limits.any_newest:
            recent = position > context.recent_B11  # the newest tokens, by `recent=` or a window
            protected = recent if protected is None else protected | recent
        if limits.any_first:
            first = position < limits.first
            protected = first if protected is None else protected | first
        return protected


@dataclass(frozen=True)
class DeviationScope(Scope):
    """Protection, besides that of Scope, of the top r tokens by standard deviation of their attention [RoCo 4.3].

    std[i] = sqrt(max(0, sum a^2 / c - (sum a / c)^2)) over the c query rows that could see token i, keys among all tokens
    that the head holds.

    Differs from the paper: the 10 newest tokens are protected, as in the authors' code, since a token that only one row has
    seen has a deviation of 0.

    Attributes:
        protected: r, tokens (int) or a share of the budget (float).
    """

    protected: int | float = 0.5
    needs: ClassVar[tuple[AnyNeed, ...]] = (Sums("sum"), Sums("squares"))

    def check(self) -> None:
        super().check()
        check_size("protected", self.protected)

    @property
    def deviation(self) -> int | float:
        return self.protected

    def mask(self, context: EvictionContext) -> Tensor | None:
        """Return True for the tokens that this eviction must not drop, bool [B,H,T].

        These are the `limits.deviation` tokens whose attention varies most between query rows, and those that Scope protects. A
        prompt that the policy keeps whole (`any_prompt`) is not among the former. `Policy.eviction_keys` calls it.
        """
        position, limits = context.positions_BHT, context.limits
        mean, n_rows = context.mean, context.rows_seen  # of attention; query rows that could see each token
        # variances rank tokens as their square roots do
        variance = (context.state["squares"] / n_rows).sub_(mean * mean).clamp_min_(0)
        ranked = score_keys(variance, position, signed=False)
        if limits.any_prompt:  # an empty slot ranks at -1 already, since its position is -1
            ranked = ranked.masked_fill(position < limits.prompt, -1)
        deviating, others = mask_top(ranked, limits.deviation, limits.deviation_count), super().mask(context)
        return deviating if others is None else deviating | others


@dataclass(frozen=True)
class RangeScope(Scope):
    """Protection, besides that of Scope, of the tokens whose values have the largest range [VaSE].

    range[i] = max(v_i) - min(v_i) over the channels of the value. The top tokens are chosen among all that are not newest ones;
    the sinks are the first of them.

    Differs from the paper: nothing.

    Attributes:
        ranges: protected tokens (int) or their share of the budget (float), the sinks among them.
    """

    ranges: int | float = 0.25
    needs: ClassVar[tuple[AnyNeed, ...]] = (Held(),)
    ranked: ClassVar[str] = "ranges"

    def check(self) -> None:
        super().check()
        check_size("ranges", self.ranges)

    @property
    def deviation(self) -> int | float:
        return self.ranges

    def mask(self, context: EvictionContext) -> Tensor | None:
        """Return True for the tokens that this eviction must not drop, bool [B,H,T].

        These are the `limits.deviation` tokens whose values have the largest range, and those that Scope protects, for
        `Policy.eviction_keys`.
        """
        position, limits, values = context.positions_BHT, context.limits, context.view(Held)[1]
        ranked = score_keys(values.amax(-1) - values.amin(-1), position, signed=False)
        if limits.any_first:  # the sinks are the first of these tokens
            ranked = ranked.masked_fill(position < limits.first, LAST)
        # an empty slot's position is -1
        ranked = ranked.masked_fill((position > context.recent_B11) | (position < limits.prompt.clamp(min=0)), -1)
        wide, others = mask_top(ranked, limits.deviation, limits.deviation_count), super().mask(context)
        return wide if others is None else wide | others


@dataclass(frozen=True)
class AllBut:
    """All tokens of a prompt but those of these ids, as a value of `protect=`."""

    ids: tuple[int, ...]


def protect_tensor(protect: Any) -> Tensor:
    """Convert a user's `protect=` to a tensor: bool for a mask, int64 for token ids; for AllBut the ids that it leaves out.

    `Scope.check` calls it as a policy is made, `mark_protected` as a prompt is read.

    Raises:
        KVPatchError: anything else, or nothing to protect.
    """
    if isinstance(protect, AllBut):
        return torch.tensor(protect.ids, device="cpu")
    try:
        tensor = torch.as_tensor(protect, device=None if isinstance(protect, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise KVPatchError(
            f"protect={protect!r} must be a boolean mask over the prompt ([n] or [B, n]), token ids, 'image', 'text' or "
            "'system'."
        ) from error
    if not tensor.numel():
        raise KVPatchError(f"protect={protect!r} marks nothing: give token ids or a boolean mask, or leave it out (None).")
    if tensor.dtype == torch.bool and tensor.ndim in (1, 2):
        return tensor
    if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim <= 1:
        if int(tensor.min()) < 0:
            raise KVPatchError(f"protect= names token {int(tensor.min())}: give token ids, 0 or more, or a boolean mask.")
        return tensor.reshape(-1).long()
    raise KVPatchError(
        f"protect= has dtype {tensor.dtype} and {tensor.ndim} dimensions: give a boolean mask over the prompt "
        "([n] or [B, n]) or a list of token ids."
    )
