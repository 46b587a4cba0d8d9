"""The error types of the library, and a helper that suggests names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InvalidError(Exception):
    """Invalid state of a cache, or invalid part of a saved one; the reader of the file adds its name to the message."""


class KVPatchError(ValueError):
    """Error of the caller, raised before anything is changed; the message names the parameter, its value and a remedy."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'h2o'?"`` with the nearest of `known`, or an empty string if none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
