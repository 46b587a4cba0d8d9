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

    in_progress: changes that have begun and not ended, by kind: "change", or "stale" (`catch_up`). n_changes: how many have
    begun so far. was_read: the object was copied, saved, joined or reported on.
    """

    in_progress: dict[str, list[str]]
    n_changes: int
    was_read: bool

    @property
    def unfinished(self) -> bool:
        """True if a change was begun and not ended: it is running in some thread, or was interrupted."""
        return bool(self.in_progress)

    def refuse_unfinished(self) -> None:
        """Raise KVPatchError if a change of the cache was begun and has not ended."""
        if self.in_progress:
            raise KVPatchError(_UNFINISHED.format(next(iter(self.in_progress.values()))[0]))

    def begin_change(self, what: str) -> None:
        """Mark that `what` has begun: a pass (`passes.begin`), or a change of the cache (`changing`).

        `end_change` clears the mark. An interrupt leaves it, and then only reset() clears it.

        Raises:
            KVPatchError: another operation is running, or was not finished.
        """
        self.refuse_unfinished()
        mine = [what]
        if self.in_progress.setdefault("change", mine) is not mine:  # atomic: of two threads one comes first
            raise KVPatchError(_UNFINISHED.format(what))
        self.n_changes += 1  # reading() compares it

    def end_change(self) -> None:
        """Clear the mark: the operation ended, or was refused before anything changed."""
        self.in_progress.pop("change", None)

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
        self.refuse_unfinished()
        changes, self.was_read = self.n_changes, True  # was_read: the user did something with the cache
        yield
        if self.unfinished or self.n_changes != changes:
            raise KVPatchError(f"Another thread changed this cache during {what}: give each thread a cache of its own.")
