"""The score of a second reading: the prompt is repeated to the model, and what that looks at is important."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import check_count
from .context import EvictionContext, NewTokens, accumulator
from .scores import Score

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_BEFORE = 8  # tokens of the chunk before that follow LATER
_MARK = "####"


@dataclass(frozen=True)
class Repeated(Score):
    """Greatest attention that a second reading gives [KVzip].

    Where a prompt ends, it is read a second time behind an instruction to repeat it, `chunk` tokens at a time. The chunk's
    queries attend to the whole cache; their own keys are dropped afterwards. s[i] = the greatest a[t,i] over all rows t of the
    second reading of i's chunk and over the query heads of the group, a being the softmax over the sinks, the chunk's tokens
    in the cache and the second reading's own tokens up to t. A token scored by no second reading, such as a generated one,
    has 0.

    Differs from the paper: with grouped queries the maximum is over the group, as in its code; the whole prompt is repeated,
    with a chat template's own tokens.

    Attributes:
        instruction: token ids put before what is repeated: one sequence, or three as `repeat_instruction` makes them.
        chunk: tokens of the prompt that are repeated at a time.
        by_outputs: whether a[t,i] counts times ||v_i W_O|| of the query head, over the norm of the attention's input at row t.
    """

    instruction: Any = ()
    chunk: int = 2048
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rereads: ClassVar[bool] = True
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)

    def check(self) -> None:
        check_count("chunk", self.chunk, "tokens")
        self._parts()

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        shape, dtype = new.k_BHQD.shape[:3], accumulator(new.k_BHQD.dtype)
        return {"repeated": torch.zeros(shape, dtype=dtype, device=new.k_BHQD.device)}

    def value(self, context: EvictionContext) -> Tensor:
        return context.state["repeated"]

    def pieces(self, ids: list[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (start, stop, tokens): the tokens that repeat the prompt's tokens from `start` to before `stop`."""
        first, later, close = self._parts()
        for start in range(0, len(ids), self.chunk):
            stop = min(start + self.chunk, len(ids))
            before = [*later, *ids[max(start - _BEFORE, 0) : start]] if start else first
            yield start, stop, [*before, *close, *ids[start:stop]]

    def longest(self, n: int) -> int:
        """Return the most tokens that a piece of a prompt of n tokens has."""
        first, later, close = map(len, self._parts())
        return max(first, later + _BEFORE if n > self.chunk else 0) + close + min(n, self.chunk)

    def _parts(self) -> tuple[list[int], list[int], list[int]]:
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


@dataclass(frozen=True)
class RepeatedOutputs(Repeated):
    """Greatest change that a token makes to the residual stream in a second reading [KVzip+, in kvpress].

    As Repeated, with a[t,i] ||v_i W_O|| / ||h_t|| for a[t,i]: W_O are the output projection's rows of the query head, and h_t
    is what the layer's attention is given at row t, behind the norm.
    """

    by_outputs: ClassVar[bool] = True


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def repeat_instruction(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the instruction of `kvzip` in a tokenizer's ids: before the first chunk, before later ones, and what closes it.

    The last closes a chat template's turn and opens the model's own; without a template it is a new line.

    Args:
        tokenizer: a tokenizer of transformers.

    Example:
        instruction = kvpatch.policies.repeat_instruction(tokenizer)
        with kvpatch.patched(model, "kvzip", k=0.3, instruction=instruction):
            model.generate(**inputs)
    """
    close = "\n"
    if getattr(tokenizer, "chat_template", None) is not None:
        turn = [{"role": "user", "content": _MARK}]
        close = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).split(_MARK)[-1]
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (FIRST, LATER, close))
