"""Refit: the values of kept tokens, solved anew so that attention over them gives what attention over all gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .context import accumulator
from .merging import Kept, Merging
from .needs import AnyNeed, LayerRead, RepeatQueries

_CPU_BLOCK, _DEVICE_BLOCK = 1 << 22, 1 << 26  # logits at a time


@dataclass(frozen=True)
class Refit(Merging):
    """Refit of the kept values by ridge regression [Attention Matching, without its biases].

    Some queries of a second reading of the prompt (see Repeated) ask: of about `queries` tokens, evenly spread, those of each
    query head. Of a KV head let a[t,i] be the attention that query t gives to all of the head's tokens, x[t,j] what it gives
    if the kept ones are all there is, and y_t = sum over i of a[t,i] v_i. The kept values become

        V' = argmin ||X V' - Y||^2 + l ||V' - V||^2,    l = ridge * mean over j of sum over t of x[t,j]^2.

    Keys stay, and so does the memory.

    Differs from the paper: no bias is added to a logit, and values are pulled towards what they were. Both keep what a
    question asks for: see docs/policies/combine.md.

    Attributes:
        ridge: how strongly values are pulled towards what they were.
        queries: about how many tokens of the second reading ask.
        instruction: token ids put before what is repeated: one sequence, or three as `repeat_instruction` makes them.
        chunk: tokens of the prompt that are repeated at a time.
    """

    ridge: float = 0.1
    queries: int = 256
    instruction: Any = ()
    chunk: int = 2048
    only_then: ClassVar[str] = "refits values where a prompt ends, and decode steps cannot"

    @property
    def needs(self) -> tuple[AnyNeed, ...]:  # type: ignore[override]
        return (RepeatQueries(self.instruction, self.chunk, self.queries),)

    def check(self) -> None:
        given = self.ridge
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
            raise KVPatchError(f"ridge={given!r} must be a number above 0, such as 0.1: higher leaves values as they are.")

    def values(self, k_BHTD: Tensor, v_BHTD: Tensor, kept: Kept, layer: LayerRead) -> Tensor:
        own = kept.gather(v_BHTD)
        asked = layer.notes.get(RepeatQueries.name)
        if asked is None:  # nothing was read again
            return own
        x_BHNK, error_BHND = _attend_twice(k_BHTD, v_BHTD, kept, layer, asked.q_BHGWD, asked.positions_BW)
        count_BH11 = kept.real_BHK.sum(-1)[..., None, None].clamp_min(1)
        l_BH11 = self.ridge * x_BHNK.square().sum((-2, -1), keepdim=True) / count_BH11
        # V' - V = X^T (X X^T + l)^-1 (Y - X V): of the queries' size, however many tokens a head keeps
        gram_BHNN = x_BHNK @ x_BHNK.mT
        gram_BHNN.diagonal(dim1=-2, dim2=-1).add_(l_BH11[..., 0].clamp_min(torch.finfo(gram_BHNN.dtype).tiny))
        factor_BHNN, failed_BH = torch.linalg.cholesky_ex(gram_BHNN)
        change_BHKD = x_BHNK.mT @ torch.cholesky_solve(error_BHND, factor_BHNN)
        fits_BH11 = (failed_BH == 0)[..., None, None] & change_BHKD.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        evicts_BH11 = (kept.live_BHT & ~kept.stays_BHT).any(-1)[..., None, None]
        return torch.where(fits_BH11 & evicts_BH11, own + change_BHKD, own).to(v_BHTD.dtype)


def _attend_twice(
    k_BHTD: Tensor, v_BHTD: Tensor, kept: Kept, layer: LayerRead, q_BHGWD: Tensor, positions_BW: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention to the kept tokens [B,H,N,K], were they all, and what outputs [B,H,N,D] lack; N = W * G queries."""
    (B, H, G, W, _), wide = q_BHGWD.shape, accumulator(v_BHTD.dtype)
    stays_BHT, v_BH1TD, index = kept.stays_BHT, v_BHTD.to(wide)[:, :, None], kept.index_BHK[:, :, None, None]
    at_once = _CPU_BLOCK if q_BHGWD.device.type == "cpu" else _DEVICE_BLOCK
    size = max(at_once // (B * H * G * k_BHTD.shape[2]), 1)
    found, lacking = [], []
    for at in range(0, W, size):
        some = slice(at, at + size)
        all_BHGWT, kept_BHGWT = layer.weigh(q_BHGWD[:, :, :, some], k_BHTD, positions_BW[:, some], stays_BHT)
        lacking.append((all_BHGWT - kept_BHGWT) @ v_BH1TD)
        own = kept_BHGWT.gather(-1, index.expand(*kept_BHGWT.shape[:-1], -1))
        found.append(own.masked_fill(~kept.real_BHK[:, :, None, None], 0.0))
    return torch.cat(found, 3).flatten(2, 3), torch.cat(lacking, 3).flatten(2, 3)
