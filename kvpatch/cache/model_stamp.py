"""A stamp of the model that has read a cache, by which a change of it is noticed before the cache goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

BASE = "none"  # in place of an adapter's name
Difference = tuple[str, object, object]


@dataclass(frozen=True, eq=False)
class ModelStamp:
    """A decoder at one moment: which adapters act, and what can be seen of its weights without reading them all.

    decoder: a weak reference to it. adapters: names of the adapters that act, or one for each row if rows have their own
    (PEFT's adapter_names). acting: hash of the adapters by module, with their scales; 0 if rows have their own. layout: hash of
    the weights' dtypes and shapes. versions: hash of torch's counters of changes in place. sample: the bytes of each weight's
    first numbers, by device and dtype.
    """

    decoder: weakref.ref[Any]
    adapters: tuple[str, ...]
    acting: int
    layout: int
    versions: int
    sample: tuple[Tensor, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> ModelStamp:
        """Return the stamp itself: it is frozen, and copies of a cache were read by the same model."""
        return self

    def differs(self, now: ModelStamp) -> Difference | None:
        """Compare the model that has read a cache with `now`, the stamp of the model that is to go on.

        `note_reader` calls it before a pass, `_check_reader` as caches are joined. Returns what differs as (name, there,
        here); None if nothing visible does.
        """
        if now is self:
            return None
        # names of LoRA adapters; _of_each_row(): one for each row of the larger batch
        for adapter, adapter_now in zip(*_of_each_row(self.adapters, now.adapters), strict=True):
            if adapter != adapter_now:
                return "adapter", adapter, adapter_now
        # acting: hash of the adapters' modules and scales; 0 if rows have different adapters
        if self.acting and now.acting and self.acting != now.acting:
            return "scale or place of the adapter", "one", "another"
        if self.layout != now.layout:
            return "dtype or shape of weights", "one", "another"
        # versions: torch's counters of changes in place, comparable only for one and the same decoder object
        same = self.decoder() is now.decoder()  # weak references
        if (same and self.versions != now.versions) or not _are_equal(self.sample, now.sample):
            return "weights", "as they were", "changed since" if same else "another model's"
        return None

    def with_adapters(self, adapters: tuple[str, ...]) -> ModelStamp:
        """Return the stamp of rows that these adapters acted on; if they are others than before, their scales are unknown."""
        return self if adapters == self.adapters else replace(self, adapters=adapters, acting=0)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> ModelStamp:
        """Return the stamp of a cache's rows (who read them), for `_map_rows`: `change` selects, reorders or repeats them."""
        if len(self.adapters) == 1:  # the same for all rows
            return self
        rows = change(torch.arange(len(self.adapters), device="cpu")).tolist()
        return self.with_adapters(tuple(self.adapters[row] for row in rows))

    @staticmethod
    def join_parts(stamps: Sequence[ModelStamp | None], counts: Sequence[int]) -> ModelStamp | None:
        """Return one stamp for caches of `counts` rows each, which one model read, perhaps under several adapters.

        `_join_caches` calls it. None where the adapter of some row is not known, unless all known ones are the same.
        """
        known = [stamp for stamp in stamps if stamp is not None]
        if len({stamp.adapters for stamp in known}) == 1 and len(known[0].adapters) == 1:  # the same for all rows
            return known[0]
        if len(known) < len(stamps):
            return None
        pairs = zip(known, counts, strict=True)
        rows = (name for stamp, B in pairs for name in (stamp.adapters if len(stamp.adapters) == B else stamp.adapters * B))
        return known[0].with_adapters(tuple(rows))


def _of_each_row(there: tuple[str, ...], here: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the adapters of two batches, one for each row of the larger: a text's beams have the adapter of the text."""
    B = max(len(there), len(here))
    return tuple(one if len(one) == B else tuple(one[row * len(one) // B] for row in range(B)) for one in (there, here))  # type: ignore[return-value]


def _are_equal(there: Sequence[Tensor], here: Sequence[Tensor]) -> bool:
    """Tell if two samples of weights are equal, for `differs`. The model may have been moved to another device in between."""
    pairs = [(old, new) for old, new in zip(there, here, strict=False)]
    alike = len(there) == len(here) and all(old.shape == new.shape for old, new in pairs)
    return alike and all(torch.equal(old, new.to(old.device)) for old, new in pairs)
