"""Compressed prefixes: texts that are read once, and begin any number of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..arch.upstream import CACHE
from ..errors import KVPatchError
from .cache import EvictingCache
from .pickling import Unpicklable

Tokens = tuple[int, ...]


class Prefix(Unpicklable):
    """The compressed cache of a text that others begin with, made by `Patch.prefix()`; nothing changes it.

    Pass it as `past_key_values`, for one row or several, beams and samples. Texts share its memory; each gets a copy when its
    first own tokens are read, since these evict. If the model has other weights or another adapter by then, the prefix is
    refused; `Patch.prefix()` and continuous batching read its tokens anew.

    Attributes:
        ids: the tokens.
        training: the model was in training mode, so that its dropout is in what was read.
        copies: made so far, for texts that began with it.
    """

    def __init__(self, ids: Tokens, cache: EvictingCache, training: bool) -> None:
        self.ids, self.copies, self.model_stamp, self.training = ids, 0, cache.model_stamp, training
        self._cache = cache

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Prefix of {len(self)} tokens: {self.nbytes} bytes, {self.copies} texts began with it>"

    if not TYPE_CHECKING:  # for type checkers every attribute would exist

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"A Prefix has no {name!r}: it is taken as {CACHE} inside a block of its model. Its copy() is a cache."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values, however many texts wait to begin with it."""
        return self._cache.nbytes

    def positions(self, layer: int) -> Tensor:
        """Positions kept, as EvictingCache.positions returns them."""
        return self._cache.positions(layer)

    def held(self, layer: int) -> Tensor:
        """Count the tokens that each KV head keeps, int64 [1, Hkv]."""
        return self._cache.held(layer)

    def copy(self) -> EvictingCache:
        """Return a copy of the cache, for a text that begins with this prefix and then reads its other tokens; count it."""
        new = self._cache.clone()
        self.copies += 1
        return new


class Prefixes:
    """The prefixes of a patch, by their tokens: to iterate over, to count with len(), and to `drop` when they are over.

    renew: returns a prefix as it is, or read anew if the model has changed since.
    """

    def __init__(self) -> None:
        self._by_ids: dict[Tokens, Prefix] = {}
        self.renew: Callable[[Prefix], Prefix] | None = None

    def __iter__(self) -> Iterator[Prefix]:
        return iter(list(self._by_ids.values()))

    def __len__(self) -> int:
        return len(self._by_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all."""
        return sum(one.nbytes for one in self)

    def get(self, ids: Tokens) -> Prefix | None:
        """Return the prefix of exactly these tokens, if it was read; anew if the model has changed since."""
        return self._keep_fresh(self._by_ids.get(ids))

    def add(self, prefix: Prefix) -> Prefix:
        """Keep a prefix in place of an earlier one with the same tokens."""
        self._by_ids[prefix.ids] = prefix
        return prefix

    def longest(self, ids: Sequence[int]) -> Prefix | None:
        """Return the longest prefix that these tokens begin with and go beyond; read anew if the model has changed since."""
        beginnings = [prefix for prefix in self if len(prefix) < len(ids) and prefix.ids == tuple(ids[: len(prefix)])]
        return self._keep_fresh(max(beginnings, key=len, default=None))

    def _keep_fresh(self, prefix: Prefix | None) -> Prefix | None:
        """Return a prefix that was looked up, or, if the model has changed since it was read, a new one, which replaces it.

        `get` and `longest` call it, as a text is to begin with the prefix. `renew`: reads it anew if need be.
        """
        if prefix is None or self.renew is None:
            return prefix
        new = self.renew(prefix)
        return prefix if new is prefix else self.add(new)

    def drop(self, prefix: Prefix) -> None:
        """Forget a prefix: continuous batching starts no further request from it. Running requests, and the object, keep it.

        Raises:
            KVPatchError: this patch does not keep that prefix.
        """
        if self._by_ids.get(prefix.ids) is not prefix:
            raise KVPatchError("This prefix is not kept by this patch: drop one of patch.prefixes.")
        del self._by_ids[prefix.ids]
