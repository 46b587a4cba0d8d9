"""A second reading of a prompt: which tokens repeat it, what they look at, and what they ask."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import KVPatchError
from ..budgets import check_count
from ..context import EvictionContext, NewTokens, View, accumulator
from ..numbers import on_device
from ..repetition import BEFORE, Repetition
from .base import LayerRead, Need, Note, PromptRead

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class Rereading(Need[View]):
    """A second reading of each prompt, after an instruction to repeat it, `chunk` tokens at a time, before it is evicted.

    Attributes:
        instruction: token ids put before what is repeated: one sequence, or three as `repeat_instruction` makes them.
        chunk: tokens of the prompt that are repeated at a time.
    """

    instruction: Any = ()
    chunk: int = 2048
    alone: ClassVar[bool] = False

    @property
    def refuses(self) -> Mapping[str, str]:
        """Features (by names in served.py) that a second reading excludes, with the reason that `why_not` puts in an error."""
        return {
            "block": "policy {name} evicts after a second reading of the whole prompt. Leave it out, or feed the text in "
            "pieces.",
            "renumbered": "which reads a prompt a second time after itself",
            "drafts with the prompt": "evicts after a second reading of the whole prompt: feed the prompt first",
            "inputs_embeds": "reads a prompt a second time: it needs input_ids, not inputs_embeds",
            "prompt of joined rows": "reads a prompt a second time: rows that were joined cannot be",
            "continuous batching": "reads each a second time",
        }

    def check(self) -> None:
        check_count("chunk", self.chunk, "tokens")
        self._split_instruction()

    def cut_pieces(self, ids: list[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Cut a prompt into pieces that the model reads again (`read_again`): yield (start, stop, token ids to feed).

        These are an instruction to repeat, which for later pieces ends with the tokens before the piece; then ids[start:stop].
        """
        first, later, close = self._split_instruction()
        for start in range(0, len(ids), self.chunk):
            stop = min(start + self.chunk, len(ids))
            before = [*later, *ids[max(start - BEFORE, 0) : start]] if start else first
            yield start, stop, [*before, *close, *ids[start:stop]]

    def longest(self, n: int) -> int:
        """Return the length of the longest piece that `cut_pieces` makes of a prompt of n tokens, instruction included."""
        first, later, close = map(len, self._split_instruction())
        return Repetition(self.chunk, first + close, later + close).count_tokens(n)

    def _split_instruction(self) -> tuple[list[int], list[int], list[int]]:
        """Return the instruction's token ids: before the first piece, before later ones, and between either and the text.

        `check` calls it, for the KVPatchError about other values, and `cut_pieces`.
        """
        given = self.instruction.tolist() if isinstance(self.instruction, Tensor) else self.instruction
        if isinstance(given, Sequence) and not isinstance(given, str):
            if all(map(_is_id, given)):
                return list(given), list(given), []
            if len(given) == 3 and all(isinstance(part, Sequence) and all(map(_is_id, part)) for part in given):
                return list(given[0]), list(given[1]), list(given[2])
        raise KVPatchError(
            f"instruction={self.instruction!r:.60} must be token ids: give kvpatch.policies.repeat_instruction(tokenizer), "
            f"tokenizer.encode({FIRST!r}, add_special_tokens=False), or () for none."
        )


@dataclass(frozen=True)
class SecondReading(Rereading[Tensor]):
    """Greatest attention that a second reading of the prompt gives: context.state["repeated"] [B,H,T].

    See repeated.Repeated. A token scored by no second reading, such as a generated one, has 0.

    Attributes:
        by_outputs: whether attention is weighed by values as the output projection gives them out.
    """

    by_outputs: bool = False

    @property
    def projects(self) -> bool:
        return self.by_outputs

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        return {"repeated": new.k_BHQD.new_zeros(new.k_BHQD.shape[:3], dtype=accumulator(new.k_BHQD.dtype))}

    def view(self, context: EvictionContext) -> Tensor:
        return context.state["repeated"]


@dataclass
class RepeatedQueries(Note):
    """Queries of a second reading so far.

    Attributes:
        q_BHGWD: the queries as attention used them; anything where a row has fewer.
        positions_BW: their positions, int64; -1 where a row has fewer.
    """

    q_BHGWD: Tensor
    positions_BW: Tensor


@dataclass(frozen=True)
class RepeatQueries(Rereading[RepeatedQueries]):
    """Some queries of a second reading, evenly spread: `layer.notes["asked"]` until the prompt ends.

    Of n tokens that a row repeats, every m-th asks, m = ceil(n / queries), counted from each piece's first.

    Attributes:
        queries: about how many of them ask.
    """

    queries: int = 256
    name: ClassVar[str] = "asked"

    def check(self) -> None:
        super().check()
        check_count("queries", self.queries, "tokens of a second reading")

    def read(self, prompt: PromptRead) -> None:
        prompt.layer.notes.pop(self.name, None)  # of a reading that was interrupted

    def read_again(self, layer: LayerRead, q_BHGQD: Tensor, positions_BQ: Tensor, repeated_B: Sequence[int]) -> None:
        """Add every m-th query of a chunk of the second reading to the layer's notes, from which `Refit.values` takes them.

        `reread_chunk` calls it in each layer. m is such that about `queries` of a row's tokens are taken. positions_BQ: -1 for
        padding. repeated_B: tokens that each row repeats in all.
        """
        every_B = [max(math.ceil(n / self.queries), 1) for n in repeated_B]  # m
        column = torch.arange(positions_BQ.shape[1], device=positions_BQ.device)
        taken_BQ = (column % on_device(every_B, column.device)[:, None] == 0) & (positions_BQ >= 0)
        W = math.ceil(positions_BQ.shape[1] / min(every_B))  # of the row that takes the most; others are filled up with -1
        index_BW = (~taken_BQ).byte().argsort(dim=1, stable=True)[:, :W]
        q = q_BHGQD.detach().take_along_dim(index_BW[:, None, None, :, None], 3)
        positions = positions_BQ.gather(1, index_BW).masked_fill(~taken_BQ.gather(1, index_BW), -1)
        earlier: RepeatedQueries | None = layer.notes.get(self.name)
        if earlier is not None:
            q, positions = torch.cat([earlier.q_BHGWD, q], 3), torch.cat([earlier.positions_BW, positions], 1)
        layer.notes[self.name] = RepeatedQueries(q, positions)

    def end(self, layer: LayerRead, state: dict[str, Tensor], evicts: bool) -> None:
        layer.notes.pop(self.name, None)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
