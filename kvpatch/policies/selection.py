"""From scores to the kept set.

Every choice goes through one total order, an int64 per token: tier, then score, then position. The score's 32 bits and 30
bits of position make ties impossible, so results do not depend on where a token lies in memory; tiers are booleans
folded into the top bits, so no score is ever replaced by a magic number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIER = 1 << 62
_LAST, _FIRST = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
MAX_POSITION = (1 << 30) - 1


def order(score: Tensor, positions: Tensor, signed: bool) -> Tensor:
    """int64 in [0, 2**62), ascending in (score, position). `score` float, `positions` int64 >= 0, same shape.

    signed: some scores may be negative. (The bits of floats that are not are in their own order already.)
    """
    bits = score.to(torch.float32).contiguous().view(torch.int32)
    if signed:
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order = float order
        return ((bits.long() + (1 << 31)) << 30) | positions
    return (bits.long() << 30) | positions


def tiers(order: Tensor, *, protected: Tensor | None, dead: Tensor | None, empty: Tensor | None) -> Tensor:
    """Protected tokens above all, tokens that no later query can see (`dead`) below the rest, empty slots last."""
    if dead is not None:
        order = torch.where(dead, order - _TIER, order)
    if protected is not None:
        order = order.masked_fill(protected, _LAST)
    return order if empty is None else order.masked_fill(empty, _FIRST)


def top(order: Tensor, budget_B: list[int]) -> tuple[Tensor, Tensor | None]:
    """The kept entries of each head.

    order [B,H,T] -> (index [B,H,K] ascending, K the largest budget; None where all rows have the same budget, else a
    bool [B,1,K] that is False behind a row's own budget). A row that holds fewer tokens than its budget keeps all.
    """
    width = min(max(budget_B), order.shape[-1])
    if min(budget_B) >= width:
        return order.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values, None
    index = order.topk(width, dim=-1).indices  # best first, so that a row's own budget is a prefix
    rank = torch.arange(width, device=order.device)
    kept = rank < torch.tensor(budget_B, device=order.device)[:, None, None]
    # text order among the kept ones, the others behind
    index = index.masked_fill(~kept, order.shape[-1]).sort(dim=-1).values
    return index.clamp(max=order.shape[-1] - 1), kept


def victim(order: Tensor, empty: Tensor | None) -> Tensor:
    """Index [B,H] of the lowest token that is there at all. `order` [B,H,T] is `tiers`' without `empty`."""
    if empty is not None:
        order = order.masked_fill(empty, _LAST)
    return order.argmin(dim=-1)


def in_top(order: Tensor, count_B11: Tensor, count: int | None) -> Tensor:
    """bool like `order` [B,H,T]: is a token among its head's first `count_B11` [B,1,1] (`count`, if one for all rows)?"""
    T = order.shape[-1]
    if count is not None:
        if count == 0:
            return torch.zeros_like(order, dtype=torch.bool)
        return order >= order.kthvalue(max(T - count + 1, 1), dim=-1, keepdim=True).values
    ranked = order.sort(dim=-1, descending=True).values
    last = ranked.gather(-1, (count_B11 - 1).clamp(min=0, max=T - 1).expand(*order.shape[:-1], 1))
    return (order >= last) & (count_B11 > 0)
