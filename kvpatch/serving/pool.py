"""RequestPool: what transformers' continuous batching takes for its paged cache, with a budget for each request.

The engine admits requests, orders their tokens into packed passes, and frees what has ended. Keys and values lie in
EvictingCaches: one of each request whose prompt is being read, and one whose rows are the requests that decode. Blocks only
count: a request claims as many as it will ever hold when it is admitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from ..cache.cache import EvictingCache
from ..cache.messages import Messages
from ..cache.prefix import Prefix
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from ..policies.numbers import on_device
from ..policies.served import why_not
from .conversations import Beginning, Conversation, Conversations
from .packed import PackedPass, Part
from .request import Request, check_system, count_claimed, count_continued, refuse_placeholders
from .rows import RowPool


class _Sectors:
    """Stand-in for the engine's pool of sectors (blocks of memory), which has nothing to free here: blocks only count."""

    def try_to_free_sectors(self) -> None:
        """Do nothing: a request's blocks are free as soon as it ends."""

    def reset(self) -> None:
        """Do nothing: there is no memory to reset."""


class RequestPool:
    """The requests of one engine.

    settings: of the patch. chunk: tokens of a prompt that one pass reads; a longer prompt is compressed after every chunk.
    num_blocks: in all; page: tokens of a block, in each layer. requests: those admitted. find_prefix: finds the patch's prefix
    of a text; beginnings: by request, what of its text was read before. conversations: caches of ended requests, if kept.
    compute: enters the CUDA stream of passes. after_token: called with a request's state, after each new token. next_tokens: of
    the next pass. request_waits: one waits for room, so later ones do too. placeholders: what ids of images and sounds mean.
    """

    # the engine's interface: no index tensors and masks are made, since there is no allocator to ask for them
    use_prefix_sharing = allow_block_sharing = False
    max_blocks_per_request = max_decode_fast_path_length = read_cache_limit = 0
    max_tokens_read = bytes_per_sector = 1

    def __init__(
        self, settings: CacheSettings, num_blocks: int, page: int, max_batch_tokens: int, device: torch.device
    ) -> None:
        """Begin without requests, for `_make_pool`, in place of transformers' paged cache. page: tokens of a block."""
        self.settings, self.num_blocks, self.page, self.device = settings, num_blocks, page, device
        self.max_batch_tokens = max_batch_tokens
        self.cache_allocators: dict[str, Any] = {}
        self.pool = _Sectors()  # transformers asks it to free memory
        self.chunk = max_batch_tokens
        self.requests: dict[str, Request] = {}
        self.find_prefix: Callable[[Sequence[int]], Prefix | None] = lambda ids: None
        self.beginnings: dict[str, Prefix | Beginning] = {}  # by request: the part of its text that was read before
        self.placeholders: Mapping[int, str] = {}
        self.conversations: Conversations | None = None
        self.compute: Callable[[], AbstractContextManager[Any]] = nullcontext  # enters the CUDA stream of the passes
        self.after_token: Callable[[Any], None] | None = None  # looks for a stop string
        self.rows = RowPool()
        self.request_waits = False  # for room
        self.next_tokens: list[tuple[str, int, int]] = []  # of the next pass: request, its tokens before, and in the pass
        self._forked: list[str] = []  # requests whose caches are still their sources'

    @cached_property
    def _blockwise(self) -> CacheSettings | None:
        """Settings to evict after every `block` tokens of a prompt of several passes; None: the policy cannot do that."""
        settings = self.settings
        if settings.block is not None:
            return settings
        if why_not("blocks of an engine", settings.list_features()) is not None:  # the policy refuses blocks
            return None
        return dataclasses.replace(settings, block=self.chunk)

    # ---- admission ----

    def count_blocks(self, prompt: int, new: int | None, prefix: Prefix | Beginning | None = None) -> int:
        """Return how many blocks of `page` tokens a request claims to be admitted. new: tokens to generate; None: no limit.

        Raises:
            KVPatchError: its text has no limit, and the number of held tokens grows with the text.
        """
        read = 0 if prefix is None else len(prefix)
        evicts_late = prompt - read > self.chunk and self._blockwise is None  # only after the last of the prompt's passes
        if isinstance(prefix, Beginning) and new is not None:  # goes on from a kept conversation
            rest = prompt - read
            claimed = count_continued(self.settings, prefix.held, prefix.columns + rest, rest, new, evicts_late)
            return -(-claimed // self.page)
        return -(-count_claimed(self.settings, prompt, new, evicts_late, read) // self.page)

    def check(
        self, ids: Sequence[int], new: int | None, prefix: Prefix | Beginning | None = None, messages: Messages | None = None
    ) -> None:
        """Raise KVPatchError for a request that could never be served; `add_waiting_request` calls it. new: tokens to write."""
        prompt = len(ids)
        if not prompt:
            raise KVPatchError("This request has no token: give each prompt at least one.")
        refuse_placeholders(ids, self.placeholders)
        if self.keeps_system:  # protect="system"
            step = prompt if self._blockwise is None else self.settings.block or self.chunk  # tokens between evictions
            check_system(self.settings, messages, prompt, step)
        needed = self.count_blocks(prompt, new, prefix)
        if needed > self.num_blocks:
            raise KVPatchError(
                f"This request needs {needed} blocks of {self.page} tokens, but there are {self.num_blocks}: give a smaller k, "
                "or more num_blocks in the ContinuousBatchingConfig."
            )

    @property
    def keeps_system(self) -> bool:
        """Tell whether requests have to come with their messages."""
        return self.settings.acts and self.settings.policy.scope.keeps_system

    @property
    def claimed_blocks(self) -> int:
        """Blocks that requests have claimed. `_measure_engine` asks in another thread than the engine's."""
        return sum(request.blocks for request in list(self.requests.values()))

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Tell transformers' scheduler before a pass if a request's next tokens fit. Admits a new one, or sets `request_waits`.

        A piece of a prompt is read whole or not at all, so that where it is cut does not depend on other requests.
        """
        waiting = len(state.remaining_prefill_tokens or state.tokens_to_process)
        if request_len < min(waiting, self.chunk):
            return False
        if state.request_id in self.requests or dry_run:
            return True
        prompt, new, prefix = len(state.initial_tokens), state.max_new_tokens, self.beginnings.get(state.request_id)
        blocks = self.count_blocks(prompt, new, prefix)
        self.request_waits = self.request_waits or self.claimed_blocks + blocks > self.num_blocks
        if self.request_waits:  # later requests wait, too
            return False
        messages = state.logit_processor_kwargs.get("messages")
        self.requests[state.request_id] = Request(prompt, new, blocks, prefix=prefix, messages=messages)
        if isinstance(prefix, Beginning) and self.conversations is not None:
            self.conversations.note_reuse(state.request_id, prefix.reused)
        return True

    def find_beginning(self, state: Any, positions: int | None) -> Beginning | None:
        """Find a kept conversation that has read the beginning of a waiting request's text, and more than its prefix, or None.

        `_choose_beginning` asks. Also None if there are not blocks enough yet. positions: how many the model has, or None.
        """
        prompt, new, prefix = len(state.initial_tokens), state.max_new_tokens, self.beginnings.get(state.request_id)
        if self.conversations is None or new is None or state.num_children:  # children: several answers
            return None
        if self.claimed_blocks + self.count_blocks(prompt, new, prefix) > self.num_blocks:  # it waits on
            return None
        with self.compute():  # in the CUDA stream of the passes
            beginning = self.conversations.find(state.initial_tokens)
        if beginning is None or (prefix is not None and len(prefix) >= beginning.reused):
            return None
        if self.keeps_system and beginning.system != state.logit_processor_kwargs["messages"].count_system(prompt):
            return None  # a text of other messages, or a later system message: read anew, as a budget for it was checked
        if positions is not None and beginning.columns + prompt - len(beginning) + new - 1 > positions:
            return None
        return beginning if self.claimed_blocks + self.count_blocks(prompt, new, beginning) <= self.num_blocks else None

    def keep(self, state: Any) -> None:
        """Store an ended request's cache in `conversations`, unless it failed, was read in part, or still shares a source's."""
        request = self.requests.get(state.request_id)
        if self.conversations is None or request is None or state.error is not None or state.request_id in self._forked:
            return
        with self.compute():  # in the CUDA stream of the passes
            cache = self.rows.copy_row(state.request_id) if request.cache is None else request.cache
            if cache is None or cache.unfinished or cache.turns.unfinished or not cache.turns.prompts_read:
                return
            cache.settings = self.settings  # no more those of `_blockwise`
            begun = request.prefix if isinstance(request.prefix, Beginning) else None  # it went on from a kept one
            n_read, tokens = cache.columns_read, state.initial_tokens + state.generated_tokens
            positions = list(range(n_read)) if begun is None else [*begun.positions, *range(begun.columns, n_read)]
            ids, answer = tokens[: len(positions)], len(state.initial_tokens)
            self.conversations.keep(Conversation(ids, positions, answer, cache, request.messages))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Drop a request, its row among those that decode, and its claim of blocks. The engine calls this at its end."""
        self.requests.pop(request_id, None)
        self.beginnings.pop(request_id, None)
        self.rows.drop(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Drop all requests. transformers' processor calls this when it is reset."""
        self.requests.clear()
        self.beginnings.clear()
        self.next_tokens.clear()
        self._forked.clear()
        self.rows = RowPool()

    reset = free_all_requests

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Return the share of blocks that are free, or, if not `relative`, their number."""
        free = self.num_blocks - self.claimed_blocks
        return free / self.num_blocks if relative else free

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Count requests that can go on: all, since a claim is for the whole text."""
        return len(list_blocks_needed)

    def evict_cached_blocks(self) -> bool:
        """Return False: no block is kept after its request."""
        return False

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Return 0: prefixes are not shared."""
        return 0

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return nothing: no block is shared."""
        return {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Let `after_token` look if a request's new token completes a stop string. No block is marked: none is shared."""
        if self.after_token is not None:
            self.after_token(state)

    # ---- several sequences of one prompt ----

    def prepare_fork_request(self, src_state: Any, dst_req_ids: Sequence[str], copy_src_and_dst: Any) -> list[str]:
        """Admit copies of a request for several answers, while there is room; return their names. The engine calls this."""
        source, forked = self.requests[src_state.request_id], list[str]()
        for name in dst_req_ids:
            if self.claimed_blocks + source.blocks > self.num_blocks:
                break
            self.requests[name] = dataclasses.replace(source)
            forked.append(name)
        self._forked += forked  # `next_pass` copies their caches
        return forked

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """Do nothing: `next_pass` copies, in the stream of the pass."""

    # ---- a pass ----

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """Note that the next `query_length` columns (tokens) of the coming pass are this request's. The engine calls this."""
        if query_length:  # 0: the only token that is left of the prompt is read once the request has been copied
            self.next_tokens.append((request_id, past_length, query_length))

    def next_pass(self) -> PackedPass:
        """Build the next pass from `next_tokens`, and empty that, for `_begin_packed`; requests that now decode join `rows`."""
        coming, self.next_tokens = self.next_tokens, []
        for name in self._forked:  # requests that still share another's cache
            request = self.requests.get(name)
            if request is not None and request.cache is not None:
                request.cache = request.cache.clone()
        self._forked = []
        first, column = dict[str, int](), 0  # first: by decoding request, the column (token of the pass) of its newest token
        parts = list[Part]()
        for name, past, count in coming:
            request = self.requests[name]
            if past < request.prompt:
                parts.append(self._make_piece(request, past, torch.arange(column, column + count, device=self.device)))
            else:
                first[name] = column
            column += count
        if first:
            self._join_rows(first)
            rows = self.rows.gather(first)
            columns_B1 = on_device([[first[name]] for name in rows.alive], self.device)
            parts.insert(0, Part(rows.cache, columns_B1))
        return PackedPass(parts, self.settings)

    def _make_piece(self, request: Request, past: int, columns: torch.Tensor) -> Part:
        """Return a prompt's tokens after `past` as a part of the coming pass, for `next_pass`. Its first makes the cache."""
        end = past + len(columns)
        if request.cache is None:
            in_blocks = request.prompt - past > self.chunk and self._blockwise is not None  # evicts after every chunk
            settings = self._blockwise if in_blocks and self._blockwise is not None else self.settings
            request.cache = EvictingCache(settings) if request.prefix is None else request.prefix.copy()
            request.cache.settings = settings
            request.cache.plans.prompt_len = request.cache.columns_read + request.prompt - past
            request.cache.plans.new_tokens = request.new  # tokens to generate, at most
            request.cache.messages = request.messages
        ends_block = end == request.prompt or len(columns) == self.chunk  # else its last block may go on in the next pass
        return Part(request.cache, columns[None], open=not ends_block)

    def _join_rows(self, names: dict[str, int]) -> None:
        """Move the caches of requests that decode for the first time to `rows`, which joins them; before each step."""
        for name in names:
            cache = self.requests[name].cache
            if cache is not None:
                cache.settings = self.settings  # no more those of `_blockwise`
                self.requests[name].cache = None
                self.rows.add(name, cache)
