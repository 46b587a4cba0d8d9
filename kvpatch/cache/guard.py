"""Detects interrupted or concurrent mutation; the next use raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import KVPatchError

_UNFINISHED = (
    "An earlier {} of this cache did not finish, so it is incomplete (or another thread is using it): start again with a new "
    "cache, one per thread, or reset() this one."
)


class MutationGuard:
    """marks: what was begun and has not ended. changes: how often something was begun."""

    marks: dict[str, list[str]]
    changes: int

    @property
    def unfinished(self) -> bool:
        """Whether a change was begun that has not ended: by a thread that is at it, or by one that was interrupted."""
        return bool(self.marks)

    def check_whole(self) -> None:
        """Raise KVPatchError where the cache is unfinished."""
        if self.marks:
            raise KVPatchError(_UNFINISHED.format(next(iter(self.marks.values()))[0]))

    def claim(self, what: str) -> None:
        """Mark that `what` is being done. An interrupt leaves the mark, and then only reset() takes it away.

        Raises:
            KVPatchError: something is being done, or was not finished.
        """
        self.check_whole()
        mine = [what]
        if self.marks.setdefault("change", mine) is not mine:  # in one step: of two threads one comes first
            raise KVPatchError(_UNFINISHED.format(what))
        self.changes += 1

    def release(self) -> None:
        """What was claimed is done, or was refused before anything changed."""
        self.marks.pop("change", None)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """`claim`, and `release` where the block ends well."""
        self.claim(what)
        yield
        self.release()

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Several threads may read; a change in the meantime is an error, for what was read is torn."""
        self.check_whole()
        changes = self.changes
        yield
        if self.unfinished or self.changes != changes:
            raise KVPatchError(f"Another thread changed this cache during {what}: give each thread a cache of its own.")
