"""Second reading: rows that repeat a prompt attend to it and are observed; their own keys and values are dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends import torch_backend
from ..backends.protocol import Keys
from ..cache.forward_context import Repeat
from ..cache.slots import gather_entries
from ..policies.context import accumulator
from ..policies.needs import SecondReading
from . import prefill
from .layer_call import Call


def reread_chunk(repeat: Repeat, call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Return the output [B,H,G,Q,D] of rows that repeat a chunk of the prompt; the rows' keys and values are not kept.

    `_attend_columns` calls it in each layer, for each chunk, for policies that read a prompt twice (KVzip). The layer's slots
    stay as they are, but the scores of the chunk's tokens rise. Attention to the chunk and to the repeating rows is computed
    first. Its log-sum-exp gives the probabilities for scores, and the weight with which the output over the rest of the prompt
    (`part.rest`) is joined to it. by_outputs: probabilities are multiplied by norms of values (`head_norms`) and by `factors`.
    """
    held = call.keys(call.slots.columns_used)
    if call.shares_keys:
        call.share_keys(_join_keys(call, held, k_BHQD, v_BHQD))
    for reader in call.needs:  # a need (what the policy reads) may keep these queries
        reader.read_again(call, q_BHGQD, call.positions_BQ, repeat.tokens_B)
    need = call.policy.needs.find(SecondReading)  # None for Refit, which only keeps queries
    if not call.evicts or need is None:
        return prefill.attend_to(call, q_BHGQD, _join_keys(call, held, k_BHQD, v_BHQD), call.rows_BQ).out
    by_outputs = need.by_outputs
    # attend to the chunk, the sinks and the repeating rows themselves; score the chunk's tokens
    part = _Part.of(call, repeat, held)
    near_keys = _join_keys(call, part.shown, k_BHQD, v_BHQD)
    found = prefill.attend_to(call, q_BHGQD, near_keys, call.rows_BQ)
    hidden, factors = repeat.hidden, None
    if by_outputs:  # a row counts relative to the norm of the attention module's input, `hidden`
        factors = torch.linalg.vector_norm(hidden, dim=-1, dtype=accumulator(hidden.dtype)).reciprocal()
    most_BHGM = torch_backend.find_greatest(q_BHGQD, near_keys, call.rows_BQ, call.geometry, found.lse, factors)
    _raise_scores(call, part, most_BHGM * call.head_norms(part.shown.v_BHTD) if by_outputs else most_BHGM)
    # add the rest of the prompt to the output
    if not part.rest:
        return found.out
    if found.lse is not None and torch_backend.attends_before(q_BHGQD, held, call.geometry):
        out, lse = found.out, found.lse
        for keys in part.rest:
            out, lse = torch_backend.join_parts((out, lse), torch_backend.attend_before(q_BHGQD, keys, call.geometry))
        return out
    return prefill.attend_to(call, q_BHGQD, _join_keys(call, held, k_BHQD, v_BHQD), call.rows_BQ).out


def _join_keys(call: Call, keys: Keys, k_BHQD: Tensor, v_BHQD: Tensor) -> Keys:
    """Return `keys` followed by those of the tokens read again, which no cache gets: `reread_chunk` attends to both."""
    return replace(
        keys,
        k_BHTD=torch.cat([keys.k_BHTD, k_BHQD], 2),
        v_BHTD=torch.cat([keys.v_BHTD, v_BHQD], 2),
        positions_BHT=torch.cat([keys.positions_BHT, call.positions_BQ[:, None].expand(*k_BHQD.shape[:3])], 2),
    )


def _raise_scores(call: Call, part: _Part, most_BHGM: Tensor) -> None:
    """Raise in place each score of the repeated chunk's tokens to the greatest attention that any row and query head paid.

    `reread_chunk` calls it. most_BHGM: the greatest over the rows, for the M keys shown. "repeated": the state of the scores.
    """
    scores, most = call.slots.state["repeated"], most_BHGM.amax(2).masked_fill(~part.inside_BHM, 0.0)
    scores.scatter_reduce_(-1, part.index_BHM, most.to(scores.dtype), "amax")
    call.cache.backend_choice.record("statistics", "torch", "kernels read a prompt's rows once, this score reads it twice")


@dataclass
class _Part:
    """The held tokens, divided: `shown` are the chunk that is repeated and the sinks, `rest` are all others.

    index_BHM: slots of the shown ones. inside_BHM: True for those of the chunk, which get a score; False for sinks and for
    columns that only fill up the tensor.
    """

    shown: Keys
    rest: list[Keys]
    index_BHM: Tensor
    inside_BHM: Tensor

    @classmethod
    def of(cls, call: Call, repeat: Repeat, held: Keys) -> _Part:
        """Divide the keys `held` by a layer into the repeated chunk with the sinks (`shown`), and all others (`rest`).

        `reread_chunk` calls it for each layer and chunk. The tensors are copies, or views where slots are positions: then the
        chunk is columns start to stop. Else M slots of each head are gathered, fewer tokens padded with position -1.
        """
        sinks, T = call.policy.scope.sinks, held.columns_before
        start, stop = max(repeat.start_B), max(repeat.stop_B)
        rows_equal = min(repeat.start_B) == start and min(repeat.stop_B) == stop
        if rows_equal and held.ordered and not held.may_have_empty:  # slots are positions: cut the tensors
            n_sinks = min(sinks, start)
            index = torch.cat([torch.arange(n_sinks, device="cpu"), torch.arange(start, stop, device="cpu")]).to(call.device)
            index_BHM = index.expand(*held.positions_BHT.shape[:2], -1)
            shown = replace(
                held,
                k_BHTD=torch.cat([held.k_BHTD[:, :, :n_sinks], held.k_BHTD[:, :, start:stop]], 2),
                v_BHTD=torch.cat([held.v_BHTD[:, :, :n_sinks], held.v_BHTD[:, :, start:stop]], 2),
                positions_BHT=index_BHM,
                columns_before=len(index),
                ordered=False,
            )
            rest = [held.columns(a, b) for a, b in ((n_sinks, start), (stop, T)) if a < b]
            return cls(shown, rest, index_BHM, index_BHM >= start)
        # rows differ, or slots are not positions: gather the tokens
        start_B11, stop_B11 = (call.now.copy(of, call.device)[:, None, None] for of in (repeat.start_B, repeat.stop_B))
        position = held.positions_BHT
        inside = (position >= start_B11) & (position < stop_B11)
        wanted = inside | ((position >= 0) & (position < start_B11.clamp(max=sinks)))  # the chunk, and the sinks before it
        longest = max(b - a for a, b in zip(repeat.start_B, repeat.stop_B, strict=True))
        index_BHM = (~wanted).byte().argsort(dim=-1, stable=True)[..., : min(longest + min(sinks, start), T)]
        shown = Keys(
            gather_entries(held.k_BHTD, index_BHM),
            gather_entries(held.v_BHTD, index_BHM),
            position.gather(-1, index_BHM).masked_fill(~wanted.gather(-1, index_BHM), -1),
            may_have_empty=True,
            columns_before=index_BHM.shape[2],
            ordered=False,
        )
        rest = [replace(held, positions_BHT=position.masked_fill(wanted, -1), may_have_empty=True, ordered=False)]
        return cls(shown, rest, index_BHM, inside.gather(-1, index_BHM))
