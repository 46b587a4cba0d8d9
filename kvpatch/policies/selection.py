"""From scores to the kept set.

Every choice goes through one total order, an int64 per token: tier, then score, then position. The score's 32 bits and 30
bits of position make ties impossible, so results do not depend on where a token lies in memory; tiers are booleans
folded into the top bits, so no score is ever replaced by a magic number.

A score that is NaN (a broken weight, an overflow) counts as the lowest there is, and such tokens go oldest first: a head that
knows nothing about its tokens is a window, on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import KVPatchError

if TYPE_CHECKING:
    from .context import EvictionContext

_TIER = 1 << 62
LAST, FIRST = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
MAX_POSITION = (1 << 30) - 1


def score_keys(score: Tensor, positions: Tensor, signed: bool) -> Tensor:
    """int64 in [0, 2**62), ascending in (score, position). `score` float, `positions` int64 >= 0, same shape.

    signed: some scores may be negative. (The bits of floats that are not are in their own order already.) NaN is the lowest,
    whatever its sign and payload.
    """
    # one op, and no second one where scores are float32: this runs at every step
    score = score.nan_to_num(-torch.inf if signed else 0.0, posinf=torch.inf, neginf=-torch.inf).to(torch.float32)
    bits = score.contiguous().view(torch.int32)
    if signed:
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order = float order
        return ((bits.long() + (1 << 31)) << 30) | positions
    return (bits.long() << 30) | positions


def eviction_keys(order: Tensor, *, protected: Tensor | None, dead: Tensor | None, empty: Tensor | None) -> Tensor:
    """Protected tokens above all, tokens that no later query can see (`dead`) below the rest, empty slots last."""
    if dead is not None:
        order = torch.where(dead, order - _TIER, order)
    if protected is not None:
        order = order.masked_fill(protected, LAST)
    return order if empty is None else order.masked_fill(empty, FIRST)


def top(order: Tensor, count_BH: Tensor, counts: list[int]) -> tuple[Tensor, Tensor | None]:
    """The kept entries of each head, in text order.

    order [B,H,T], text order, and tokens to keep of each head, [B,H] and as a flat list -> (index [B,H,K] ascending, K
    the largest count; None where all heads keep as many, else a bool [B,H,K] that is False behind a head's own count).
    """
    width = max(counts)
    if min(counts) == width:
        return order.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values, None
    index = order.topk(width, dim=-1).indices  # best first, so that a head's own count is a prefix
    kept = torch.arange(width, device=order.device) < count_BH[..., None]
    # text order among the kept ones, the others behind
    index = index.masked_fill(~kept, order.shape[-1]).sort(dim=-1).values
    return index.clamp(max=order.shape[-1] - 1), kept


def victim(order: Tensor, empty: Tensor | None) -> Tensor:
    """Index [B,H] of the lowest token that is there at all. `order` [B,H,T] is `tiers`' without `empty`."""
    if empty is not None:
        order = order.masked_fill(empty, LAST)
    return order.argmin(dim=-1)


def in_top(order: Tensor, count_B11: Tensor, count: int | None) -> Tensor:
    """bool like `order` [B,H,T]: is a token among its head's first `count_B11` [B,1|H,1] (`count`, if one for all)?"""
    T = order.shape[-1]
    if count is not None:
        if count == 0:
            return torch.zeros_like(order, dtype=torch.bool)
        # a fifth faster than kthvalue on the CPU
        return order >= order.topk(min(count, T), dim=-1, sorted=False).values.amin(-1, keepdim=True)
    ranked = order.sort(dim=-1, descending=True).values
    last = ranked.gather(-1, (count_B11 - 1).clamp(min=0, max=T - 1).expand(*order.shape[:-1], 1))
    return (order >= last) & (count_B11 > 0)


@dataclass(frozen=True)
class TwoStage:
    """Perturbation-constrained selection [CriticalKV Algorithm 1].

    Of the c tokens that a head may keep beside its protected ones, `alpha` * c go to the highest scores A, the rest to the
    highest (A + eps) * ||v W_O||: a bound on what losing a token does to the attention output. A is normalised to sum to
    one over the candidates, W_O are the head's rows of the output projection, `norm` is 1 or 2 (Appendix F); with grouped
    queries the norm is averaged over the group, as A is. Differs from the paper: nothing (its listing's header has alpha
    0.25, its text and experiments 0.5).
    """

    alpha: int | float = 0.5
    eps: float = 1e-4
    norm: int = 1

    def check(self) -> None:
        for name, value in (("alpha", self.alpha), ("eps", self.eps)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise KVPatchError(f"{name}={value!r} must be a number in [0, 1].")
        if self.norm not in (1, 2) or isinstance(self.norm, bool):
            raise KVPatchError(f"norm={self.norm!r} must be 1 or 2: which norm of the projected values bounds the loss.")

    def eviction_keys(
        self, context: EvictionContext, score: Tensor, first: Tensor, protected: Tensor | None, dead: Tensor | None
    ) -> Tensor:
        """The order [B,H,T] whose top `context.keep_BH1` are the kept set; `first` is the order by scores alone."""
        assert context.keep_BH1 is not None and context.norms is not None
        empty = context.positions_BHT < 0 if context.empty else None
        keep_BH1 = context.keep_BH1
        if protected is not None:
            held = protected if empty is None else protected & ~empty
            keep_BH1 = keep_BH1 - held.sum(-1, keepdim=True)
        out = protected if empty is None else empty if protected is None else protected | empty
        if out is not None:
            first, score = first.masked_fill(out, FIRST), score.masked_fill(out, 0.0)
        count_BH1 = (keep_BH1.double() * self.alpha + 1e-6).long()
        critical = in_top(first, count_BH1, _one_for_all(count_BH1))
        if out is not None:
            critical = critical & ~out
        score = score.nan_to_num(0.0, posinf=torch.inf)  # or one would make NaN of all shares
        share = score / score.sum(-1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)
        bound = score_keys((share + self.eps) * context.norms(critical, out), context.positions_BHT, signed=False)
        return eviction_keys(bound, protected=critical if protected is None else critical | protected, dead=dead, empty=None)


def _one_for_all(count: Tensor) -> int | None:
    """The number that all entries are, where that is cheap to know."""
    if count.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    low, high = count.aminmax()
    return int(low) if low == high else None
