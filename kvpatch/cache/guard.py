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
    """Guard of a mutable object.

    operations: changes that have begun and not ended, by kind. changes: how many have begun so far. was_read: the object was
    copied, saved, joined or reported on.
    """

    operations: dict[str, list[str]]
    changes: int
    was_read: bool

    @property
    def unfinished(self) -> bool:
        """True if a change was begun and not ended: it is running in some thread, or was interrupted."""
        return bool(self.operations)

    def check_finished(self) -> None:
        """Raise KVPatchError if a change of the cache was begun and has not ended."""
        if self.operations:
            raise KVPatchError(_UNFINISHED.format(next(iter(self.operations.values()))[0]))

    def begin_change(self, what: str) -> None:
        """Mark that `what` has begun: a pass (`passes.begin`), or a change of the cache (`changing`).

        `end_change` clears the mark. An interrupt leaves it, and then only reset() clears it.

        Raises:
            KVPatchError: another operation is running, or was not finished.
        """
        self.check_finished()
        mine = [what]
        if self.operations.setdefault("change", mine) is not mine:  # atomic: of two threads one comes first
            raise KVPatchError(_UNFINISHED.format(what))
        self.changes += 1  # reading() compares it

    def end_change(self) -> None:
        """Clear the mark: the operation ended, or was refused before anything changed."""
        self.operations.pop("change", None)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Run a block of a method that changes the cache, such as `forget` or `crop`; it is marked as unfinished meanwhile.

        An exception leaves the mark, so that the next use raises an error.
        """
        self.begin_change(what)
        yield
        self.end_change()

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Run a block that copies (`clone`), saves or joins the cache; raise if another thread changes it meanwhile."""
        self.check_finished()
        changes, self.was_read = self.changes, True  # was_read: the user did something with the cache
        yield
        if self.unfinished or self.changes != changes:
            raise KVPatchError(f"Another thread changed this cache during {what}: give each thread a cache of its own.")
