"""A generate() in a thread of its own, which can be ended and whose outcome is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Event
from typing import Any, NoReturn

import torch
from transformers import StoppingCriteria

from ..attention.attend import is_autocasting
from ..errors import KVPatchError


class Stop(StoppingCriteria):
    """Ends generate() when nobody listens. asked: set by `Chat.stream` once its caller has stopped iterating."""

    def __init__(self) -> None:
        self.asked = Event()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return for each row whether it ends: all do once `asked` is set. generate() calls it after each token."""
        return torch.full((len(input_ids),), self.asked.is_set(), dtype=torch.bool, device=input_ids.device)


def refuse_turn() -> NoReturn:
    """Raise KVPatchError: what `Chat` calls where a turn or an edit begins and send() runs, in another thread."""
    raise KVPatchError(
        "Another thread's send() runs in this chat: wait until it returns, and give each user a chat of their own."
    )


class Outcome:
    """Result or error of a thread, in which torch.autocast is as in the thread that made this object."""

    value: Any = None
    error: BaseException | None = None

    def __init__(self, device: str) -> None:
        """Note, for `Chat.stream`, if torch.autocast is on for a type of device ("cuda", "cpu"): each thread has its own."""
        on = is_autocasting(device)
        self._mixed = torch.autocast(device, torch.get_autocast_dtype(device)) if on else nullcontext()

    def keep(self, call: Callable[[], Any], end: Callable[[], None]) -> None:
        """Run `call`, as the thread of `Chat.stream`; keep its value or error. After an error call `end`, to end the stream."""
        try:
            with self._mixed:
                self.value = call()
        except BaseException as error:
            self.error = error
            end()
