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
    """Count the tokens that two texts begin with alike, which need not be read again, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def find_edits(kept: list[int], ids: list[int], answer: int) -> Edited | None:
    """Find the spans of a kept text that have to go, or to get other tokens, so that a longer text begins with it.

    Asked for a request's text: the kept one's cache is then edited, so that only what is new is read. The longer text must
    have what ends the kept one; but from `answer` on, its last answer, anything may be gone. Pure.

    Args:
        kept: tokens of the kept text.
        ids: of the longer one.
        answer: tokens of the kept text before its last answer.

    Returns:
        None if there are no such spans, some tokens have no room in theirs, or nothing of `ids` would be left to read.
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
        stop, end = found
        while stop > at and end > there and kept[stop - 1] == ids[end - 1]:
            stop, end = stop - 1, end - 1
        if end - there > stop - at:
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
    """Return where two texts go on alike after a difference, in the kept text and in `ids`; None if nowhere. Pure.

    known: where the kept text's runs begin. at, there: where the texts differ.
    """
    for end in range(there, len(ids) - RUN + 1):
        begins = known.get(tuple(ids[end : end + RUN]), [])
        index = bisect_left(begins, at)
        if index < len(begins):
            return begins[index], end
    return None
