"""The one error type of the library, and the helper that words "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVPatchError(ValueError):
    """Raised before anything is changed; the message says what was given and what to type instead."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'h2o'?"`` for the nearest of `known`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class InvalidError(Exception):
    """A cache's state, or a file that is to hold one, contradicts itself; the words say where, who catches it what to do."""
