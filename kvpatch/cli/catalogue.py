"""Checks of names and choices on the command line, which import no torch and so answer at once."""

from __future__ import annotations

from typing import Any

from ..errors import KVPatchError, match_name, suggest
from ..policies.facts import FACTS
from ..policies.naming import split_combination
from ..policies.uses import find_use

BACKENDS = ("auto", "torch", "flash", "triton")

DEFAULT_POLICY, SERVER_POLICY = find_use("question").policy, find_use("server").policy
"""Policies where none is given: a file holds a text with its question; requests to a server are of all kinds."""


def check_calibration(name: str, options: dict[str, Any]) -> None:
    """Raise KVPatchError, before torch loads, if a policy needs a calibration (measured statistics) and `options` has none.

    `compare` and `make_policy` call it. Of a combination's name, such as "critical(q_filter)", the inner policy counts. An
    unknown name passes: `check_policy` refuses it.
    """
    policy = match_name(split_combination(name)[1], FACTS)
    if policy is None or "calibration" not in FACTS[policy].options or options.get("calibration") is not None:
        return
    command, file = ("learn", "learned") if policy == "learned" else ("calibrate", "calibration")
    raise KVPatchError(
        f"Policy {policy!r} needs a calibration of this model: run `kvpatch {command} MODEL FILE --out {file}.safetensors` "
        f"once, and give -o calibration={file}.safetensors."
    )


def check_choice(option: str, value: object, known: tuple[object, ...]) -> None:
    """Raise KVPatchError, before torch loads, if a command's option has a value outside `known`. None (not given) passes."""
    if value is not None and value not in known:
        names = [str(one) for one in known]
        raise KVPatchError(f"--{option}={value!r} must be one of {', '.join(names)}.{suggest(value, names)}")
