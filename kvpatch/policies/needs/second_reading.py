"""The second reading of a prompt: which tokens repeat it, and what they look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import KVPatchError
from ..budgets import check_count
from ..context import EvictionContext, NewTokens, accumulator
from .base import Need

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_BEFORE = 8  # tokens of the chunk before that follow LATER


@dataclass(frozen=True)
class SecondReading(Need[Tensor]):
    """Greatest attention that a second reading of the prompt gives: context.state["repeated"] [B,H,T].

    Where a prompt ends, it is read again behind an instruction to repeat it, `chunk` tokens at a time, before anything is
    evicted. See repeated.Repeated. A token scored by no second reading, such as a generated one, has 0.

    Attributes:
        instruction: token ids put before what is repeated: one sequence, or three as `repeat_instruction` makes them.
        chunk: tokens of the prompt that are repeated at a time.
        by_outputs: whether attention is weighed by values as the output projection gives them out.
    """

    instruction: Any = ()
    chunk: int = 2048
    by_outputs: bool = False
    alone: ClassVar[bool] = False

    @property
    def projects(self) -> bool:
        return self.by_outputs

    @property
    def refuses(self) -> Mapping[str, str]:
        return {
            "block": "policy {name} evicts after a second reading of the whole prompt. Leave it out, or feed the text in "
            "pieces.",
            "renumbered": "which reads a prompt a second time behind itself",
            "drafts with the prompt": "evicts after a second reading of the whole prompt: feed the prompt first",
            "inputs_embeds": "reads a prompt a second time: it needs input_ids, not inputs_embeds",
            "prompt of joined rows": "reads a prompt a second time: rows that were joined cannot be",
            "continuous batching": "reads each a second time",
        }

    def check(self) -> None:
        check_count("chunk", self.chunk, "tokens")
        self._split_instruction()

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        shape, dtype = new.k_BHQD.shape[:3], accumulator(new.k_BHQD.dtype)
        return {"repeated": torch.zeros(shape, dtype=dtype, device=new.k_BHQD.device)}

    def view(self, context: EvictionContext) -> Tensor:
        return context.state["repeated"]

    def cut_pieces(self, ids: list[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (start, stop, tokens): the tokens that repeat the prompt's tokens from `start` to before `stop`."""
        first, later, close = self._split_instruction()
        for start in range(0, len(ids), self.chunk):
            stop = min(start + self.chunk, len(ids))
            before = [*later, *ids[max(start - _BEFORE, 0) : start]] if start else first
            yield start, stop, [*before, *close, *ids[start:stop]]

    def longest(self, n: int) -> int:
        """Return the most tokens that a piece of a prompt of n tokens has."""
        first, later, close = map(len, self._split_instruction())
        return max(first, later + _BEFORE if n > self.chunk else 0) + close + min(n, self.chunk)

    def _split_instruction(self) -> tuple[list[int], list[int], list[int]]:
        """Return the instruction's tokens: before the first piece, before a later one, and last of all."""
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


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
