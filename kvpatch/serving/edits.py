"""Texts that are another text with spans gone, or with other tokens in place of a span: found by their token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

RUN = 8
"""Tokens that must agree after a difference: the texts are then taken to go on alike."""


class Edited(NamedTuple):
    """The edits that turn a kept text into the beginning of another one.

    spans: (start, stop) of the kept text, in order, with the tokens that replace it, or []. length: tokens of that beginning.
    """

    spans: list[tuple[int, int, list[int]]]
    length: int

    @property
    def reused(self) -> int:
        """Count the tokens of the other text that come from the kept one."""
        return self.length - sum(len(ids) for _, _, ids in self.spans)


def count_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of tokens (or characters) with which two texts begin alike.

    `Conversations.find` and `find_edits` call it, and a chat's `find_dropped`, to learn how much of a text was read before;
    `Template._find_end` and `read_text` to find where messages and a prompt end.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisection: comparing slices is faster in Python than comparing tokens one by one
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def find_edits(kept: list[int], ids: list[int], answer: int) -> Edited | None:
    """Return the edits that turn a kept text into the beginning of a longer one: spans that go, or get other tokens.

    `_find_edited` calls it for a request's text. The cache of the kept text is then edited, and only new tokens are read. The
    longer text must have the end of the kept text; but from `answer` on, where the last answer begins, anything may be gone.

    Args:
        kept: tokens of the kept text.
        ids: of the longer one.
        answer: tokens of the kept text before its last answer.

    Returns:
        None if nothing was edited, a span would get more tokens than it had, or nothing of `ids` would be left to read.
    """
    kept_start = ids_start = count_common(kept, ids)  # a difference begins here; the texts before it are matched
    run_places = _index_runs(kept, ids_start)
    spans = list[tuple[int, int, list[int]]]()
    while kept_start < len(kept):
        resumption = _find_run(run_places, ids, kept_start, ids_start)
        if resumption is None:  # the rest of the kept text is gone, as only an answer may be
            if kept_start < answer:
                return None
            spans.append((kept_start, len(kept), []))
            break
        # the end of the difference in each text, moved back while the tokens before it agree
        kept_stop, ids_stop = resumption
        while kept_stop > kept_start and ids_stop > ids_start and kept[kept_stop - 1] == ids[ids_stop - 1]:
            kept_stop, ids_stop = kept_stop - 1, ids_stop - 1
        if ids_stop - ids_start > kept_stop - kept_start:  # new tokens take the positions of old ones: there are too many
            return None
        spans.append((kept_start, kept_stop, ids[ids_start:ids_stop]))
        common = count_common(kept[kept_stop:], ids[ids_stop:])
        kept_start, ids_start = kept_stop + common, ids_stop + common
    return Edited(spans, ids_start) if spans and ids_start < len(ids) else None


def _index_runs(ids: list[int], start: int) -> dict[tuple[int, ...], list[int]]:
    """Index a kept text from `start` on, for `_find_run`: each sequence of RUN tokens, and the places where it begins."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index in range(start, len(ids) - RUN + 1):
        places.setdefault(tuple(ids[index : index + RUN]), []).append(index)
    return places


def _find_run(known: dict[tuple[int, ...], list[int]], ids: list[int], at: int, there: int) -> tuple[int, int] | None:
    """Return where a kept text and `ids` go on alike after a difference, a place in each; None if nowhere. For `find_edits`.

    known: places by run of RUN tokens, of `_index_runs`. at, there: where the difference begins, in each text. Of several
    places the first in `ids` is taken, and then the first in the kept text.
    """
    for end in range(there, len(ids) - RUN + 1):
        begins = known.get(tuple(ids[end : end + RUN]), [])
        index = bisect_left(begins, at)
        if index < len(begins):
            return begins[index], end
    return None
