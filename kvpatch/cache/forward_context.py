"""The context of one forward pass, the same for all layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..policies.numbers import on_device


@dataclass(frozen=True)
class Padding:
    """Padding among a prompt's columns.

    Attributes:
        reach: columns up to the last padding.
        gapped: some padding follows a token of its row. A sliding window then reaches columns that are not contiguous.
        attends: such padding attends to the tokens, as in the unpatched model.
        real_B: tokens of each row.
    """

    reach: int
    gapped: bool
    attends: bool
    real_B: list[int]


@dataclass
class Repeat:
    """Chunk of a prompt that a second reading repeats: positions from `start_B` to before `stop_B`, of each row.

    tokens_B: tokens that all chunks repeat. hidden: the input [B,Q,E] of the attention module that runs; each module sets it.
    """

    start_B: list[int]
    stop_B: list[int]
    tokens_B: list[int]
    hidden: Tensor = field(default_factory=torch.Tensor)


@dataclass(frozen=True)
class Edit:
    """Tokens that a pass reads into the middle of a text: they see what is held before `start`, and themselves.

    start: position of the first of them. stop: the position after their last; tokens from there on follow the edit. opened:
    positions that are new in the text.
    """

    start: int
    stop: int
    opened: int


class Lender(Protocol):
    """Store of the entries of all tokens, outside the cache."""

    def exchange(self, layer: int, k_1HQD: Tensor, v_1HQD: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Take a layer's new entries; return keys, values [1,H,T,D] and positions [1,T] of earlier tokens, if there are any."""


@dataclass
class Forward:
    """A pass, or one block of its prompt.

    positions_BQ: -1 for padding. padding: of the prompt's columns; None if there is none. rows_BQ: positions of the queries, if
    padding after a row's tokens attends to them as it does in the unpatched model; else None. protect_BQ: columns that the
    user's `protect=` marks, or None. prompt_columns: the first so many belong to the prompt. ends_prompt: the prompt (or block)
    is complete with them. n_B: tokens of each row so far, known where a prompt ends. records_undo: the undo log gets the decode
    steps of this pass. first_step: decode steps between the prompt and this pass.

    Known where a prompt or a block ends: share_base_B, the tokens that a share `k` refers to; kept_below_B, tokens below this
    position are kept outside the budget; keeps_all, nothing is evicted; rows_B, query rows of the prompt (or block);
    final, decode steps may follow; reserve, columns that the next block needs.

    repeatable: computed alike with and without gradients, for a pass that gradient checkpointing runs twice. rotary_table: if
    keys are cached without rotation. blocks: the prompt block by block; packing_BQ: its columns with each row's own tokens
    first, if some are padding. traced: a decode step inside a graph of torch.compile. waiting_layers: those whose prompt has
    ended and that wait to evict, for the last layer of one budget or a second reading (attention/compress.py).
    quota_span_BQ: the columns' spans of `quota=` (policies/quotas.py), or None.
    shared_keys: by layer, what its queries saw, for layers that use its keys: of a prompt's columns, and of each other column.
    reread_ids_BN: of the prompt that ends here, -1 for padding, if it is to be read a second time; else None.
    position_offset_B1: of the model's positions from those counted from 0, for such a reading; None: 0. repeat: the pass is a
    part of such a reading. edit: the pass reads tokens into the middle of the text; None: at its end. lender: lends
    each layer the earlier tokens, of which the cache itself holds none (cache/lossless.py), or None.
    """

    positions_BQ: Tensor
    prompt_columns: int
    ends_prompt: bool
    n_B: list[int] = field(default_factory=list)
    padding: Padding | None = None
    protect_BQ: Tensor | None = None
    records_undo: bool = False
    first_step: int = 0
    share_base_B: list[int] = field(default_factory=list)
    kept_below_B: list[int] | None = None
    keeps_all: bool = False
    rows_B: list[int] = field(default_factory=list)
    final: bool = True
    reserve: int = 0
    repeatable: bool = False
    rows_BQ: Tensor | None = None
    rotary_table: Any = None
    blocks: list[Forward] = field(default_factory=list)
    packing_BQ: Tensor | None = None
    traced: bool = False
    waiting_layers: list[Any] = field(default_factory=list)
    shared_keys: dict[int, list[Any]] = field(default_factory=dict)
    reread_ids_BN: Tensor | None = None
    position_offset_B1: Tensor | None = None
    repeat: Repeat | None = None
    edit: Edit | None = None
    lender: Lender | None = None
    quota_span_BQ: Tensor | None = None
    _shared: dict[tuple[Hashable, torch.device], Tensor] = field(default_factory=dict)

    @property
    def prepared(self) -> bool:
        """True if the pass was begun before the decoder is called, rather than by its pre-hook."""
        return self.repeat is not None or self.edit is not None

    def copy(self, values: list[int], device: torch.device) -> Tensor:
        """Return numbers, of batch rows or heads, as a 1-D tensor on a layer's device; equal lists are copied once a pass."""
        return self.once(tuple(values), device, partial(on_device, values, device))

    def index_column(self, index: int, like_BHC: Tensor) -> Tensor:
        """Return a column's index for each head [B,H], as kernels take it."""
        shape = like_BHC.shape[:2]
        return self.once(("column", index, shape), like_BHC.device, partial(like_BHC.new_full, shape, index))

    def once(self, name: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that all layers of a device share in this pass. The first layer that asks for `name` makes it.

        Each layer's attention asks (`Call.once`) for masks, spans and rotations.
        """
        if (name, device) not in self._shared:
            self._shared[name, device] = make()
        return self._shared[name, device]

    def shares(self, tensor: Tensor) -> bool:
        """Tell if a tensor is one that `once` has made, which lives as long as the pass."""
        return any(one is tensor for one in self._shared.values())

    def positions_on(self, device: torch.device) -> Tensor:
        """Return positions_BQ on a layer's device."""
        return self.positions_BQ if self.positions_BQ.device == device else self.positions_BQ.to(device)


def find_places(real_BQ: Tensor, before_B: Tensor, counts_padding: bool) -> Tensor:
    """Return the position of each column of a pass [B,Q]; -1 before a row's first token.

    `_read_pass` and `_read_prompt` call it where a pass begins, `_fill_layers` for a user's cache. real_BQ: False for padding.
    before_B: each row's next position. counts_padding: padding after a token has its own position, as in unpatched models that
    count columns (`CacheSettings.by_columns`); else it has that of the token before it.
    """
    counted = real_BQ.long()
    if counts_padding:
        counted = ((counted.cumsum(-1) > 0) | (before_B > 0)[:, None]).long()
    return before_B[:, None] + counted.cumsum(-1) - 1


def _describe_padding(real_B: list[int], columns: int) -> Padding | None:
    """Return the padding of a block of a prompt, in which each row's tokens come first; None if all columns are tokens.

    `split_blocks` calls it. real_B: tokens of each row in the block. columns: of the block.
    """
    if min(real_B) == columns:
        return None
    # reach: the block's last column; gapped: some padding follows tokens of its row; attends: it attends to none
    return Padding(columns, any(0 < count < columns for count in real_B), False, real_B)


def split_blocks(now: Forward, block: int, before_B: list[int]) -> list[Forward]:
    """For `passes.begin`: return one Forward per block of `block` columns of the prompt that is to be read, in order.

    Each layer reads and compresses them one by one. If some columns are padding, `now.packing_BQ` is set to the order of
    columns that puts each row's tokens first. before_B: tokens of each row before these columns.
    """
    # of the prompt's columns: marks of `protect=`, spans of `quota=`, and positions
    P, protect_BQ, span_BQ = now.prompt_columns, now.protect_BQ, now.quota_span_BQ
    positions_BQ = now.positions_BQ[:, :P]
    if now.padding is not None:
        now.packing_BQ = (positions_BQ < 0).long().argsort(dim=1, stable=True)
        positions_BQ = positions_BQ.gather(1, now.packing_BQ)
        protect_BQ = None if protect_BQ is None else protect_BQ[:, :P].gather(1, now.packing_BQ)
        span_BQ = None if span_BQ is None else span_BQ[:, :P].gather(1, now.packing_BQ)
    # cut the columns into blocks
    counts_B = [after - before for before, after in zip(before_B, now.n_B, strict=True)]
    blocks = []
    for start in range(0, P, block):
        stop = min(start + block, P)
        # tokens of each row in this block
        rows_B = [min(max(count - start, 0), stop - start) for count in counts_B]
        blocks.append(
            Forward(
                positions_BQ[:, start:stop],
                prompt_columns=stop - start,
                ends_prompt=True,  # layers evict after each block
                n_B=[before + min(count, stop) for before, count in zip(before_B, counts_B, strict=True)],
                padding=_describe_padding(rows_B, stop - start),
                protect_BQ=None if protect_BQ is None else protect_BQ[:, start:stop],
                first_step=now.first_step,
                share_base_B=now.share_base_B,
                kept_below_B=now.kept_below_B,
                keeps_all=now.keeps_all,
                rows_B=rows_B,
                final=now.ends_prompt and stop == P,
                reserve=min(block, P - stop) or block,  # columns that the next block needs, perhaps of a later pass
                repeatable=now.repeatable,  # for gradient checkpointing
                rotary_table=now.rotary_table,
                quota_span_BQ=None if span_BQ is None else span_BQ[:, start:stop],
            )
        )
    return blocks
