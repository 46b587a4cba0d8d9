"""Merging: what becomes of the values of tokens that a prompt's end evicts. See also refitting.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import is_number
from .context import accumulator
from .needs import AnyNeed, LayerRead

_EPS = 1e-6
_AT_ONCE = 256  # tokens that are compared with those that stay


@dataclass(frozen=True)
class Merging(ABC):
    """Base of what changes the values of kept tokens where a prompt, or a block of it, ends. Subclasses are frozen."""

    needs: ClassVar[tuple[AnyNeed, ...]] = ()
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)
    only_then: ClassVar[str] = "merges what a prompt's end evicts, and decode steps cannot"

    @abstractmethod
    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""

    @abstractmethod
    def values(self, k_BHTD: Tensor, v_BHTD: Tensor, kept: Kept, layer: LayerRead) -> Tensor:
        """Return new values [B,H,K,D] of the kept tokens, for `_find_values` as a prompt or block ends; change nothing.

        k_BHTD, v_BHTD: keys and values of all slots. kept: says which are kept. layer: the layer, as needs may ask it.
        """


@dataclass
class Kept:
    """Tokens that the heads of a layer keep.

    Attributes:
        index_BHK: their slots, ascending.
        real_BHK: True for entries within the head's own count, of K at most; the other entries name any slot.
        live_BHT: tokens that a later query can see.
    """

    index_BHK: Tensor
    real_BHK: Tensor
    live_BHT: Tensor

    @property
    def stays_BHT(self) -> Tensor:
        """Mask the slots whose token is kept, bool [B,H,T]."""
        stays_BHT = torch.zeros_like(self.live_BHT, dtype=torch.int8)
        return stays_BHT.scatter_reduce_(2, self.index_BHK, self.real_BHK.to(torch.int8), "amax") > 0

    def gather(self, x_BHTD: Tensor) -> Tensor:
        """Return the entries [B,H,K,D] of the kept tokens from a tensor of all slots."""
        return x_BHTD.take_along_dim(self.index_BHK[..., None], 2)


@dataclass(frozen=True)
class Merge(Merging):
    """Folding of evicted values into the kept token whose key is most alike [MergingPress, in kvpress; D2O].

    Let c be the cosine of the cached keys of an evicted token e and of the kept token t of the same head where it is greatest;
    of equal ones the newest counts. If c is at least `threshold`, e has the weight
    w_e = max(c, 0) ||v_e|| / (||v_e|| + ||v_t|| + 1e-6). v_t becomes (v_t + sum of w_e v_e) / (1 + sum of w_e), over all e that
    are folded into t. Keys stay, and a token that has left the layer's sliding window is dropped.

    Differs from the papers: one step, where the prompt or a block of it ends; weights are those of the code of kvpress.

    Attributes:
        threshold: least cosine, in [0, 1].
    """

    threshold: float = 0.0

    def check(self) -> None:
        given = self.threshold
        if not is_number(given) or not 0 <= given <= 1:
            raise KVPatchError(f"threshold={given!r} must be a cosine in [0, 1], below which nothing is merged.")

    def values(self, k_BHTD: Tensor, v_BHTD: Tensor, kept: Kept, layer: LayerRead) -> Tensor:
        """Return new values [B,H,K,D] of the kept tokens; evicted ones are averaged into those of like keys. Pure.

        `_find_values` calls it as a prompt or block ends. Each evicted token that later queries could see (live) goes to the
        kept token with the greatest cosine of their keys.
        """
        dtype, D, index_BHK = accumulator(v_BHTD.dtype), v_BHTD.shape[-1], kept.index_BHK
        evicted_BHT = kept.live_BHT & ~kept.stays_BHT  # live: later queries could see the token
        unit = k_BHTD.to(dtype)
        unit = unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp_min(_EPS)
        kept_unit = kept.gather(unit).flip(2)  # newest first: of equal cosines max() takes the first
        values = v_BHTD.to(dtype)
        kept_values = kept.gather(values)
        size_BHT = torch.linalg.vector_norm(values, dim=-1)
        size_BHK = torch.linalg.vector_norm(kept_values, dim=-1)
        total, weight = torch.zeros_like(kept_values), torch.zeros_like(size_BHK)
        for start in range(0, unit.shape[2], _AT_ONCE):
            tokens = slice(start, start + _AT_ONCE)
            cosine = unit[:, :, tokens] @ kept_unit.transpose(-1, -2)
            greatest, target = cosine.masked_fill(~kept.real_BHK.flip(2)[:, :, None], -torch.inf).max(-1)
            target = index_BHK.shape[-1] - 1 - target
            # weight of the evicted value: the cosine times its share of both values' norms
            size = size_BHT[:, :, tokens]
            w = greatest.clamp_min(0) * size / (size + size_BHK.gather(2, target) + _EPS)
            w = w.masked_fill(~evicted_BHT[:, :, tokens] | (greatest < self.threshold), 0.0)
            total = total.scatter_add(2, target[..., None].expand(*target.shape, D), w[..., None] * values[:, :, tokens])
            weight = weight.scatter_add(2, target, w)
        return ((kept_values + total) / (1 + weight[..., None])).to(v_BHTD.dtype)
