"""A generate() in a thread of its own, which can be ended and whose outcome is kept."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import torch
from transformers import StoppingCriteria


class Stop(StoppingCriteria):
    """Ends generate() when nobody listens."""

    def __init__(self) -> None:
        self.asked = Event()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.asked.is_set(), dtype=torch.bool, device=input_ids.device)


class Outcome:
    """Result or error of a thread."""

    value: Any = None
    error: BaseException | None = None

    def keep(self, call: Callable[[], Any], end: Callable[[], None]) -> None:
        """Run `call`, as the thread of `Chat.stream`; keep its value or error. After an error call `end`, to end the stream."""
        try:
            self.value = call()
        except BaseException as error:
            self.error = error
            end()
