"""The choice of a request's pages among the free ones. Needs no vLLM."""

from __future__ import annotations


def choose_pages(free: bytes, count: int) -> list[int]:
    """Return `count` free pages for a new request: the first that follow each other; if there are none, the first free.

    `allocate_new_blocks` calls it. Keys in pages that follow each other are read in place (cache/paged.py); others are copied
    at each step on a CPU. free: a byte for each page, 1 if it is free, else 0.
    """
    first = free.find(b"\x01" * count)
    if first >= 0:
        return list(range(first, first + count))
    return [page for page, one in enumerate(free) if one][:count]
