"""Supported versions of transformers and torch; checked before a model is touched, never at import."""

from __future__ import annotations

import functools
import re

from ..arch.upstream import CACHE
from ..errors import KVPatchError

TRANSFORMERS = "5.15", "6"  # from, to below; pyproject.toml says the same
TORCH = "2.10"
TESTED = {"transformers": "5.24", "torch": "2.15"}  # the newest minor releases that the tests have passed with
PEFT_BY_OLD_NAME = "0.21.2"  # the newest release whose prompt tuning looks for past_key_values alone
ENGINE = "5.19"  # the first release whose continuous batching can be put on a budget


@functools.lru_cache
def check_versions(transformers: str, torch: str) -> None:
    """Check the installed versions, for `patched`.

    Raises:
        KVPatchError: one is too old, or transformers is of a later major version; names the command that installs another.
    """
    oldest, newest = TRANSFORMERS
    if not int(newest) > _parse_release(transformers)[0] or _parse_release(transformers) < _parse_release(oldest):
        raise KVPatchError(
            f"kvpatch knows transformers {oldest} to {int(newest) - 1}.x; this is {transformers}: "
            f"pip install 'transformers>={oldest},<{newest}'"
        )
    if _parse_release(torch) < _parse_release(TORCH):
        raise KVPatchError(f"kvpatch knows torch {TORCH} and newer; this is {torch}: pip install 'torch>={TORCH}'")


def find_untested(transformers: str, torch: str) -> tuple[str, str]:
    """Return a sentence that names the versions above the newest tested, and the command that installs tested ones.

    `_find_target` adds them to errors about a model that cannot be patched. Two empty strings if no installed version, given as
    the arguments, is above the newest tested.
    """
    installed = {"transformers": transformers, "torch": torch}
    newer = {name: version for name, version in installed.items() if _parse_release(version)[:2] > _parse_release(TESTED[name])}
    said = [f"{name} {version} is newer than {TESTED[name]}, the newest tested" for name, version in newer.items()]
    below = [f"'{name}<{_find_next_release(TESTED[name])}'" for name in newer]
    return (f"This is untested: {' and '.join(said)}", f"pip install {' '.join(below)}") if newer else ("", "")


def _find_next_release(minor: str) -> str:
    """Return the minor release that follows another: 5.25 of 5.24."""
    major, number = _parse_release(minor)
    return f"{major}.{number + 1}"


def check_engine(transformers: str) -> None:
    """Raise KVPatchError for a version of transformers whose continuous batching cannot be put on a budget.

    `kvpatch serve` calls it before it loads a model, `init_continuous_batching` for each engine.
    """
    if _parse_release(transformers) < _parse_release(ENGINE):
        raise KVPatchError(
            f"Continuous batching under a budget needs transformers {ENGINE} or newer; this is {transformers}: "
            f"pip install 'transformers>={ENGINE},<{TRANSFORMERS[1]}'. Or use generate() with a padded batch."
        )


def check_prompt_tuning(peft: str) -> None:
    """Raise KVPatchError, for `_virtual_tokens`, for a PEFT that does not know transformers' cache argument `cache`.

    Such a PEFT puts its prompt before every new token.
    """
    if CACHE == "cache" and _parse_release(peft) <= _parse_release(PEFT_BY_OLD_NAME):
        raise KVPatchError(
            f"PEFT {peft} puts its tuned prompt before every generated token under transformers 5.24, without a patch too: "
            f"install a PEFT newer than {PEFT_BY_OLD_NAME}, or pip install 'transformers<5.24'."
        )


def _parse_release(version: str) -> tuple[int, ...]:
    """Parse the release: (5, 23, 0) of "5.23.0.dev0" or "5.23.0+cpu", since a development version has its release's API."""
    if not (release := re.match(r"\d+(\.\d+)*", version)):
        raise KVPatchError(
            f"{version!r} is no version number: install a release of transformers and torch, pip install 'transformers<6'"
        )
    return tuple(int(number) for number in release[0].split("."))
