"""Texts that are another text with spans gone, or with other tokens in place of a span: found by their token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

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


def count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens with which two texts begin alike, by bisection; called to find what of a text was read before."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def find_edits(kept: list[int], ids: list[int], answer: int) -> Edited | None:
    """Find the edits that turn a kept text into the beginning of a longer one: spans that go, or get other tokens.

    Called for a request's text. The cache of the kept text is then edited, and only new tokens are read. The longer text must
    have the end of the kept text; but from `answer` on, where the last answer begins, anything may be gone.

    Args:
        kept: tokens of the kept text.
        ids: of the longer one.
        answer: tokens of the kept text before its last answer.

    Returns:
        None if nothing was edited, a span would get more tokens than it had, or nothing of `ids` would be left to read.
    """
    at = there = count_common(kept, ids)  # places in `kept` and in `ids`, before which all is explained
    known = _index_runs(kept, there)
    spans = list[tuple[int, int, list[int]]]()
    while at < len(kept):
        found = _find_run(known, ids, at, there)
        if found is None:
            if at < answer:
                return None
            spans.append((at, len(kept), []))
            break
        stop, end = found  # in `kept` and in `ids`: the end of a difference, which moves back while tokens before it agree
        while stop > at and end > there and kept[stop - 1] == ids[end - 1]:
            stop, end = stop - 1, end - 1
        if end - there > stop - at:  # the new tokens take the positions of the old ones
            return None
        spans.append((at, stop, ids[there:end]))
        common = count_common(kept[stop:], ids[end:])
        at, there = stop + common, end + common
    return Edited(spans, there) if spans and there < len(ids) else None


def _index_runs(ids: list[int], start: int) -> dict[tuple[int, ...], list[int]]:
    """Return the places in a kept text, from `start` on, where each run of RUN tokens begins, ascending: for `_find_run`."""
    known: dict[tuple[int, ...], list[int]] = {}
    for index in range(start, len(ids) - RUN + 1):
        known.setdefault(tuple(ids[index : index + RUN]), []).append(index)
    return known


def _find_run(known: dict[tuple[int, ...], list[int]], ids: list[int], at: int, there: int) -> tuple[int, int] | None:
    """Return where a kept text and `ids` go on alike after a difference, a place in each; None if nowhere.

    known: places by run of RUN tokens, of `_index_runs`. at, there: where the difference begins, in each text.
    """
    for end in range(there, len(ids) - RUN + 1):
        begins = known.get(tuple(ids[end : end + RUN]), [])
        index = bisect_left(begins, at)
        if index < len(begins):
            return begins[index], end
    return None
