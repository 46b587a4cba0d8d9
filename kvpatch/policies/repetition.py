"""The lengths of a second reading, which plans count without torch."""

from __future__ import annotations

from typing import NamedTuple

BEFORE = 8  # tokens of the chunk before that follow the instruction of a later chunk


class Repetition(NamedTuple):
    """Tokens of a second reading: a chunk of the prompt at a time, after an instruction.

    first, later: tokens put before the first chunk, and before later ones.
    """

    chunk: int
    first: int
    later: int

    def count_tokens(self, prompt: int) -> int:
        """Return the tokens of the longest piece that is read a second time after a prompt of `prompt` tokens.

        A model's positions must suffice for both: `plan` counts them, and finds the longest prompt for which they do.
        """
        before = max(self.first, self.later + BEFORE) if prompt > self.chunk else self.first
        return before + min(prompt, self.chunk)
