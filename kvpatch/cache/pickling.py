"""Caches are copied, and saved in files of their own; pickle, and torch.save with it, is refused in words."""

from __future__ import annotations

import copy
from typing import NoReturn, TypeVar

from ..errors import KVPatchError

_Object = TypeVar("_Object")


class Unpicklable:
    """An object that copy.copy and copy.deepcopy copy as any other, and that is not pickled."""

    def __copy__(self: _Object) -> _Object:
        """Return a copy with the same attributes; copy.copy's own way would call `__reduce_ex__`, which refuses."""
        new: _Object = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __deepcopy__(self: _Object, memo: dict[int, object]) -> _Object:
        new = memo[id(self)] = copy.copy(self)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickle, torch.save and multiprocessing, which call this."""
        raise KVPatchError(
            f"This {type(self).__name__} cannot be pickled, nor saved by torch.save or sent to another process: write a "
            "cache by patch.save_cache(cache, path), a prefix by patch.save_cache(prefix.copy(), path), and read it by "
            "patch.load_cache(path)."
        )
