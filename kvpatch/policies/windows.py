"""Windows of a layer's own: which tokens a query sees. A window is a number of tokens; an int slides, a Chunk begins anew."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Place = TypeVar("Place", int, Tensor)


class Chunk(int):
    """Size in tokens of the chunks that a layer cuts a text into: a query sees the tokens of its own chunk alone [Llama 4].

    Positions t // size are alike in a chunk, and its first query sees nothing but itself. An int stands for a window that
    slides: a query sees as many tokens, itself included, wherever it is.
    """


def find_oldest(window: int, t: Place) -> Place:
    """Return the first position that the query at t sees, below 0 where a window reaches beyond the text."""
    return t // int(window) * int(window) if isinstance(window, Chunk) else t - window + 1


def keep_in_window(seen: Tensor, window: int | None, at: Tensor, rows: Tensor) -> Tensor:
    """Return `seen`, False also for tokens at positions `at` before the sliding window of queries at positions `rows`."""
    return seen if window is None else seen & (at >= find_oldest(window, rows))


def find_end(window: int, i: Place) -> Place:
    """Return the position of the first query that no longer sees the token at i."""
    return (i // int(window) + 1) * int(window) if isinstance(window, Chunk) else i + window
