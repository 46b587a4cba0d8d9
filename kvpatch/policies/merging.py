"""Merging: what becomes of the values of tokens that a prompt's end evicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .context import accumulator

_EPS = 1e-6
_AT_ONCE = 256  # tokens that are compared with those that stay


@dataclass(frozen=True)
class Merge:
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
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)
    only_then: ClassVar[str] = "merges what a prompt's end evicts, and decode steps cannot"

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""
        given = self.threshold
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
            raise KVPatchError(f"threshold={given!r} must be a cosine in [0, 1], below which nothing is merged.")

    def values(self, k_BHTD: Tensor, v_BHTD: Tensor, index_BHK: Tensor, kept_BHK: Tensor | None, live_BHT: Tensor) -> Tensor:
        """Return the values [B,H,K,D] of the kept tokens.

        Args:
            k_BHTD: keys of all slots.
            v_BHTD: their values.
            index_BHK: slots of the kept tokens, ascending.
            kept_BHK: entries within the head's own count; None for all.
            live_BHT: tokens that may be folded if they are not kept.
        """
        wide, D = accumulator(v_BHTD.dtype), v_BHTD.shape[-1]
        kept = torch.ones_like(index_BHK, dtype=torch.bool) if kept_BHK is None else kept_BHK
        stays_BHT = torch.zeros_like(live_BHT, dtype=torch.int8).scatter_reduce_(2, index_BHK, kept.to(torch.int8), "amax")
        folded_BHT = live_BHT & (stays_BHT == 0)
        unit = k_BHTD.to(wide)
        unit = unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp_min(_EPS)
        own = unit.gather(2, index_BHK[..., None].expand(*index_BHK.shape, unit.shape[-1])).flip(2)  # the newest first
        values = v_BHTD.to(wide)
        mine = values.gather(2, index_BHK[..., None].expand(*index_BHK.shape, D))
        size_BHT = torch.linalg.vector_norm(values, dim=-1)
        size_BHK = torch.linalg.vector_norm(mine, dim=-1)
        total, weight = torch.zeros_like(mine), torch.zeros_like(size_BHK)
        for at in range(0, unit.shape[2], _AT_ONCE):
            some = slice(at, at + _AT_ONCE)
            alike = unit[:, :, some] @ own.transpose(-1, -2)
            most, target = alike.masked_fill(~kept.flip(2)[:, :, None], -torch.inf).max(-1)
            target = index_BHK.shape[-1] - 1 - target
            size = size_BHT[:, :, some]
            w = most.clamp_min(0) * size / (size + size_BHK.gather(2, target) + _EPS)
            w = w.masked_fill(~folded_BHT[:, :, some] | (most < self.threshold), 0.0)
            total = total.scatter_add(2, target[..., None].expand(*target.shape, D), w[..., None] * values[:, :, some])
            weight = weight.scatter_add(2, target, w)
        return ((mine + total) / (1 + weight[..., None])).to(v_BHTD.dtype)
