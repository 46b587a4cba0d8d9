"""Quotas: spans of a prompt each of which keeps at least its share of the budget, whatever the scores of the others are.

A token's `span` is an int64: the number of its span from 1 on, times 2**32, plus the tokens of the span; 0 where it is of none.
Its `quota` is the tokens that a head keeps of that span, set where a prompt or block ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from .numbers import on_device
from .selection import LAST

if TYPE_CHECKING:
    from .context import EvictionContext

_NUMBER = 32  # bit at which the span's number begins
_TOKENS = (1 << _NUMBER) - 1

Span = tuple[int, int]
MESSAGES = "messages"  # the word of `quota=` for the messages of a chat


def read_quota(quota: Any) -> list[Span] | Tensor:
    """Convert a user's `quota=` (spans of a prompt, each to keep its share of the budget) to pairs or an int64 tensor.

    `Scope.check` calls it as a policy is made, `number_columns` as a prompt is read.

    Args:
        quota: (start, stop) for each span, or the number of its span for each token, [n] or [B,n], -1 for none.

    Raises:
        KVPatchError: anything else, a span without tokens, or spans that overlap.
    """
    spans = _read_spans(quota)
    if spans is not None:
        return spans
    try:
        numbers = torch.as_tensor(quota, device=None if isinstance(quota, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise KVPatchError(_say_forms(f"quota={quota!r}")) from error
    if numbers.dtype not in (torch.int64, torch.int32) or numbers.ndim not in (1, 2):
        raise KVPatchError(_say_forms(f"quota= has dtype {numbers.dtype} and {numbers.ndim} dimensions"))
    low, high = (int(one) for one in numbers.aminmax()) if numbers.numel() else (-1, -1)
    if low < -1 or high >= _TOKENS >> 1:  # else number + 1 has no room above the count of tokens
        raise KVPatchError(f"quota= has span number {low if low < -1 else high}: give 0, 1, 2, ... and -1 for no span.")
    if high < 0:
        raise KVPatchError("quota= has no span: give each of its tokens a number, 0 or more, or leave it out (None).")
    return numbers.long()


def _say_forms(what: str) -> str:
    """Return the error text of `read_quota` for a value of another form; what: begins it, as "quota=3"."""
    return (
        f"{what}: give spans of the prompt, such as [(0, 40), (40, 90)], or the number of its span for each token, [n] or "
        "[B, n], -1 for none."
    )


def _read_spans(quota: Any) -> list[Span] | None:
    """Return `quota=` as spans if it is a list of pairs, for `read_quota`; else None. Raises KVPatchError for bad pairs."""
    if not isinstance(quota, list | tuple):
        return None
    if not quota:
        raise KVPatchError(f"quota={quota!r} names no span: give (start, stop) of each, or leave it out (None).")
    if not all(isinstance(one, list | tuple) and len(one) == 2 for one in quota):
        return None
    for pair in quota:
        if not all(type(end) is int for end in pair) or not 0 <= pair[0] < pair[1]:
            raise KVPatchError(f"quota= has the span {tuple(pair)!r}: give columns (start, stop) with 0 <= start < stop.")
    spans = [(start, stop) for start, stop in quota]
    for one, other in pairwise(sorted(spans)):
        if other[0] < one[1]:
            raise KVPatchError(f"quota= has spans {one} and {other}, which overlap: give each token one span.")
    return spans


def number_columns(quota: Any, B: int, columns: int, device: torch.device) -> Tensor:
    """Return the span number of each column of a prompt by `quota=`, int64 [B,columns]; -1 for none.

    `mark_spans` calls it before a prompt is read. Numbers given for fewer rows count for their copies too (beams).

    Raises:
        KVPatchError: spans end after the prompt, or the numbers have another shape.
    """
    read = read_quota(quota)
    if isinstance(read, Tensor):
        numbers = read.to(device)
        numbers = numbers.expand(B, -1) if numbers.ndim == 1 else numbers.repeat_interleave(max(B // len(numbers), 1), 0)
        if numbers.shape != (B, columns):
            raise KVPatchError(
                f"quota= has numbers of shape {list(read.shape)}, but the prompt is [{B}, {columns}]: give one for each of "
                "its columns, or spans."
            )
        return numbers
    last = max(stop for _, stop in read)
    if last > columns:
        raise KVPatchError(f"quota= has a span up to column {last}, but the prompt has {columns}: give spans of it.")
    numbers = torch.full((columns,), -1, device=device)
    for number, (start, stop) in enumerate(read):
        numbers[start:stop] = number
    return numbers.expand(B, -1)


def encode_spans(numbers_BN: Tensor, real_BN: Tensor) -> Tensor:
    """Encode each token's span (a part with a share of the budget) as an int64 [B,N], stored with the token as `span`.

    `mark_spans` calls it before a prompt is read. The lower 32 bits are the span's number of tokens, those above its number
    from 1 on; 0 is no span. numbers_BN: of spans, -1 for none. real_BN: False for padding (no span).
    """
    numbers = torch.where(real_BN, numbers_BN + 1, 0)
    ascending, order = numbers.sort(-1)
    begin, end = (torch.searchsorted(ascending, ascending, right=right) for right in (False, True))
    tokens = torch.empty_like(numbers).scatter_(-1, order, end - begin)
    return torch.where(numbers > 0, (numbers << _NUMBER) | tokens, 0)


def find_quotas(span: Tensor, budget_B: Sequence[int], total_B: Sequence[int]) -> Tensor:
    """Return for each token [B,H,T] its span's quota: how many tokens of the span a head keeps at least.

    Of |s| tokens of a span these are floor(budget * |s| / total). `_set_quotas` stores them as a prompt or block ends.

    span: as encode_spans makes it. Of each row, budget_B: tokens that a head may keep; total_B: tokens that this budget is for.
    """
    budget, total = (on_device(row, span.device).view(-1, 1, 1) for row in (budget_B, total_B))
    tokens = span & _TOKENS
    return torch.minimum(tokens, tokens * budget // total.clamp(min=1))


def count_quotas(span: Tensor, held: Tensor, budget_B: Sequence[int], total_B: Sequence[int]) -> list[int]:
    """Sum for each row the quotas (see find_quotas) of all spans of which a head holds a token.

    `set_limits` raises the limit of protected tokens by this number as a prompt or block ends. span: [B,H,T], as encode_spans
    makes it. held: bool [B,H,T], False for empty slots. budget_B, total_B: of each row, as in find_quotas.
    """
    sums = []
    for span_HT, held_HT, budget, total in zip(span, held, budget_B, total_B, strict=True):
        sizes = [code & _TOKENS for code in span_HT[held_HT].unique().tolist()]
        sums.append(sum(min(size, budget * size // max(total, 1)) for size in sizes))
    return sums


def protect_shares(context: EvictionContext, keys: Tensor, protected: Tensor | None, dead: Tensor | None) -> Tensor | None:
    """Return `protected` with tokens added until each span of `quota=` has its share; `Policy.eviction_keys` calls it.

    Where fewer tokens of a span are protected than its quota, those of its highest keys are added. If all spans together lack
    more tokens than are left of the budget, each span's lack is cut in proportion, rounded down.

    Args:
        context: state of the layer; its `limits.nominal` bounds the protected tokens of a head.
        keys: score keys [B,H,T].
        protected: bool mask of protected tokens, or None.
        dead: bool mask of tokens that no later query can see, which are not chosen, or None.
    """
    if "span" not in context.state:
        return protected
    position, limits = context.positions_BHT, context.limits
    counted = position >= (limits.prompt.clamp(min=0) if limits.any_prompt else 0)
    stays = counted.new_zeros(()) if protected is None else protected & counted
    # room: tokens that may still be protected; member: tokens of spans
    room = limits.nominal - (0 if protected is None else stays.sum(-1, keepdim=True))
    member = counted & (context.state["span"] > 0)
    if dead is not None:
        member = member & (stays | ~dead)
    span = context.state["span"].masked_fill(~member, 0)
    # sort by span, then the protected, then by score
    order = keys.masked_fill(stays & member, LAST).argsort(dim=-1, descending=True)
    span, by_span = span.gather(-1, order).sort(dim=-1, stable=True)
    order = order.gather(-1, by_span)
    # rank each token in its span (segment); choose those after the protected ones, up to the quota
    begins = torch.cat([torch.zeros_like(span[..., :1]), (span[..., 1:] != span[..., :-1]).long()], -1)
    segment, index = begins.cumsum(-1), torch.arange(span.shape[-1], device=span.device)
    rank = index - (begins * index).cummax(-1).values
    n_protected = _count_in(segment, (stays & member).gather(-1, order))
    chosen = (rank >= n_protected) & (rank < context.state["quota"].gather(-1, order)) & (span > 0)
    # tokens that each span lacks, and all together, cut to the room
    lack, lacks = _count_in(segment, chosen), chosen.sum(-1, keepdim=True)
    lack = torch.where(lacks > room, lack * room // lacks.clamp(min=1), lack)
    chosen = torch.zeros_like(chosen).scatter(-1, order, chosen & (rank < n_protected + lack))
    return chosen if protected is None else protected | chosen


def _count_in(segment: Tensor, marked: Tensor) -> Tensor:
    """Return for each token the number of `marked` ones in its segment (tokens of one span), for `protect_shares`: [B,H,T]."""
    return torch.zeros_like(segment).scatter_add_(-1, segment, marked.long()).gather(-1, segment)
