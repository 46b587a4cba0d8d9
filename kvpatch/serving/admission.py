"""Checks of a request when it arrives, and the sizes of a prompt's pieces: put before the engine's own scheduler."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import KVPatchError
from .conversations import Beginning
from .pool import RequestPool

HAS = "this model has {}"


class Admission:
    """Checks of a request when it arrives, so that one that cannot be served fails alone; comes before a scheduler class."""

    cache: RequestPool
    starved_requests: list[Any]
    block_new_requests: bool
    waiting_requests: dict[str, Any]
    active_requests: dict[str, Any]
    _requests_to_cancel: set[str]
    max_positions: int | None = None
    limit: str = HAS

    def add_waiting_request(self, state: Any) -> None:
        """Check an arriving request, and add it to the waiting list. transformers' engine calls this once for each.

        If its text begins with a prefix (a text that the patch has read before), only the rest is left to read: `state` and the
        pool's `beginnings` note that.

        Raises:
            KVPatchError: it can never be served. The engine then fails this request.
        """
        if self.max_positions is not None:
            self._limit_length(state, self.max_positions)
        # self.cache is the RequestPool
        prefix = self.cache.find_prefix(state.initial_tokens)
        messages = state.logit_processor_kwargs.get("messages")
        self.cache.check(state.initial_tokens, state.max_new_tokens, prefix, messages)
        if prefix is not None:  # as the engine's own prefix sharing does
            self.cache.beginnings[state.request_id] = prefix
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[len(prefix) :]
            state.position_offset = len(prefix)
        super().add_waiting_request(state)  # type: ignore[misc]

    def finish_request(self, request_id: str) -> None:
        """End a request after its last token, and keep its cache as a conversation. transformers' engine calls this."""
        self._keep_conversation(request_id)
        super().finish_request(request_id)  # type: ignore[misc]

    def clear_cancelled_requests(self) -> Any:
        """End the requests that were cancelled, as at a stop string, and keep their caches.

        The engine calls it before each pass.
        """
        for request_id in list(self._requests_to_cancel):  # a set of transformers' scheduler
            self._keep_conversation(request_id)
        return super().clear_cancelled_requests()  # type: ignore[misc]

    def _keep_conversation(self, request_id: str) -> None:
        """Hand a request that ends to the pool, which may keep its cache; nothing if it was never admitted."""
        state = self.active_requests.get(request_id)
        if state is not None:
            self.cache.keep(state)

    def _infer_request_tokens(self, state: Any, *rest: Any) -> Any:
        """Return the tokens of a request that are still to be read. transformers' scheduler asks before each pass.

        For a waiting request, `_choose_beginning` first looks for a kept conversation (cache of an ended request) that its text
        goes on from.
        """
        if self.cache.conversations is not None and state.request_id in self.waiting_requests:
            self._choose_beginning(state)
        return super()._infer_request_tokens(state, *rest)  # type: ignore[misc]

    def _choose_beginning(self, state: Any) -> None:
        """Choose what a waiting request's text begins with and need not read again: a kept conversation, else its prefix.

        Sets what is left to read in `state`. `_infer_request_tokens` calls it before each pass until the request is admitted: a
        conversation (cache of an ended request) may have been dropped meanwhile. A Prefix in `beginnings` stays; an older
        Beginning goes.
        """
        beginnings = self.cache.beginnings
        if isinstance(beginnings.get(state.request_id), Beginning):
            del beginnings[state.request_id]
        beginning = self.cache.find_beginning(state, self.max_positions)
        if beginning is not None:
            beginnings[state.request_id] = beginning
        n_read = len(beginnings.get(state.request_id, ()))
        state.remaining_prefill_tokens, state.position_offset = state.initial_tokens[n_read:], n_read

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Schedule the coming pass, as the engine asks. Empties `starved_requests`, which the engine would offload."""
        self.cache.request_waits = False  # once one waits for room, later ones wait too
        scheduled = super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
        self.starved_requests = []
        return scheduled

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *rest: Any) -> None:
        """Schedule a request's tokens for the next pass, at most a chunk of its prompt."""
        super()._schedule_request(state, request_tokens, min(token_budget, self.cache.chunk), *rest)  # type: ignore[misc]

    def end_at(self, stops: Any, state: Any) -> None:
        """End a request whose new token completes a stop string; its output is delivered with this pass.

        `RequestPool.mark_complete_blocks` calls it with each new token of a request. stops: transformers' StopStringCriteria.
        """
        status, tokens = type(state.status), state.initial_tokens + state.generated_tokens
        newest_ids = torch.tensor([tokens[-stops.maximum_token_len :]], device="cpu")  # as many as a stop string can have
        if state.status is status.DECODING and bool(stops(newest_ids, None)):
            state.status = status.FINISHED
            self.finish_request(state.request_id)
            self.block_new_requests = False  # transformers' flag: there is room again

    def _limit_length(self, state: Any, positions: int) -> None:
        """Set an arriving request's max_new_tokens, if it has none, so that it ends at the model's last position.

        `add_waiting_request` calls it for a model with so many positions. Raises KVPatchError if the request needs more.
        """
        prompt = len(state.initial_tokens)
        if state.max_new_tokens is None:
            state.max_new_tokens = state._new_tokens_limit = max(positions - prompt + 1, 1)
        check_length(prompt, state.max_new_tokens or 1, positions, self.limit)


def check_length(prompt: int, new: int, positions: int, limit: str) -> None:
    """Raise KVPatchError for an arriving text that needs more than `positions`. The last new token, never read, needs none.

    `_limit_length` and `Answers` call it. limit: words of the message, {} for the number of positions.
    """
    needed = prompt + new - 1
    if needed > positions:
        raise KVPatchError(
            f"The text needs {needed} positions, but {limit.format(positions)}. Evicting tokens does not give new "
            "positions: shorten the prompt or generate fewer tokens."
        )
