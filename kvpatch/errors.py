"""The error types of the library, and a helper that suggests names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class InvalidError(Exception):
    """Invalid state of a cache, or invalid part of a saved one; the reader of the file adds its name to the message."""


class KVPatchError(ValueError):
    """Error of the caller, raised before anything is changed; the message names the parameter, its value and a remedy."""


def suggest(name: object, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'h2o'?"`` with the one of `known` that is spelt most like `name`, or "" if none is near."""
    near = find_nearest(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def find_nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the one of `known` that is spelt most like a mistyped `name`, for `suggest`, or None if none is near."""
    names = {_normalize_name(one): one for one in known}
    near = difflib.get_close_matches(_normalize_name(str(name)), names, n=1)
    return names[near[0]] if near else None


def match_name(name: object, known: Iterable[str]) -> str | None:
    """Return the one of `known` that a user's `name` means, in any case, with any hyphens, underscores and spaces; or None.

    Example:
        >>> match_name("Ada-KV", ["snapkv", "adakv"])
        'adakv'
    """
    if not isinstance(name, str):
        return None
    names = list(known)
    return name if name in names else {_normalize_name(one): one for one in names}.get(_normalize_name(name))


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).casefold()
