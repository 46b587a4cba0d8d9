"""The score of a second reading: the prompt is repeated to the model, and what that looks at is important."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .context import EvictionContext
from .needs import AnyNeed, SecondReading
from .needs.second_reading import FIRST, LATER
from .scores import Score

_MARK = "####"


@dataclass(frozen=True)
class Repeated(Score):
    """Greatest attention that a second reading gives [KVzip].

    Where a prompt ends, it is read a second time after an instruction to repeat it, `chunk` tokens at a time. The chunk's
    queries attend to the whole cache; their own keys are dropped afterwards. s[i] = the greatest a[t,i] over all rows t of the
    second reading of i's chunk and over the query heads of the group, a being the softmax over the sinks, the chunk's tokens
    in the cache and the second reading's own tokens up to t. A token scored by no second reading, such as a generated one,
    has 0.

    Differs from the paper: with grouped queries the maximum is over the group, as in its code; the whole prompt is repeated,
    with a chat template's own tokens.

    Attributes:
        instruction: token ids put before what is repeated: one sequence, or three as `repeat_instruction` makes them.
        chunk: tokens of the prompt that are repeated at a time.
    """

    instruction: Any = ()
    chunk: int = 2048
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (SecondReading(self.instruction, self.chunk),)

    def value(self, context: EvictionContext) -> Tensor:
        return context.view(SecondReading)


@dataclass(frozen=True)
class RepeatedOutputs(Repeated):
    """Greatest change that a token makes to the residual stream in a second reading [KVzip+, in kvpress].

    As Repeated, with a[t,i] ||v_i W_O|| / ||h_t|| for a[t,i]: W_O are the output projection's rows of the query head, and h_t
    is what the layer's attention is given at row t, after the norm.
    """

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (SecondReading(self.instruction, self.chunk, by_outputs=True),)


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
