"""Checks of names and choices on the command line, which import no torch and so answer at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any

from ..errors import KVPatchError, named, suggest
from ..policies.facts import COMBINATIONS, FACTS
from ..policies.uses import find_use

SCHEDULES = ("prompt", "decode", "both")
POSITIONS = ("original", "renumbered")
BACKENDS = ("auto", "torch", "flash", "triton")
BITS = (16, 8, 4)

DEFAULT_POLICY, SERVER_POLICY = find_use("question").policy, find_use("server").policy
"""Policies where none is given: a file holds a text with its question; requests to a server are of all kinds."""

_COMBINED = re.compile(rf"\s*(?:{'|'.join(COMBINATIONS)})\((.+)\)\s*", re.IGNORECASE)


def _registered() -> Collection[str]:
    """Return the names of all registered policies if the library has been imported, by a program that registers its own."""
    presets = sys.modules.get("kvpatch.policies.presets")
    return () if presets is None else presets.list_policies()


def check_policy(name: str, options: dict[str, Any] | None = None) -> None:
    """Refuse a misspelt policy or option without importing torch; the library checks the rest.

    Raises:
        KVPatchError: no policy of this name, or it has none of the `options` of that name.
    """
    if (combined := _COMBINED.fullmatch(name)) is not None:
        return check_policy(combined[1])
    if (known_as := named(name, FACTS)) is None:
        if name in _registered():
            return None
        raise KVPatchError(f"Unknown policy {name!r}.{suggest(name, FACTS)} Known: {', '.join(FACTS)}.")
    known = FACTS[known_as].list_options()
    for option in options or ():
        if option not in known:
            raise KVPatchError(
                f"Policy {known_as!r} has no option {option!r}.{suggest(option, known)} It has: {', '.join(known)}."
            )
    return None


def check_calibration(name: str, options: dict[str, Any]) -> None:
    """Refuse a policy that needs a calibration and got none. Raises KVPatchError."""
    while (combined := _COMBINED.fullmatch(name)) is not None:
        name = combined[1]
    known_as = named(name, FACTS)
    if known_as is None or "calibration" not in FACTS[known_as].options or options.get("calibration") is not None:
        return
    command, file = ("learn", "learned") if known_as == "learned" else ("calibrate", "calibration")
    raise KVPatchError(
        f"Policy {known_as!r} needs a calibration of this model: run `kvpatch {command} MODEL FILE --out {file}.safetensors` "
        f"once, and give -o calibration={file}.safetensors."
    )


def check_choice(option: str, value: object, known: tuple[object, ...]) -> None:
    """Raise KVPatchError unless the option is not given or its value is one of `known`."""
    if value is not None and value not in known:
        names = [str(one) for one in known]
        raise KVPatchError(f"--{option}={value!r} must be one of {', '.join(names)}.{suggest(value, names)}")
