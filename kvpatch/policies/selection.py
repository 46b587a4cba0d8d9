"""Selection of the kept set by eviction keys: one int64 per token, the lowest evicted first.

A key combines, from the highest bits to the lowest: protection, 32 bits of the score, 30 bits of the position. Positions
differ, so there are no ties, and results do not depend on the slots that tokens occupy. Protection has bits of its own, so no
score is replaced by a magic number.

A score of NaN (from a broken weight or an overflow) counts as the lowest score. Tokens with such scores are evicted oldest
first, so a head without valid scores keeps a window, on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import MAX_POSITION, is_number
from .context import at_hand

if TYPE_CHECKING:
    from .context import EvictionContext

_DEAD = 1 << 62  # above every score key
LAST, FIRST = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min


def score_keys(score: Tensor, positions: Tensor, signed: bool) -> Tensor:
    """Return int64 keys in [0, 2**62) that sort by (score, position), for `Policy.eviction_keys` at each eviction.

    Args:
        score: float tensor; NaN ranks lowest, regardless of its sign and payload.
        positions: int64 tensor of the same shape, at least 0 and at most MAX_POSITION.
        signed: whether scores may be negative. The bit patterns of non-negative floats already sort as the floats do.
    """
    # this runs at every step: for float32 scores a single operation
    score = score.nan_to_num(-torch.inf if signed else 0.0, posinf=torch.inf, neginf=-torch.inf).to(torch.float32)
    bits = score.contiguous().view(torch.int32)
    if signed:
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # makes two's complement sort as the floats do
        return ((bits.long() + (1 << 31)) << 30) | positions
    return (bits.long() << 30) | positions


def eviction_keys(keys: Tensor, *, protected: Tensor | None, dead: Tensor | None, empty: Tensor | None) -> Tensor:
    """Return score keys with protected, dead and empty slots moved to the ends, for `Policy.eviction_keys` at each eviction.

    Args:
        keys: result of `score_keys`.
        protected: bool mask of tokens that rank above all others (LAST); None where there are none.
        dead: bool mask of tokens that no later query can see, which rank below the rest.
        empty: bool mask of empty slots, which rank lowest (FIRST).
    """
    if dead is not None:
        keys = torch.where(dead, keys - _DEAD, keys)
    if protected is not None:
        keys = keys.masked_fill(protected, LAST)
    return keys if empty is None else keys.masked_fill(empty, FIRST)


def select_top(keys: Tensor, count_BH: Tensor, counts: list[int]) -> tuple[Tensor, Tensor | None]:
    """Select the tokens that each head keeps; `_compress_layer` calls it as a prompt or block ends.

    Args:
        keys: eviction keys [B,H,T], slots in text order.
        count_BH: tokens that each head keeps.
        counts: the same as a flat list.

    Returns:
        The kept slots [B,H,K], ascending, K the largest count, and a bool mask [B,H,K] of entries within the head's own
        count, or None if all heads keep the same number.
    """
    width = max(counts)
    if min(counts) == width:
        return keys.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values, None
    index = keys.topk(width, dim=-1).indices  # highest first, so that a head's own count is a prefix
    kept = torch.arange(width, device=keys.device) < count_BH[..., None]
    # kept slots in text order, the others after them
    index = index.masked_fill(~kept, keys.shape[-1]).sort(dim=-1).values
    return index.clamp(max=keys.shape[-1] - 1), kept


def find_victims(keys: Tensor, empty: Tensor | None, count: int) -> Tensor:
    """Return the slots [B,H,count] of the tokens that a decode step evicts from each head: those of the lowest keys.

    `_evict_over_budget` calls it. keys: eviction keys [B,H,T], computed without `empty`. empty: bool mask of empty slots, which
    are skipped.
    """
    if empty is not None:
        keys = keys.masked_fill(empty, LAST)
    if count == 1:
        return keys.argmin(dim=-1, keepdim=True)
    return keys.topk(min(count, keys.shape[-1]), dim=-1, largest=False, sorted=False).indices


def mask_top(keys: Tensor, count_B11: Tensor, count: int | None) -> Tensor:
    """Return True for the tokens with the highest keys of each head, bool [B,H,T]: for `DeviationScope.mask` and others.

    Args:
        keys: eviction or score keys (the module says what they are) [B,H,T], all different within a head.
        count_B11: number of tokens, [B,1,1] or [B,H,1].
        count: the same number if all heads share it, which is faster; else None.
    """
    T = keys.shape[-1]
    if count is not None:
        if count <= 0:  # fewer than none where a scope protects more than a head may hold
            return torch.zeros_like(keys, dtype=torch.bool)
        # a fifth faster than kthvalue on the CPU
        return keys >= keys.topk(min(count, T), dim=-1, sorted=False).values.amin(-1, keepdim=True)
    ranked = keys.sort(dim=-1, descending=True).values
    last = ranked.gather(-1, (count_B11 - 1).clamp(min=0, max=T - 1).expand(*keys.shape[:-1], 1))
    return (keys >= last) & (count_B11 > 0)


@dataclass(frozen=True)
class Selection:
    """Base class of selections: from scores and protection to the kept set.

    Attributes:
        schedules: schedules under which the selection is defined.
        only_then: what it does that other schedules do not allow, as the error about these says it.
        weighs_values: whether it reads `context.norms` and takes scores for weights.
    """

    schedules: ClassVar[tuple[str, ...]] = ("prompt", "decode", "both")
    only_then: ClassVar[str] = ""
    weighs_values: ClassVar[bool] = False

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""

    def eviction_keys(
        self, context: EvictionContext, score: Tensor, first: Tensor, protected: Tensor | None, dead: Tensor | None
    ) -> Tensor:
        """Return eviction keys [B,H,T] whose top `context.keep_BH1` are the kept set; `Policy.eviction_keys` asks each time.

        Args:
            context: with `keep_BH1`, which is None where heads are about to share a budget by score, and `norms`, which returns
                norms of projected values.
            score: values of the policy's score [B,H,T].
            first: eviction keys by score alone.
            protected: bool mask of protected tokens, or None.
            dead: bool mask of tokens that no later query can see, or None.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Chunked(Selection):
    """Selection of whole chunks of the text [ChunkKV].

    The text is cut into chunks of `size` tokens. A chunk's score is the mean over its candidates (held tokens that are not
    protected), and over the heads of the layer too if they choose together. The chunks of the highest scores are kept; of
    the one that the budget cuts, the newest tokens are, so that the kept set is exactly the budget.

    Differs from the paper: the budget is exact, where the code of kvpress keeps a share of the chunks; protected tokens do not
    count in the mean.

    Attributes:
        size: tokens of a chunk.
        together: whether the heads of a layer keep the same chunks.
    """

    size: int = 20
    together: bool = True
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)
    only_then: ClassVar[str] = "keeps whole chunks of a prompt, which a generated token is not part of"

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        if type(self.size) is not int or not 1 <= self.size <= MAX_POSITION:
            raise KVPatchError(f"size={self.size!r} must be a number of tokens, 1 to {MAX_POSITION}.")
        if not isinstance(self.together, bool):
            raise KVPatchError(f"together={self.together!r} must be True (one set of chunks for a layer) or False.")

    def eviction_keys(
        self, context: EvictionContext, score: Tensor, first: Tensor, protected: Tensor | None, dead: Tensor | None
    ) -> Tensor:
        """Return eviction keys (int64, the lowest goes first) by the mean score of each token's chunk, then by position.

        `Policy.eviction_keys` calls it as a prompt ends; the base class explains the arguments.
        """
        position, everyone = context.positions_BHT, context.parallel
        candidate = position >= 0
        for mask in (protected, dead):
            candidate = candidate if mask is None else candidate & ~mask
        chunk = position.clamp(min=0) // self.size
        score = score.nan_to_num(0.0)  # one NaN would make the chunk's mean NaN in all heads
        shape = (*position.shape[:2], int(context.newest_B11.max()) // self.size + 1)
        total = score.new_zeros(shape).scatter_add_(2, chunk, score.masked_fill(~candidate, 0.0))
        count = score.new_zeros(shape).scatter_add_(2, chunk, candidate.to(score.dtype))
        if self.together:
            total, count = (everyone.gather_heads(one).sum(1, keepdim=True).expand(shape) for one in (total, count))
        mean = (total / count.clamp(min=1)).gather(2, chunk)
        return eviction_keys(score_keys(mean, position, signed=True), protected=protected, dead=dead, empty=None)


@dataclass(frozen=True)
class TwoStage(Selection):
    """Two-stage selection that bounds the perturbation of the attention output [CriticalKV Algorithm 1].

    Let c be the number of tokens that a head may keep besides its protected ones. The first stage keeps the alpha * c tokens
    with the highest scores A; the second fills the rest with the highest (A + eps) * ||v W_O||, which bounds the change of
    the output if the token is lost. A is normalized to sum to one over the candidates, and W_O is the head's part of the
    output projection. With grouped queries the norm is averaged over the group, as A is.

    Differs from the paper: nothing (alpha is 0.25 in the header of its listing and 0.5 in its text and experiments).

    Attributes:
        alpha: share of c that the first stage keeps, in [0, 1].
        eps: weight of the norm for tokens without attention, in [0, 1].
        norm: 1 or 2, the norm of the projected values [Appendix F].
    """

    alpha: int | float = 0.5
    eps: float = 1e-4
    norm: int = 1
    weighs_values: ClassVar[bool] = True

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        for name, value in (("alpha", self.alpha), ("eps", self.eps)):
            if not is_number(value) or not 0 <= value <= 1:
                raise KVPatchError(f"{name}={value!r} must be a number in [0, 1].")
        if self.norm not in (1, 2) or isinstance(self.norm, bool):
            raise KVPatchError(f"norm={self.norm!r} must be 1 or 2: which norm of the projected values bounds the loss.")

    def eviction_keys(
        self, context: EvictionContext, score: Tensor, first: Tensor, protected: Tensor | None, dead: Tensor | None
    ) -> Tensor:
        """Return eviction keys (the lowest goes first): the first stage's tokens, by score, rank as protected; others by bound.

        The bound is (share of the scores + eps) * norm of the projected value. `Policy.eviction_keys` calls it. first: eviction
        keys by score alone; returned as they are where heads are about to share a budget (`keep_BH1` is None).
        """
        if context.keep_BH1 is None:
            return first
        empty = context.positions_BHT < 0 if context.empty else None
        keep_BH1 = context.keep_BH1
        if protected is not None:
            stays = protected if empty is None else protected & ~empty
            keep_BH1 = keep_BH1 - stays.sum(-1, keepdim=True)
        outside = protected if empty is None else empty if protected is None else protected | empty  # no candidates
        if outside is not None:
            first, score = first.masked_fill(outside, FIRST), score.masked_fill(outside, 0.0)
        # stage one: a share alpha of the budget left, by score
        count_BH1 = (keep_BH1.double() * self.alpha + 1e-6).long()
        critical = mask_top(first, count_BH1, _one_for_all(count_BH1))
        if outside is not None:
            critical = critical & ~outside
        # stage two: the rest by bound
        score = score.nan_to_num(0.0, posinf=torch.inf)  # one NaN would make all shares NaN
        share = score / score.sum(-1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)
        bound = score_keys((share + self.eps) * context.norms(critical, outside), context.positions_BHT, signed=False)
        return eviction_keys(bound, protected=critical if protected is None else critical | protected, dead=dead, empty=None)


def _one_for_all(count: Tensor) -> int | None:
    """Return the value of all entries of `count`, by which `mask_top` is faster in `TwoStage.eviction_keys`.

    None if they differ, lie on a device (reading them would wait), or torch.compile traces.
    """
    if not at_hand(count) or torch.compiler.is_compiling():
        return None
    low, high = count.aminmax()
    return int(low) if low == high else None
