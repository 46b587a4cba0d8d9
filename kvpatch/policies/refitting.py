"""Refit: the values of kept tokens, solved anew so that attention over them gives what attention over all gave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import is_number
from .context import accumulator
from .merging import Kept, Merging
from .needs import AnyNeed, LayerRead, RepeatQueries
from .needs.second_reading import RepeatedQueries

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
        if not is_number(given) or not 0 < given < float("inf"):
            raise KVPatchError(f"ridge={given!r} must be a number above 0, such as 0.1: higher leaves values as they are.")

    def values(self, k_BHTD: Tensor, v_BHTD: Tensor, kept: Kept, layer: LayerRead) -> Tensor:
        """Return new values [B,H,K,D] of kept tokens, by which attention to these gives about the outputs over all tokens.

        Solved for queries of a second reading of the prompt, which RepeatQueries has noted. `_find_values` calls it as a prompt
        ends, before the evicted tokens go. Pure; NaN where a head's equations have no solution.
        """
        kept_BHKD = kept.gather(v_BHTD)
        queries = layer.notes.get(RepeatQueries.name)
        if queries is None:  # nothing was read again
            return kept_BHKD
        attention = _RefitAttention.of(k_BHTD, v_BHTD, kept, layer, queries)
        # X: attention of N queries to kept tokens, Y: outputs over all; V' - V = X^T (X X^T + l)^-1 (Y - X V), N x N to solve
        gram_BHNN, error_BHND = torch.zeros((), device=kept_BHKD.device), attention.out_BHND
        for tokens, x_BHNM in attention.iterate_blocks():  # M kept tokens at a time
            gram_BHNN = gram_BHNN + x_BHNM @ x_BHNM.mT
            error_BHND = error_BHND - x_BHNM @ kept_BHKD[:, :, tokens].to(x_BHNM.dtype)
        diagonal_BHN = gram_BHNN.diagonal(dim1=-2, dim2=-1)
        l_BH1 = self.ridge * diagonal_BHN.sum(-1, keepdim=True) / kept.real_BHK.sum(-1, keepdim=True).clamp_min(1)
        diagonal_BHN.add_(l_BH1.masked_fill(l_BH1 == 0, 1.0))  # where no query sees a kept token: there X is 0
        factor_BHNN, failed_BH = torch.linalg.cholesky_ex(gram_BHNN)
        solved_BHND = torch.cholesky_solve(error_BHND, factor_BHNN).masked_fill(failed_BH[..., None, None] != 0, torch.nan)
        change_BHKD = torch.cat([x_BHNM.mT @ solved_BHND for _, x_BHNM in attention.iterate_blocks()], 2)
        evicts_BH11 = (kept.live_BHT & ~kept.stays_BHT).any(-1)[..., None, None]
        return torch.where(evicts_BH11, kept_BHKD + change_BHKD, kept_BHKD).to(v_BHTD.dtype)


@dataclass
class _RefitAttention:
    """Attention of N = G * W queries of each KV head: their outputs, and what they give to kept tokens, block by block.

    Attributes:
        out_BHND: their outputs over all tokens.
        lse_BHGW: log-sum-exps of their logits over the kept tokens alone.
        asked: the queries and their positions.
        k_BHKD: keys of the kept tokens.
        kept, layer: as in `Refit.values`.
    """

    out_BHND: Tensor
    lse_BHGW: Tensor
    asked: RepeatedQueries
    k_BHKD: Tensor
    kept: Kept
    layer: LayerRead

    @classmethod
    def of(cls, k_BHTD: Tensor, v_BHTD: Tensor, kept: Kept, layer: LayerRead, asked: RepeatedQueries) -> _RefitAttention:
        """Attend from `asked`, queries of a second reading, to all tokens, for `Refit.values`, before any is evicted."""
        B, H, G, W, _ = asked.q_BHGWD.shape
        v_BHTD = v_BHTD.to(accumulator(v_BHTD.dtype))
        blocks = [  # some queries at a time
            layer.attend_to_slots(
                asked.q_BHGWD[:, :, :, block], k_BHTD, v_BHTD, asked.positions_BW[:, block], kept.index_BHK, kept.real_BHK
            )
            for block in _split_blocks(W, B * H * G * k_BHTD.shape[2], v_BHTD)
        ]
        out, lse = (torch.cat(parts, 3) for parts in zip(*blocks, strict=True))
        return cls(out.flatten(2, 3), lse, asked, kept.gather(k_BHTD), kept, layer)

    def iterate_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the kept tokens, and each query's attention to them, [B,H,N,M]; over all slices it sums to one.

        `Refit.values` iterates twice, since all slices at once take too much memory. N: queries of all query heads that share a
        KV head. real: False where a head keeps fewer tokens than others.
        """
        kept, queries = self.kept, self.asked
        for tokens in _split_blocks(kept.index_BHK.shape[2], self.lse_BHGW.numel(), self.out_BHND):
            index, real = kept.index_BHK[:, :, tokens], kept.real_BHK[:, :, None, None, tokens]
            x = self.layer.weigh_slots(queries.q_BHGWD, self.k_BHKD[:, :, tokens], queries.positions_BW, index, self.lse_BHGW)
            yield tokens, x.masked_fill(~real, 0.0).flatten(2, 3)


def _split_blocks(count: int, each: int, like: Tensor) -> Iterator[slice]:
    """Split `count` rows or columns of `each` numbers into slices of a size that suits the device of `like`."""
    size = max((_CPU_BLOCK if like.device.type == "cpu" else _DEVICE_BLOCK) // each, 1)
    return (slice(at, at + size) for at in range(0, count, size))
