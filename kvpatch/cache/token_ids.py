"""Ids of the tokens that a cache has read, by which generate() tells whether it is given the same text again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..policies.batched import Batched
from .growth import slack

PADDING, UNKNOWN = -1, -2  # in place of an id: no token, and a token that came without one (inputs_embeds)
TAPE = 1024  # ids of steps under torch.compile that are kept until the cache is looked at; of more, those before are unknown


class TokenIds(Batched):
    """Ids [B,T] of every column that a cache has read, PADDING or UNKNOWN where there is none; 8 bytes for each.

    Rows of a joined cache end in the last column, after PADDING.

    columns: read so far, T. prompt: those before the newest prompt. offsets_B1: how far the model's positions after images are
    from the count of tokens, in models that keep such an offset beside the cache; None in others.
    """

    def __init__(self) -> None:
        self.columns = self.prompt = 0
        self.offsets_B1: Tensor | None = None
        self._ids_BC: Tensor | None = None  # with some columns more

    @classmethod
    def of(cls, ids_BT: Tensor | None) -> TokenIds:
        """Make the TokenIds of texts that were read, for loaded caches and `join_parts`. ids_BT: None if they are unknown."""
        new = cls()
        if ids_BT is not None:
            new._ids_BC, new.columns, new.prompt = ids_BT, ids_BT.shape[1], ids_BT.shape[1]
        return new

    @property
    def ids_BT(self) -> Tensor | None:
        """The ids [B,T] of all columns read, a view of a wider tensor; None before the first."""
        return None if self._ids_BC is None else self._ids_BC[:, : self.columns]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._ids_BC is None else self._ids_BC.nbytes

    @property
    def prompt_BN(self) -> Tensor | None:
        """Ids [B,N] of the newest prompt, for `passes.begin` to have it read again; None if some are unknown."""
        ids_BT = self.ids_BT
        all_known = ids_BT is not None and not bool((ids_BT[:, self.prompt :] == UNKNOWN).any())
        return ids_BT[:, self.prompt :].clone() if all_known and ids_BT is not None else None

    @property
    def offset(self) -> bool:
        """True if some position differs from the count of tokens before it."""
        return self.offsets_B1 is not None and bool(self.offsets_B1.any())

    def write(self, ids_BQ: Tensor | None, B: int, Q: int, device: torch.device, real_BQ: Tensor | None = None) -> None:
        """Add the ids of Q columns, for `note_ids`. ids_BQ: None if unknown. real_BQ: False for padding; may be shorter."""
        start, end = self.columns, self.columns + Q
        if self._ids_BC is None:
            self._ids_BC = torch.empty(B, 0, dtype=torch.long, device=device)
        if end > self._ids_BC.shape[1]:
            self._ids_BC = F.pad(self._ids_BC, (0, end + slack(end) - self._ids_BC.shape[1]), value=UNKNOWN)
        self.columns = end
        new_BQ = self._ids_BC[:, start:end]
        if ids_BQ is None:
            new_BQ.fill_(UNKNOWN)
        else:
            new_BQ.copy_(ids_BQ)
        if real_BQ is not None:
            new_BQ[:, : real_BQ.shape[1]].masked_fill_(~real_BQ, PADDING)

    def skip_columns(self, B: int, columns: int, device: torch.device) -> None:
        """Add columns of unknown tokens until there are `columns`: for those that were read without their ids being noted."""
        if columns > self.columns:
            self.write(None, B, columns - self.columns, device)

    def find_columns(self, places_Q: Tensor) -> Tensor:
        """Return the columns [B,Q] of the tokens at these positions of each row's text, for `check_replaced`, `replace`."""
        assert self.ids_BT is not None
        count_BT = (self.ids_BT != PADDING).long().cumsum(1)
        return torch.searchsorted(count_BT, (places_Q.to(count_BT.device) + 1).expand(len(count_BT), -1).contiguous())

    def replace(self, ids_BQ: Tensor, places_Q: Tensor) -> None:
        """Put other tokens at these positions of each row's text."""
        if self._ids_BC is not None:
            self._ids_BC = self._ids_BC.scatter(1, self.find_columns(places_Q), ids_BQ.to(self._ids_BC))

    def open_columns(self, at: int, count: int) -> None:
        """Insert `count` columns of unknown tokens before position `at` of each row's text, for `open_positions`."""
        if self._ids_BC is None:
            return
        first_B1 = self.find_columns(torch.tensor([at], device="cpu"))
        B, device = len(first_B1), self._ids_BC.device
        self.prompt += count if int(first_B1.max()) < self.prompt else 0  # columns before the newest prompt
        self.write(None, B, count, device)  # makes room at the end: columns from `at` on move there
        column = torch.arange(self.columns, device=device).expand(B, -1)
        moved = self._ids_BC[:, : self.columns].gather(1, torch.where(column < first_B1 + count, column, column - count))
        self._ids_BC = moved.masked_fill((column >= first_B1) & (column < first_B1 + count), UNKNOWN)

    def crop(self, columns: int) -> None:
        """Drop the ids after the first `columns`."""
        self.columns, self.prompt = min(self.columns, columns), min(self.prompt, columns)

    def keep_last(self, columns: int) -> None:
        """For `_map_rows`: keep the last columns alone, after the longest rows were dropped; the others are padding."""
        if self._ids_BC is not None and columns < self.columns:
            self._ids_BC = self._ids_BC[:, self.columns - columns : self.columns].clone()
            self.columns, self.prompt = columns, max(self.prompt + columns - self.columns, 0)

    @staticmethod
    def join_parts(parts: Sequence[tuple[TokenIds, Tensor]], columns: int) -> TokenIds:
        """Join the ids of concatenated caches, each with its rows' lengths [B]; every row ends in the last of `columns`."""
        rows = [_align_right(ids, lengths_B, columns) for ids, lengths_B in parts]
        new = TokenIds.of(torch.cat([tensor.to(rows[0].device) for tensor in rows]))
        part_offsets = [ids.offsets_B1 for ids, _ in parts]  # of positions after images, from the count of tokens
        if any(tensor is not None for tensor in part_offsets):
            zeros = [torch.zeros(len(lengths_B), 1, dtype=torch.long, device="cpu") for _, lengths_B in parts]
            offsets = [zero if tensor is None else tensor for tensor, zero in zip(part_offsets, zeros, strict=True)]
            new.offsets_B1 = torch.cat([tensor.to(rows[0].device) for tensor in offsets])
        return new


def _align_right(ids: TokenIds, lengths_B: Tensor, columns: int) -> Tensor:
    """For `join_parts`: return the ids of a cache aligned at the right [B,columns], to join them with those of other caches.

    PADDING is before a row's text; tokens without an id have UNKNOWN.
    """
    ids_BT, column = ids.ids_BT, torch.arange(columns, device=lengths_B.device)
    token_BT = column >= columns - lengths_B[:, None]
    blank_BT = torch.full((len(lengths_B), columns), PADDING, device=lengths_B.device).masked_fill(token_BT, UNKNOWN)
    if ids_BT is None:  # no id is known
        return blank_BT
    # a row's ids follow its padding, also where that was between tokens
    packed_BT = ids_BT.gather(1, (ids_BT != PADDING).long().argsort(dim=1, stable=True))[:, -columns:]
    packed_BT = F.pad(packed_BT.to(blank_BT.device), (columns - packed_BT.shape[1], 0), value=PADDING)
    return torch.where(packed_BT == PADDING, blank_BT, packed_BT)
