"""The error types of the library, and the helper that words "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InvalidError(Exception):
    """A state that no cache can be in, or a part of a file that describes one, in words; whoever reads the file names it."""


class KVPatchError(ValueError):
    """Raised before anything is changed; the message says what was given and what to type instead."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'h2o'?"`` for the nearest of `known`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
