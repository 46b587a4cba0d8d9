"""Log of a patch: the passes that ran, those in which the budget acted, and a warning where it cannot act.

Tokens before the first eviction have the unpatched model's logits: without `block=` these are all tokens of a training pass,
of a forward without a cache, and of a prompt from which nothing goes on.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..arch.upstream import CACHE
from ..cache.cache import EvictingCache
from ..cache.lossless import Verified
from ..cache.settings import CacheSettings
from ..cache.snapshot import Snapshot
from ..cache.state import PassRecord
from .pass_record import TextRecord, Timing, evicting

_LOG = logging.getLogger(__name__)


@dataclass
class Passes:
    """Number of passes of one kind, and of those in which the budget acted."""

    total: int = 0
    acted: int = 0


class RunLog:
    """Log of one patch: `passes` by kind, `last` for the report when its cache is gone, and one warning of each kind.

    Kinds: "training" and "no_cache", whose caches (if block= gives them any) end with the pass; "prompt"; "decode";
    "full", over all tokens of a lossless cache.
    """

    def __init__(self, settings: CacheSettings, lossless: bool = False) -> None:
        """Begin an empty log of passes, for `PatchState.__init__`, and for `warm_up`, whose passes do not count.

        lossless: the patch's caches keep all tokens, so that no pass gets a warning.
        """
        self.settings = settings
        self.lossless = lossless  # no warning of a pass in which nothing is evicted
        self.passes = {kind: Passes() for kind in ("training", "no_cache", "prompt", "decode", "full")}
        self.dropped = 0  # prompts whose cache was freed without being used again
        self.last: Snapshot | None = None
        self.replayed: dict[str, tuple[str, str]] = {}  # backends that ran in the last replay
        self.verified: Verified | None = None  # of the last lossless cache
        self.number = 0  # how often a cache was used: a pass, or generate()'s end
        self._cache: weakref.ref[EvictingCache] | None = None  # not its record, which refers to this log
        self._warned: set[str] = set()
        self._lock = threading.RLock()  # re-entrant: a cache may be freed at any line

    # ---- called by the hooks ----

    def count_own_code(self, call: dict[str, Any], training: bool) -> None:
        """Count a pass that `_enter_decoder` leaves to the model's code, and warn once if the policy would have evicted.

        call: the decoder's arguments. training: the decoder is in training mode.
        """
        tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.ndim < 2 or not tokens.shape[1]:
            return  # the model raises the error
        kind = "training" if training else "no_cache"
        self._count_pass(kind, 1, False)
        if _would_evict(self.settings, tokens.shape[1]):
            self._warn_once(kind, tokens.shape[1])

    def begin(self, cache: EvictingCache, training: bool, made_here: bool) -> None:
        """Count a pass through `cache` that has just begun, by its kind, and note if the budget acts in it.

        `_enter_decoder` calls this for each pass, `_begin_packed` for each cache of a packed one. The budget acts if tokens of
        the pass attend after an eviction; until then the pass is as without a patch. Also changes the cache's record, and warns
        once if a pass whose cache is dropped at its end is over the budget, but has no such token. training: the decoder's
        mode. made_here: the caller gave no cache.
        """
        record, now = self.record(cache, made_here), cache.current_pass  # now: facts about the pass
        # steps that ran inside a graph of torch.compile since the last pass, where no hook counted them
        Q, missed = now.positions_BQ.shape[1], cache.columns_read - record.columns
        if missed > 0:
            self._count_pass("decode", missed, record.acts_in_step(cache, 0))
        if not now.prompt_columns:
            kind, acted = "decode", record.acts_in_step(cache, Q)
            self.time_step(cache)
        else:
            kind, acted = "prompt", record.note_prompt(cache, now, Q)
            if now.lender is not None and cache.columns_read:  # lossless=True: it attends to all tokens, to verify a draft
                kind, acted = "full", False
        if cache.for_one_pass:
            kind = "training" if training else "no_cache"
        record.columns, record.acted = cache.columns_read + Q, record.acted or acted
        self._count_pass(kind, 1, acted, record)
        if cache.for_one_pass and not acted and _would_evict(self.settings, max(now.n_B, default=0)):
            self._warn_once(kind, max(now.n_B))

    def record(self, cache: EvictingCache, made_here: bool = False) -> TextRecord:
        """Return the TextRecord that counts a cache's passes; if it has none of this log, set `cache.pass_record` to one.

        `begin` calls it at each pass, `start`, `time_step` and `finish` for each generate().
        """
        record = cache.pass_record
        if not isinstance(record, TextRecord) or record.log is not self:
            record = cache.pass_record = TextRecord(self, cache, made_here)
        elif record.cache() is not cache:  # a clone
            record.cache = weakref.ref(cache)
        return record

    def start(self, cache: EvictingCache, made_here: bool) -> None:
        """Note when a generate() over `cache` begins, for the times in the report. made_here: the caller gave no cache."""
        self.record(cache, made_here).timing = Timing(time.perf_counter())

    def time_step(self, cache: EvictingCache) -> None:
        """Note the time of a decode step if it is the first of a generate(); `begin` and `_step_by_graph` call it for each."""
        timing = self.record(cache).timing
        if timing is not None and timing.step is None:
            timing.step = time.perf_counter()

    def finish(self, cache: EvictingCache) -> None:
        """Stop the time of a generate() for `_finish`, also after an error; count its steps inside graphs of torch.compile."""
        record = self.record(cache)
        end = time.perf_counter()
        if not cache.unfinished:  # no change of the cache was interrupted
            self._catch_up(cache, record)
        if record.timing is not None:
            record.timing.end, record.timing.steps = end, record.columns - record.base
        if record.number:
            self._note_last(record)  # an assistant's cache may have had the last pass

    def release(self, cache: EvictingCache, record: TextRecord) -> None:
        """Take what the report needs from a cache before it is freed; `TextRecord.release` of that cache's text calls it.

        Counts the steps that ran in graphs and, as unused, a prompt that nothing followed. Keeps a snapshot of the cache, if
        no other was used later. record: what the log knows of the cache's text.
        """
        if cache.unfinished or not record.number:  # an error ended its pass, or it took part in no pass under this patch
            return
        self._catch_up(cache, record)
        if record.number == self.number:
            self.last = Snapshot.of(cache)
        self._note_unused(cache, record)

    def warn_not_compared(self, why: str | None) -> None:
        """Warn once, for `_run_with_cache`, that a text is not compared with what its cache has read. why: None if it was."""
        with self._lock:
            if why is None or "texts" in self._warned:
                return
            self._warned.add("texts")
        _LOG.warning(
            f"[kvpatch] this text and the one that the cache has read are not compared, since {why}: another text, or an "
            "edited one, would go unnoticed. (Said once.)"
        )

    # ---- called by the Patch ----

    def close(self) -> None:
        """Count the last cache's prompt as unused if nothing went on from it; `Patch.remove` calls it."""
        cache = self._find_cache()
        if cache is not None and not cache.unfinished:
            self._note_unused(cache, cache.pass_record)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return by kind, of those that ran: (all passes, those in which the budget acted)."""
        return {kind: (one.total, one.acted) for kind, one in self.passes.items() if one.total}

    def snapshot(self) -> Snapshot | None:
        """Return a snapshot of the cache used last, for a report; one taken earlier if it is freed, None before any pass.

        Marks the cache as looked at (`was_read`), so that no warning says it was not used; counts the steps that graphs ran.
        """
        cache = self._find_cache()
        if cache is None:
            return self.last
        cache.was_read = True
        if not cache.unfinished:
            self._catch_up(cache, cache.pass_record)
        return Snapshot.of(cache)

    # ----

    def _find_cache(self) -> EvictingCache | None:
        """Return the cache of the last pass that had one, unless it was freed or reset."""
        cache = None if self._cache is None else self._cache()
        return None if cache is None or cache.pass_record is None else cache

    def _catch_up(self, cache: EvictingCache, record: PassRecord | None) -> None:
        """Count the steps that ran inside a graph, where no hook runs; `snapshot`, `finish` and `release` call it first."""
        if not isinstance(record, TextRecord) or record.log is not self:
            return  # the cache goes on under another patch
        cache.catch_up()  # copies the steps counted on the device to the host's counters
        missed = cache.columns_read - record.columns
        if missed > 0 and not cache.for_one_pass:
            acted = record.acts_in_step(cache, 0)  # in the last of them
            record.columns, record.acted = cache.columns_read, record.acted or acted
            self._count_pass("decode", missed, acted)

    def _count_pass(self, kind: str, count: int, acted: bool, record: TextRecord | None = None) -> None:
        """Count passes of a kind, for `begin`, `count_own_code` and `_catch_up`. acted: the budget acts in them.

        count: how many. record: of their cache, which is then noted as the one used last; None: no cache is noted.
        """
        with self._lock:
            passes = self.passes[kind]
            passes.total += count
            passes.acted += count * acted
            if record is not None:
                self._note_last(record)

    def _note_last(self, record: TextRecord) -> None:
        """Note, for `_count_pass` and `finish`, that a record's cache was used last: the report is about that one."""
        with self._lock:
            self.number += 1
            record.number = self.number
            self._cache = record.cache

    def _note_unused(self, cache: EvictingCache, record: PassRecord | None) -> None:
        """Count a prompt whose cache was made for it and is not used again, and warn once if the budget did not act in it.

        A user who measures such passes measures the unpatched model. `release` calls it when a cache is freed, `close` when the
        patch is removed; does nothing for a cache that was changed again after its prompt (`n_changes` counts passes and edits)
        or was looked at.
        """
        exempt = cache.for_one_pass or cache.n_changes > 1 or cache.was_read
        if exempt or not isinstance(record, TextRecord) or not record.made_here:
            return
        record.made_here = False  # once per cache
        with self._lock:
            self.dropped += 1
        if not record.acted and (record.prompt_evicted or (self.settings.acts and self.settings.policy.schedule == "decode")):
            self._warn_once("prompt" if record.timing is None else "first token", record.columns)

    def _warn_once(self, kind: str, Q: int) -> None:
        """Log a warning once that the budget cannot act in a kind of pass, and name the patched() option that helps.

        `begin`, `count_own_code` and `_note_unused` call it; a lossless patch never warns. Q: columns of the pass.
        """
        with self._lock:
            if self.lossless or kind in self._warned:
                return
            self._warned.add(kind)
        phrase, remedy = _TEXTS[kind]
        settings = self.settings
        named = f"policy {settings.policy.name!r}, k={', '.join(dict.fromkeys(map(str, settings.budget.per_layer)))}"
        if kind == "first token":
            _LOG.warning(f"[kvpatch] {named} does not act in {phrase}{remedy}. (Said once; patch.report() counts.)")
            return
        if kind == "training" and settings.records_lifetimes:
            remedy = "; or read what a rollout wrote in a replay: with patch.replay(patch.record())"
        if settings.policy.schedule == "decode":
            block = f"schedule='decode' evicts generated tokens only; give schedule='both' and block=, below {Q:,}"
        elif settings.block is not None:
            block = f"Give a smaller block= than {settings.block:,}, below the {Q:,} tokens of the pass"
        else:
            block = f"Give block=, below the {Q:,} tokens of the pass, such as block={max(Q // 4, 1)}"
        _LOG.warning(
            f"[kvpatch] {named} does not act in {phrase}: all tokens are computed before the "
            f"first eviction, so the figures are the unpatched model's. {block}{remedy}. (Said once; patch.report() counts.)"
        )


_TEXTS = {
    "training": ("this training pass", ""),
    "no_cache": (
        "this forward without a cache",
        "; or let it have one: leave use_cache=False out of generate(), or of the model's config",
    ),
    "first token": (
        "this generate(), which ended with its first token (max_new_tokens=1, or a stop token)",
        ": it is computed before the first eviction, as the unpatched model does; ask for more tokens to feel the budget",
    ),
    "prompt": ("this pass, from whose cache nothing went on", f"; or go on from its {CACHE}"),
}


def _would_evict(settings: CacheSettings, n: int) -> bool:
    """Tell if the policy would evict some of a row's n tokens, in some layer: `begin` and `count_own_code` warn only then."""
    return any(settings.rules[layer].least(n) < n for layer in evicting(settings))
