"""Checks of a request when it arrives, and the sizes of a prompt's pieces: put before the engine's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import KVPatchError
from .pool import RequestPool


class Admission:
    """Checks of a request when it arrives, so that one that cannot be served fails alone; comes before a scheduler class."""

    cache: RequestPool
    starved_requests: list[Any]
    block_new_requests: bool
    finish_request: Callable[[str], None]
    max_positions: int | None = None

    def add_waiting_request(self, state: Any) -> None:
        """Add a request to the waiting list.

        Raises:
            KVPatchError: it can never be served. The engine then fails this request.
        """
        if self.max_positions is not None:
            self._limit(state, self.max_positions)
        prefix = self.cache.prefixes.longest(state.initial_tokens)
        self.cache.check(len(state.initial_tokens), state.max_new_tokens, prefix)
        if prefix is not None:  # as the engine's own prefix sharing does
            self.cache.begins[state.request_id] = prefix
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[len(prefix) :]
            state.position_offset = len(prefix)
        super().add_waiting_request(state)  # type: ignore[misc]

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Schedule a pass; a request that waits for room in a pass has its blocks, and none is offloaded for it."""
        scheduled = super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
        self.starved_requests = []
        return scheduled

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *rest: Any) -> None:
        """Schedule at most a chunk of a prompt."""
        super()._schedule_request(state, request_tokens, min(token_budget, self.cache.chunk), *rest)  # type: ignore[misc]

    def end_at(self, stops: Any, state: Any) -> None:
        """End a request whose new token completes a stop string; its output is delivered with this pass.

        stops: transformers' StopStringCriteria.
        """
        status, tokens = type(state.status), state.initial_tokens + state.generated_tokens
        newest = torch.tensor([tokens[-stops.maximum_token_len :]])
        if state.status is status.DECODING and bool(stops(newest, None)):
            state.status = status.FINISHED
            self.finish_request(state.request_id)
            self.block_new_requests = False

    def _limit(self, state: Any, positions: int) -> None:
        """End a request of unlimited length at the model's last position."""
        prompt = len(state.initial_tokens)
        if state.max_new_tokens is None and prompt < positions:
            state.max_new_tokens = state._new_tokens_limit = positions - prompt + 1
        check_length(prompt, state.max_new_tokens or 1, positions)


def check_length(prompt: int, new: int, positions: int, limit: str = "this model has {}") -> None:
    """Raise KVPatchError for a text of more positions than there are. The last new token needs none: nothing reads it.

    limit: words of the message, {} for the number of positions.
    """
    needed = prompt + new - 1
    if needed > positions:
        raise KVPatchError(
            f"The text needs {needed} positions, but {limit.format(positions)}. Evicting tokens does not give new "
            "positions: shorten the prompt or generate fewer tokens."
        )
