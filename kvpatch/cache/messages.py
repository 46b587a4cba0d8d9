"""The messages of a chat, as far as a cache has to know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Messages:
    """Messages of a chat, up to the prompt that is about to be read.

    roles: the role of each message, such as "system"; the last one is the coming answer's. starts: their positions in the text.
    """

    roles: Sequence[str]
    starts: Sequence[int]

    def mark_system(self, columns: int) -> Tensor:
        """Mark the system message's tokens among the text's first columns, for `mark_protected`: bool [columns] on the CPU."""
        marks = torch.zeros(columns, dtype=torch.bool, device="cpu")
        for role, start, stop in zip(self.roles, self.starts, self.starts[1:], strict=False):
            marks[start:stop] = role == "system"
        return marks

    def count_system(self, columns: int) -> int:
        """Count the tokens of the system message among the first columns."""
        return int(self.mark_system(columns).sum())

    def number_messages(self, columns: int) -> Tensor:
        """Return for each column the number of the message that it is in, int64 [columns], for `mark_spans`; -1 in answers."""
        numbers = torch.full((columns,), -1, device="cpu")
        for number, (role, start, stop) in enumerate(zip(self.roles, self.starts, self.starts[1:], strict=False)):
            numbers[start:stop] = -1 if role == "assistant" else number
        return numbers
