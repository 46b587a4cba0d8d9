"""Lifetimes: when each token of a text was evicted, by layer and KV head, and the record of them that a replay follows.

A token is born at its own position. Its death is the position of the first query that no longer sees it: the tokens of its row
that had been seen when it was evicted. So the query at t sees token i iff i <= t < death, within the layer's sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KVPatchError
from ..policies.batched import Batched
from .growth import slack

NEVER = torch.iinfo(torch.int32).max


class Lifetimes(Batched):
    """Token ids [B,T] and deaths [B,H,T] int32 of each layer, by position, of a cache's rows; a few columns more than T.

    dropped_rows: those that the last reordering of beams dropped, and their lengths: generate() may return them once it stops.
    """

    def __init__(self, n_layers: int) -> None:
        self.ids: Tensor | None = None
        self.deaths: list[Tensor | None] = [None] * n_layers
        self.dropped_rows: tuple[Lifetimes, Tensor] | None = None

    @property
    def columns(self) -> int:
        """Number of positions that `ids` has room for, from 0 on."""
        return 0 if self.ids is None else self.ids.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in (self.ids, *self.deaths) if one is not None)

    def note_ids(self, ids_BQ: Tensor, positions_BQ: Tensor, columns: int) -> None:
        """For `passes.begin`: note the ids of a pass's tokens by position (-1: padding; else below `columns`), for replays."""
        if self.ids is None:
            self.ids = ids_BQ.new_zeros(len(ids_BQ), 0)
        self.ids = _widen_tensor(self.ids, columns + 1, 0)
        places = positions_BQ.masked_fill(positions_BQ < 0, self.ids.shape[-1] - 1)  # the last column is no token's
        self.ids = self.ids.scatter(1, places, ids_BQ.to(self.ids.dtype))

    def note_evictions(self, layer: int, positions_BHT: Tensor, seen_B11: Tensor) -> None:
        """Set the death of each token that a layer no longer holds, for replays, to the number of tokens seen so far.

        `finish_group`, `_end_step` and `forget` call it. positions_BHT: of the held tokens, -1 in empty slots. seen_B11: that
        number, of each row. A death that is set already stays.
        """
        B, H, _ = positions_BHT.shape
        deaths = self.deaths[layer]
        if deaths is None:
            deaths = torch.empty(B, H, 0, dtype=torch.int32, device=positions_BHT.device)
        deaths = _widen_tensor(deaths, self.columns, NEVER)
        C = deaths.shape[-1]  # positions noted
        held = torch.zeros(B, H, C + 1, dtype=torch.bool, device=deaths.device)
        held.scatter_(-1, positions_BHT.masked_fill(positions_BHT < 0, C), True)  # empty slots mark column C, cut off below
        gone = ~held[..., :C] & (torch.arange(C, device=deaths.device) < seen_B11) & (deaths == NEVER)
        self.deaths[layer] = torch.where(gone, seen_B11.to(deaths.dtype), deaths)

    def crop(self, seen_B: Tensor) -> None:
        """Forget deaths (evictions) after each row's first `seen_B` tokens, for `editing.crop`, which brings them back."""
        for layer, deaths in enumerate(self.deaths):
            if deaths is not None:
                late = deaths > seen_B.to(deaths.device)[:, None, None]
                self.deaths[layer] = deaths.masked_fill(late, NEVER)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor; rows that an earlier reordering dropped are dropped for good."""
        self.dropped_rows = None
        super().change_rows(change)

    def select_dropped(self, index: Tensor, seen_B: Tensor) -> tuple[Lifetimes, Tensor] | None:
        """Return the lifetimes and lengths of the beams that `index` drops in reordering: generate() may return them later.

        `EvictingCache.reorder_cache` calls it in each step of a beam search. None if each beam goes on.
        """
        dropped = torch.ones(len(seen_B), dtype=torch.bool, device="cpu").index_fill_(0, index.cpu().long(), False)
        if not dropped.any():
            return None
        return self.map_rows(lambda one: one[dropped.to(one.device)]), seen_B[dropped.to(seen_B.device)]

    @staticmethod
    def join_parts(parts: Sequence[Lifetimes | None]) -> Lifetimes | None:
        """For `_join_caches`: append the rows of caches' lifetimes, the shorter ones filled up; None if some cache has none."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return None
        new = Lifetimes(len(present[0].deaths))
        new.ids = _cat_known([part.ids for part in present], 0)
        new.deaths = [_cat_known(deaths, NEVER) for deaths in zip(*(part.deaths for part in present), strict=True)]
        return new


@dataclass(frozen=True, eq=False)
class Record:
    """Record of what each query of each KV head attended to while texts were read and generated under a budget.

    Made by `Patch.record()`, and followed by `kvpatch.replay`. Its tensors lie on the layers' devices; `to("cpu")` moves them.

    Attributes:
        ids: int64 [N,T], token ids of N texts without their padding; -1 after a text's last token.
        deaths: of each layer int32 [N,H,T], the position of the first query that no longer sees a token; 2**31 - 1 if none.
        model: what a model must agree with: its class, layers, KV heads and head size.

    Example:
        with kvpatch.patched(model, "h2o", k=0.5, record=True) as patch:
            texts = model.generate(**inputs, max_new_tokens=256)
            record = patch.record()
        with kvpatch.replay(model, record):
            loss = model(texts, labels=texts).loss
    """

    ids: Tensor
    deaths: tuple[Tensor, ...]
    model: dict[str, Any]

    @classmethod
    def of(cls, lifetimes: Lifetimes, lengths_B: Tensor, model: dict[str, Any]) -> Record:
        """Make the record of a cache's texts, for `Patch.record()`: a copy of their ids, and of when each token was evicted.

        lengths_B: tokens of each row. model: values that identify the model. Beams just dropped come after the others.
        """
        T = int(lengths_B.max())  # tokens of the longest row
        assert lifetimes.ids is not None
        is_token = torch.arange(T, device=lengths_B.device) < lengths_B[:, None]
        # _widen_tensor(): at least T columns, new ones filled
        ids = _widen_tensor(lifetimes.ids, T, 0)[:, :T].masked_fill(~is_token.to(lifetimes.ids.device), -1)
        deaths = tuple(_widen_tensor(tensor, T, NEVER)[..., :T].clone() for tensor in lifetimes.deaths if tensor is not None)
        record = cls(ids, deaths, model)
        return record if lifetimes.dropped_rows is None else cls.join([record, cls.of(*lifetimes.dropped_rows, model)])

    def __len__(self) -> int:
        """Count the texts."""
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Record of {len(self)} texts of up to {self.ids.shape[1]} tokens, {self.nbytes:,} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: 4 for each token, layer and KV head, and 8 for its id."""
        return sum(one.numel() * one.element_size() for one in (self.ids, *self.deaths))

    @cached_property
    def first_N(self) -> Tensor:
        """Position of the first query of each text that some token is hidden from, int32 [N] on the CPU."""
        return torch.stack([deaths.amin((1, 2)).cpu() for deaths in self.deaths]).amin(0)

    def to(self, device: torch.device | str) -> Record:
        """Return the record on another device, such as "cpu" to keep it there until it is replayed."""
        return Record(self.ids.to(device), tuple(one.to(device) for one in self.deaths), self.model)

    @staticmethod
    def join(records: Iterable[Record]) -> Record:
        """Join the texts of several records of one model, such as of several generate() calls, into one record to replay.

        Raises:
            KVPatchError: there is none, or they are of different models.
        """
        parts = list(records) if isinstance(records, Iterable) else [records]
        if not parts or not all(isinstance(part, Record) for part in parts):
            raise KVPatchError(f"A record is needed, or several, not {records!r:.80}: give what patch.record() returned.")
        first = parts[0]
        for part in parts[1:]:
            check_same_model(part.model, first.model, "the first record")
        device = first.ids.device
        ids = join_padded([part.ids.to(device) for part in parts], -1)
        pairs = zip(*(part.deaths for part in parts), strict=True)
        return Record(
            ids, tuple(join_padded([one.to(layer[0].device) for one in layer], NEVER) for layer in pairs), first.model
        )


def check_same_model(recorded: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Raise KVPatchError if a record to be replayed or joined is of another model than wanted. what: the wanted one's name."""
    for name in dict.fromkeys((*recorded, *wanted)):
        if recorded.get(name) != wanted.get(name):
            raise KVPatchError(
                f"The record is of another model: {name} is {recorded.get(name)!r} there, {wanted.get(name)!r} in {what}. "
                "Replay the model that generated the texts."
            )


def _widen_tensor(tensor: Tensor, columns: int, value: int) -> Tensor:
    """Return a tensor of at least so many columns, those added holding `value`; some more, for tokens to come."""
    more = columns - tensor.shape[-1]
    return tensor if more <= 0 else F.pad(tensor, (0, more + slack(columns)), value=value)


def join_padded(parts: Sequence[Tensor], value: int) -> Tensor:
    """Concatenate the batch rows of tensors; narrower ones are padded on the right with `value` to the width of the widest."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[-1]), value=value) for part in parts])


def _cat_known(parts: Sequence[Tensor | None], value: int) -> Tensor | None:
    """Concatenate rows as `join_padded` does, for `join_parts`; None if some part is None, since its rows are not known."""
    known = [part for part in parts if part is not None]
    return join_padded(known, value) if len(known) == len(parts) else None
