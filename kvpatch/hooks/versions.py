"""Supported versions of transformers and torch; checked before a model is touched, never at import."""

from __future__ import annotations

import functools
import re

from ..errors import KVPatchError
from ..upstream import CACHE

TRANSFORMERS = "5.15", "6"  # from, to below; pyproject.toml says the same
TORCH = "2.10"
PEFT_BY_OLD_NAME = "0.21.2"  # the newest release whose prompt tuning looks for past_key_values alone
ENGINE = "5.19"  # the first release whose continuous batching can be put on a budget


@functools.lru_cache
def check_versions(transformers: str, torch: str) -> None:
    """Raise for versions that are too old, and for an untested major version of transformers.

    Raises:
        KVPatchError: names the command that installs a supported version.
    """
    oldest, newest = TRANSFORMERS
    if not int(newest) > _release(transformers)[0] or _release(transformers) < _release(oldest):
        raise KVPatchError(
            f"kvpatch knows transformers {oldest} to {int(newest) - 1}.x; this is {transformers}: "
            f"pip install 'transformers>={oldest},<{newest}'"
        )
    if _release(torch) < _release(TORCH):
        raise KVPatchError(f"kvpatch knows torch {TORCH} and newer; this is {torch}: pip install 'torch>={TORCH}'")


def check_engine(transformers: str) -> None:
    """Raise KVPatchError for a version whose continuous batching cannot be put on a budget."""
    if _release(transformers) < _release(ENGINE):
        raise KVPatchError(
            f"Continuous batching under a budget needs transformers {ENGINE} or newer; this is {transformers}: "
            f"pip install 'transformers>={ENGINE},<{TRANSFORMERS[1]}'. Or use generate() with a padded batch."
        )


def check_prompt_tuning(peft: str) -> None:
    """Raise KVPatchError for a PEFT whose prompts are put before every token, since it looks for the cache by its old name."""
    if CACHE == "cache" and _release(peft) <= _release(PEFT_BY_OLD_NAME):
        raise KVPatchError(
            f"PEFT {peft} puts its tuned prompt before every generated token under transformers 5.24, without a patch too: "
            f"install a PEFT newer than {PEFT_BY_OLD_NAME}, or pip install 'transformers<5.24'."
        )


def _release(version: str) -> tuple[int, ...]:
    """Parse the release: (5, 23, 0) of "5.23.0.dev0" or "5.23.0+cpu", since a development version has its release's API."""
    if not (release := re.match(r"\d+(\.\d+)*", version)):
        raise KVPatchError(
            f"{version!r} is no version number: install a release of transformers and torch, pip install 'transformers<6'"
        )
    return tuple(int(number) for number in release[0].split("."))
