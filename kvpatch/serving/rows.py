"""The rows of a decode step: caches of several requests, joined and split as requests come, pause and end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.cache import EvictingCache


@dataclass
class RequestRows:
    """A cache whose rows are these requests, in this order; None for one that has ended."""

    names: list[str | None]
    cache: EvictingCache

    @property
    def alive(self) -> list[str]:
        """Names of the requests that have not ended: after `gather`, of all rows."""
        return [name for name in self.names if name is not None]


class RowPool:
    """All requests that decode: one RequestRows, or several where an engine lets some of them wait.

    Rows are moved in `gather` alone, which runs in the stream of a pass: whoever ends a request may be in another.

    order: sorts the requests' names where they are joined, so that rows lie as their memory does; None: as they come.
    """

    def __init__(self, order: Callable[[str], Any] | None = None) -> None:
        self.parts: list[RequestRows] = []
        self.order = order

    def add(self, name: str, cache: EvictingCache) -> None:
        """Add a request whose prompt was read, with its cache of one row; `gather` will join that to others."""
        self.parts.append(RequestRows([name], cache))

    def copy_row(self, name: str) -> EvictingCache | None:
        """Return a copy of one decoding request's row, for `RequestPool.keep` at its end; None if it does not decode yet."""
        for part in self.parts:
            if name in part.names:
                return part.cache.select_rows(part.names.index(name))
        return None

    def drop(self, name: str) -> None:
        """Mark a request's row as ended; the next `gather` removes it. A cache of ended rows alone is dropped at once.

        `free_blocks` and, in vLLM, `_drop_ended` call it. Nothing happens if the request does not decode.
        """
        for part in self.parts:
            if name in part.names:
                part.names[part.names.index(name)] = None
                if not any(part.names):
                    self.parts.remove(part)
                return

    def gather(self, names: Collection[str]) -> RequestRows:
        """Return these requests as the rows of one cache, in the order of its `names`.

        `next_pass` calls it for each decode step. Caches are joined and split only if the last step had other requests: rows of
        requests that do not take part are split off to wait, and rows of requests that have ended are dropped. Each of `names`
        must have been added. In vLLM `_step_requests` calls it.
        """
        inside, outside = list[RequestRows](), list[RequestRows]()
        for part in self.parts:
            decodes = [name is not None and name in names for name in part.names]
            waits = [name is not None and name not in names for name in part.names]
            for mask, selected in ((decodes, inside), (waits, outside)):
                if any(mask):
                    selected.append(part if all(mask) else _select_rows(part, mask))
        self.parts = outside
        if len(inside) > 1:
            joined = EvictingCache.concatenate([part.cache for part in inside], consume=True)  # consume: each is freed
            inside = [self._order_rows(RequestRows([name for part in inside for name in part.names], joined))]
        self.parts.append(inside[0])
        return inside[0]

    def _order_rows(self, rows: RequestRows) -> RequestRows:
        """Return joined rows sorted by `self.order`, for `gather`; as they are if it is None.

        Moves the cache's rows in place.
        """
        if self.order is None or (names := sorted(rows.alive, key=self.order)) == rows.alive:
            return rows
        rows.cache.batch_select_indices(torch.tensor([rows.names.index(name) for name in names], device="cpu"))
        return RequestRows([*names], rows.cache)


def _select_rows(part: RequestRows, here: Sequence[bool]) -> RequestRows:
    """Return a copy of the rows for which `here` is True, as a cache of their own; for `RowPool.gather`."""
    index = [row for row, one in enumerate(here) if one]
    return RequestRows([part.names[row] for row in index], part.cache.select_rows(index))
