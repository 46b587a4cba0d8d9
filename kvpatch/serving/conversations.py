"""Conversations: caches of requests that have ended. A request whose text goes on from one begins with a copy of its cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..cache.cache import EvictingCache
from ..cache.editing import can_crop
from ..cache.messages import Messages
from .edits import Edited, count_common, find_edits

_LOG = logging.getLogger("kvpatch.serving")
TRIED = 4
"""Conversations that a text is compared with as an edited one."""
Span = tuple[int, int]


@dataclass
class Conversation:
    """One request and the cache of all that it has read.

    ids: the tokens of its text. positions: the cache's position of each of them, with gaps where tokens were forgotten.
    answer: tokens before its last answer. cache: of one row, which nothing writes to. messages: of the text, if it came with
    them. nbytes: of the cache. held: tokens that a KV head holds, the mean of the heads, by layer.
    """

    ids: list[int]
    positions: list[int]
    answer: int
    cache: EvictingCache
    messages: Messages | None = None
    nbytes: int = field(init=False)
    held: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Measure the cache once: `nbytes` and `held`."""
        self.nbytes = count_bytes(self.cache)
        counts = [self.cache.held(layer).float().mean() for layer in range(len(self.cache.layers))]
        self.held = [int(count.ceil()) for count in counts]


class Beginning:
    """The first tokens of a request's text, which a conversation has read: like a Prefix, it has a length and can be copied.

    positions: the cache's, of these tokens. columns: tokens that the copy has read, those it forgot included. held: as in
    Conversation. reused: tokens of the request that are not read again. system: of these, tokens of a system message.
    """

    def __init__(self, conversation: Conversation, length: int, reused: int) -> None:
        """Note the first `length` tokens of a conversation, which begin a request's text. Copies nothing: `copy` does that.

        `Conversations.find` makes one. positions: of these tokens in the conversation's cache, with gaps where an edit has
        removed tokens. held: number of tokens that a KV head of the conversation's cache holds, by layer. reused: tokens that
        the request need not read again: fewer than `length` after an edit.
        system: tokens of its system message.
        """
        self.positions, self.held, self.reused = conversation.positions[:length], conversation.held, reused
        self.system = 0 if conversation.messages is None else conversation.messages.count_system(length)
        self._cache: EvictingCache | None = conversation.cache
        n_read = conversation.cache.columns_read
        shorter = length < len(conversation.ids)
        # tokens that the cache has read up to there; tokens that an edit has removed count too
        self.columns = self.positions[-1] + 1 if shorter else n_read
        self._removed = n_read - self.columns  # for `copy` to crop

    def __len__(self) -> int:
        """Return how many tokens of the request's text these are."""
        return len(self.positions)

    def copy(self) -> EvictingCache:
        """Return a copy of the conversation's cache, cut to these tokens.

        `_make_piece` calls it once, as the request begins.
        """
        assert self._cache is not None
        new, self._cache = self._cache.clone(), None
        if self._removed:
            new.crop(-self._removed)
        return new


class Conversations:
    """The conversations of one engine, up to so many bytes.

    Dropped are first those that a later request has continued, then the least recently used.

    Args:
        most: bytes of all.
        edits: a text that is a kept one with spans gone or replaced changes that one, instead of being read anew.

    Attributes:
        replace: reads tokens into a span of a cache; from the patch, with `edits`.
        read_alike: tells if the model is still the one that has read a cache.
        note_reuse: called with a request's name and the tokens that it does not read again.
    """

    def __init__(self, most: int, edits: bool = False) -> None:
        """Make an empty store of caches of ended requests, for `kvpatch serve --keep-conversations`.

        most: bytes of all caches. edits: a cache may be edited where a new text differs from the text that it has read. The
        functions are replaced when an engine starts, by the patch's `init_continuous_batching` and by `Answers`.
        """
        self.most, self.edits = most, edits
        self.replace: Callable[[EvictingCache, Span, list[int]], None] | None = None  # reads ids in place of a span
        self.read_alike: Callable[[EvictingCache], bool] = lambda cache: True  # whether the model is unchanged
        self.note_reuse: Callable[[str, int], None] = lambda name, tokens: None  # request, tokens not read again
        self._kept: list[Conversation] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all conversations."""
        return sum(one.nbytes for one in list(self._kept))

    def keep(self, new: Conversation) -> None:
        """Keep the cache of a request that ends, unless it alone is too large; drop the first in the list until all fit.

        `RequestPool.keep` calls it. Conversations with which its text begins go to the front: they are earlier turns of one
        chat, rarely asked for again. One of the same text is replaced.
        """
        before = [one for one in self._kept if one.ids == new.ids[: len(one.ids)] and len(one.ids) < len(new.ids)]
        others = [one for one in self._kept if one.ids != new.ids[: len(one.ids)]]
        self._keep_newest([*before, *others, new] if new.nbytes <= self.most else self._kept)

    def _keep_newest(self, kept: list[Conversation]) -> None:
        """Set the conversations that are kept, those to drop first in front, and drop as many as have too many bytes.

        `keep` and `_edit_conversation` call it.
        """
        while sum(one.nbytes for one in kept) > self.most:
            kept = kept[1:]
        self._kept = kept  # at once, for whoever counts them in another thread

    def clear(self) -> None:
        """Drop all conversations."""
        self._kept = []

    def find(self, ids: Sequence[int]) -> Beginning | None:
        """Return the longest beginning of a text, without its last token, that a kept conversation has read, or None.

        `RequestPool.find_beginning` calls it for each request that waits. A conversation that differs from the text at some
        token is cut there if its cache can be, or, with `edits`, an edited copy is kept, too. The one returned becomes the most
        recently used. If the model was changed since, all are dropped.
        """
        text = list(ids)
        # the conversation that begins like the text for the most tokens, of those whose cache can be cut there
        common = [(count_common(one.ids, text[:-1]), one) for one in self._kept]
        usable = [(count, one) for count, one in common if count and _can_cut(one, count)]
        n_reused, best = max(usable, key=lambda pair: pair[0], default=(0, None))
        length = n_reused
        # the text goes on from the whole of a conversation, and no other has more in common with it
        continues = best is not None and len(best.ids) == n_reused == max(common, key=lambda pair: pair[0])[0]
        if self.edits and not continues:
            candidate = self._find_edited(text, common, n_reused)
            alike = candidate is not None and self.read_alike(candidate[0].cache)
            if candidate is not None and alike and (changed := self._edit_conversation(*candidate)) is not None:
                best, n_reused, length = changed, candidate[1].reused, candidate[1].length
        if best is None:
            return None
        if not self.read_alike(best.cache):  # the model was changed since
            self.clear()
            return None
        self._kept = [*(one for one in self._kept if one is not best), best]
        return Beginning(best, length, n_reused)

    def _find_edited(
        self, ids: list[int], common: list[tuple[int, Conversation]], most: int
    ) -> tuple[Conversation, Edited] | None:
        """Return the conversation whose cache, after edits, spares a text the most tokens, with the edits. Changes nothing.

        `find` calls it. common: conversations, with how many tokens each and the text begin with alike; the TRIED best are
        looked at. None if no more than `most` tokens are spared.
        """
        tried = sorted((pair for pair in common if pair[0]), key=lambda pair: (pair[0], len(pair[1].ids)), reverse=True)[:TRIED]
        candidates = [(one, edited) for _, one in tried if (edited := find_edits(one.ids, ids, one.answer)) is not None]
        best = max(candidates, key=lambda pair: pair[1].reused, default=None)
        return best if best is not None and best[1].reused > most else None

    def _edit_conversation(self, one: Conversation, edited: Edited) -> Conversation | None:
        """Return an edited copy of a conversation, and keep it; None, with a line in the log, if the edit fails.

        `find` calls it, for a waiting request, which may be of another chat or go on without it: so the conversation itself
        stays, as the first to go. A span of `edited` is (start, stop, new ids): without ids, its tokens are gone.
        """
        try:
            cache = one.cache.clone()
            gone = [_find_positions(one, start, stop) for start, stop, ids in edited.spans if not ids]
            if gone:
                cache.forget(gone)  # evicts the tokens of these spans
            for start, stop, ids in edited.spans:
                if ids:
                    assert self.replace is not None
                    self.replace(cache, _find_positions(one, start, stop), ids)  # reads ids by the model
        except Exception as error:  # the text can still be read anew, and no request may end the engine
            _LOG.info("[kvpatch] a conversation was not edited, and is read anew: %s", error)
            return None
        ids, positions = [*one.ids], [*one.positions]
        # ids and positions of the edited text: the last span first, since an edit shifts the indices of all that follows;
        # replace() puts new ids at a span's first positions
        for start, stop, new in reversed(edited.spans):
            first = one.positions[start]
            ids[start:stop], positions[start:stop] = new, range(first, first + len(new))
        changed = Conversation(ids, positions, _count_before(one.answer, edited), cache)
        if changed.nbytes > self.most:
            return None
        self._keep_newest([one, *(other for other in self._kept if other is not one), changed])
        return changed


def count_bytes(cache: EvictingCache) -> int:
    """Return the bytes of an ended request's cache: keys, values, positions, ids, scores, other states.

    `Conversation` calls it once, when it is made; `keep` compares these with its limit.
    """
    others = [cache.ids.nbytes, 0 if cache.shared_score is None else cache.shared_score.nbytes, cache.states.nbytes]
    for layer in cache.layers:
        tensors: list[Any] = [layer.positions, *layer.state.values()]
        others += [one.nbytes for one in tensors if isinstance(one, Tensor)]
    return cache.nbytes + sum(others)


def _can_cut(one: Conversation, length: int) -> bool:
    """Tell if a copy of a kept cache can be cut to its first `length` tokens, with which a new text begins, for `find`."""
    if length == len(one.ids):
        return True
    # transparent: nothing is ever evicted. Else a cut within the prompt (before the last answer, at `answer`) is refused: that
    # prompt has decided what was evicted, and a shorter one would have decided otherwise
    if not one.cache.settings.transparent and length < one.answer:
        return False
    return can_crop(one.cache, one.cache.columns_read - one.positions[length - 1] - 1)  # tokens to remove from the end


def _count_before(answer: int, edited: Edited) -> int:
    """Return how many tokens precede the last answer after edits, for `_edit_conversation`. answer: how many did before."""
    for start, stop, ids in reversed(edited.spans):
        if start < answer:
            answer = start + len(ids) + max(answer - stop, 0)
    return answer


def _find_positions(one: Conversation, start: int, stop: int) -> Span:
    """Return the first position that a conversation's cache has for a span of its text, and the one after the last."""
    return one.positions[start], one.positions[stop - 1] + 1
