"""The Patch: what a patched model's user holds, for its report and for caches of their own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from .cache import editing, from_dynamic
from .cache.cache import EvictingCache
from .cache.lifetimes import Record
from .cache.prefix import Prefix, Prefixes
from .cache.settings import CacheSettings
from .errors import KVPatchError
from .hooks import lossless, ownership
from .hooks.attention import parameters
from .hooks.chat import Chat, begin_chat
from .hooks.compression import compress_past
from .hooks.editing import replace_span
from .hooks.files import load_cache, save_cache
from .hooks.graph import StepGraph, graph
from .hooks.identity import stamp_model
from .hooks.install import Installation
from .hooks.prefix import read_prefix, renew_prefix
from .hooks.replay import find_record, follow
from .hooks.state import PatchState, RunOptions
from .hooks.target import Target
from .hooks.warmup import warm_up
from .policies.budgets import check_count
from .policies.needs import Calibrated
from .policies.served import refuse
from .report import Report
from .report_text import format_budget


class Patch:
    """A patch in force, made by `patched` or `patch`."""

    def __init__(self, target: Target, settings: CacheSettings, options: RunOptions) -> None:
        self.settings, self._target = settings, target
        self._state = self._make_state(target, options)
        self._installation = Installation(target, self._state)

    def install(self) -> None:
        """Change the model's forwards and hooks, for `patched.__enter__`; if that fails, the model is as before.

        Raises:
            KVPatchError: the model is patched already.
        """
        self._installation.install()

    def _make_state(self, target: Target, options: RunOptions) -> PatchState:
        """Make the state that all hooks of this patch share, for `Patch.__init__`. The model is not changed yet."""
        adapter = target.attentions[0][1]
        limit = adapter.max_positions(getattr(target.decoder, "config", None))
        names = parameters(type(target.decoder))  # type: ignore[arg-type]
        measured = stamp_model(target.decoder) if self.settings.policy.needs.find(Calibrated) else None  # to notice changes
        fixed = target.why_positions_fixed()
        state = PatchState(self.settings, adapter, limit, target.shapes(), names, measured, fixed, options)
        state.prefixes.renew = functools.partial(renew_prefix, target, weakref.ref(state))  # for prefixes of a changed model
        return state

    def __repr__(self) -> str:
        policy, block = self.settings.policy, "" if self.settings.block is None else f", block={self.settings.block}"
        size = format_budget(policy.name, policy.schedule, self.settings.budget.per_layer)
        return f"<Patch of {type(self._target.decoder).__name__}: {policy.name}, {size}{block}>"

    def new_cache(self, past: Cache | None = None, *, room: int | None = None) -> Any:
        """Make an empty EvictingCache (a LosslessCache with lossless=True): prefill it once, `clone()` it per question.

        Args:
            past: a DynamicCache that the unpatched model filled from a prompt without padding, to continue if that is exact.
            room: tokens that will be decoded after a prompt. Buffers then reach their final size when the prompt ends, so
                that a decode step can be compiled.

        Raises:
            KVPatchError: the policy needs attention rows that `past` does not hold, or `room` is no number of tokens.
        """
        if room is not None:
            check_count("room", room, "tokens")
            refuse("room=", self._state.list_features())
        if self._state.lossless:
            return lossless.require_lossless_cache(past, self._state)
        cache = self._state.new_cache()
        cache.plans.static_room = room
        if past is not None:
            ownership.check_layers(past, self._state)
            from_dynamic.absorb(cache, past)
        return cache

    def compress(self, past: Cache, ids: Tensor | None = None, *, attention_mask: Tensor | None = None) -> EvictingCache:
        """Return a copy of `past`, a prompt's cache from before the with-block, compressed as if it had been read inside.

        Args:
            past: a DynamicCache that the unpatched model filled, or a cache under policy "full".
            ids: the prompt's token ids [B,T], for policies that read it a second time.
            attention_mask: the prompt's padding mask [B,T], of a DynamicCache with padding that positions did not count.

        Raises:
            KVPatchError: the policy needs queries or attention rows that `past` does not hold, or `past` has dropped tokens.

        Example:
            past = model(ids).past_key_values
            with kvpatch.patched(model, "key_diff", k=0.4) as patch:
                answer = model.generate(torch.cat([ids, question], 1), past_key_values=patch.compress(past))
        """
        return compress_past(self._target, self._state, past, ids, attention_mask)

    def chat(self, tokenizer: Any, system: str | None = None, *, keep_system: bool = False, **options: Any) -> Chat:
        """Begin a conversation on one cache, under one budget: `send()` and `stream()` read what is new alone.

        Args:
            tokenizer: with a chat template.
            system: the system prompt.
            keep_system: refuse a patch that might evict some of it.
            options: of generate(), for every answer; and `template={...}`: more arguments of apply_chat_template(), as tools.

        Raises:
            KVPatchError: no template, an option that the chat sets itself, or a patch that may evict the system prompt.

        Example:
            print(patch.chat(tokenizer, max_new_tokens=200).send("What is a KV cache?"))
        """
        patch = self._target, self.settings, self.new_cache, self.replace
        return begin_chat(*patch, tokenizer, system, keep_system and not self._state.lossless, options)

    def replace(self, cache: EvictingCache, span: tuple[int, int], ids: Tensor | Sequence[Any], *, reread: int = 0) -> None:
        """Read other tokens in place of a span of a cache's text, such as the summary of a tool's result.

        They take the span's first positions and see what is held before it. Tokens after the span have seen the old ones, and
        stay; they move up where positions are missing. To make room, tokens before the span and new ones are evicted.

        Args:
            cache: at the end of a prompt, or after generated tokens.
            span: (start, stop) in positions of the text, stop left out; forgotten already, or empty (at, at) to insert.
            ids: int64 [N] or [B,N]; more than the span has tokens only with `positions="renumbered"`.
            reread: tokens after the span that are read again, so that they have seen the new ones.

        Raises:
            KVPatchError: the tokens or the span do not fit the text; heads have no room for new ones that `protect=` marks; the
                cache, which is then as before, cannot be edited (`forget`), is of joined rows or longer than a sliding window.

        Source: design of this library.

        Example:
            patch.replace(cache, (120, 865), tokenizer("(a page on limits)").input_ids)
        """
        replace_span(self._target.decoder, self._state, cache, span, ids, reread, self._installation.in_force)

    insert = editing.refuse_reading  # raises an error that names `replace`, which inserts too

    def prefix(self, ids: Tensor | Sequence[int]) -> Prefix:
        """Read and compress a text once that others begin with: a system prompt, or a document to be asked about.

        What begins with it goes on from the same keys, values and scores, bit for bit as after reading it anew: give it as
        `past_key_values` to generate(), with the whole text as input_ids. Under continuous batching each request
        whose prompt begins with a prefix of the patch starts from the longest such one by itself.

        Args:
            ids: tokens of one text: [N], [1,N] or a list. The same tokens are read once, and anew after the model has changed.

        Raises:
            KVPatchError: these are no tokens of one text, or an image's, a sound's, or an aLoRA's; or the patch is lossless.

        Example:
            prefix = patch.prefix(document)
            for question in questions:
                model.generate(torch.cat([document, question], 1), past_key_values=prefix)
        """
        return read_prefix(self._target, self._state, ids)

    @property
    def prefixes(self) -> Prefixes:
        """The prefixes that were read: iterate over them, count them with len(), and `drop(prefix)`; `nbytes` is of all."""
        return self._state.prefixes

    def warmup(self, tokens: int | None = None, batch_size: int = 1) -> None:
        """Compile the kernels of this policy before the first request: read a made-up prompt, and decode after it.

        What is compiled serves prompts of any length, and stays on disk in Triton's cache. The report does not count this.

        Args:
            tokens: of the prompt, above the budget; None: 512, or twice a larger budget.
            batch_size: rows; with two or more, a batch with padding is read as well.

        Raises:
            KVPatchError: the prompt is within the budget, or an argument is no number of tokens or rows.

        Example:
            with kvpatch.patched(model, "h2o", k=0.5) as patch:
                patch.warmup(batch_size=8)
        """
        warm_up(self._target, self._state, tokens, batch_size)

    def graph(self, model: nn.Module) -> StepGraph:
        """Make decode steps that are CUDA graphs, without torch.compile: captured once, replayed over later prompts too.

        `step(ids, cache)` returns the logits [B,1,V] of one more token per row; the next step overwrites them. A step that
        cannot be captured is an ordinary call of the model. Policies that append new tokens need `new_cache(room=...)`.
        generate() makes such steps by itself. No such graph has run on a GPU yet.

        Args:
            model: the model that this patch is of, or one that wraps it; called with input_ids and past_key_values.

        Raises:
            KVPatchError: the model is not on a CUDA device, or on several devices.

        Example:
            step, cache = patch.graph(model), patch.new_cache(room=256)
            logits = model(ids, past_key_values=cache).logits
            for _ in range(256):
                logits = step(logits[:, -1:].argmax(-1), cache)
        """
        return graph(model, self._state, self._target.devices()[0])

    def record(self, cache: EvictingCache | None = None) -> Record:
        """Return the Record of a cache, or of the last one used: at which position each token was evicted, for `replay`.

        Raises:
            KVPatchError: nothing was recorded (no record=True, or no pass yet), or a text's beginning is not known.
        """
        return find_record(self._state, self._target.describe_class(), cache)

    def record_nbytes(self, texts: int, tokens: int) -> int:
        """Return the bytes of a Record (what is evicted when) before it is made: 4 per token, layer and KV head, 8 per id.

        Args:
            texts: rows.
            tokens: of the longest text, its prompt included.

        Raises:
            KVPatchError: one of them is no int of 1 or more.

        Example:
            patch.record_nbytes(texts=64, tokens=4096) / 2**20  # MiB
        """
        check_count("texts", texts, "rows")
        check_count("tokens", tokens, "tokens of the longest text")
        return texts * tokens * (8 + 4 * sum(shape.heads for shape in self._target.shapes()))

    def replay(self, record: Record | Sequence[Record]) -> AbstractContextManager[None]:
        """Hide from passes without a cache what a recorded run evicted, as `kvpatch.replay`; passes with one use the budget.

        Raises:
            KVPatchError: the record is of another model, or the patch was removed.
        """
        return follow(self._state, self._target.describe_class(), record, self._installation.in_force)

    def save_cache(self, cache: Cache, path: str | PathLike[str]) -> None:
        """Write a compressed cache, with its scores, to a safetensors file; with lossless=True all tokens' keys and values.

        Raises:
            KVPatchError: the cache is empty, in the middle of a prompt, of another patch, or of a model that has changed since.
        """
        save_cache(self._target, self._state, cache, path)

    def load_cache(self, path: str | PathLike[str]) -> Any:
        """Load a cache that `save_cache` wrote under the same model, policy and budget (a lossless one: the same model).

        Raises:
            KVPatchError: the file is missing, truncated or altered, or belongs to another model, dtype, policy or budget.
        """
        return load_cache(self._target, self._state, path)

    @property
    def passes(self) -> dict[str, tuple[int, int]]:
        """Passes so far by kind, as in Report.passes: (all, those in which the budget acted)."""
        return self._state.log.counts()

    def report(self) -> Report:
        """Report what the last run kept and cost, and in how many passes the budget acted.

        The numbers of tokens and bytes are those of the last pass that had a cache, also if that is gone.

        Raises:
            KVPatchError: nothing has run yet.
        """
        if not self.passes:
            raise KVPatchError("Nothing to report yet: call generate() or the model inside the block first.")
        self.settings.notices.look(wait=True)  # logs the warnings that a GPU still has to confirm
        return Report.of_log(self._state.log)

    def remove(self) -> None:
        """Undo the patch; calling it again does nothing. Open caches stay readable, but no model accepts them."""
        self.restore()
        self.settings.notices.look(wait=True)  # as in `report`
        self._state.log.close()

    def restore(self) -> None:
        """Undo the changes of the model's modules, newest first; `remove`, `patched.__exit__` and `patched.__del__` call it.

        An interrupt is raised after everything is restored; the undo that it stopped is run again.
        """
        self._installation.restore()
