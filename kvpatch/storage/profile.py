"""Profiles: a policy with its options and a budget for each layer, tuned on a text, in a JSON file in which nothing can run.

The file is not trusted: its size, its names and its values are checked when it is read, the model where it is used. Its
checksum detects accidents and is no signature.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import InvalidError, KVPatchError
from ..policies import Policy, get_policy
from ..policies.budgets import check_k
from .file import checksum, readable, verify_checksum, write_whole
from .header import is_count, parse
from .schema import table

FORMAT = "kvpatch profile 1"
LARGEST = 1 << 22
"""Bytes of a file, at most: a table of every head of a large model takes a hundredth."""
MEASURED = ("tokens", "pieces", "tolerance", "kl", "share", "unseen_kl")
_LONGEST = 200  # letters of a policy's name, combinations included
_NAMES = ("format", "model", "policy", "options", "k", "measured")


@dataclass(frozen=True)
class Profile:
    """A policy and a budget for each layer, as `kvpatch tune` writes them and `load_profile` reads them.

    Attributes:
        model: values that identify the model.
        policy: its name, such as "roco" or "adaptive(roco)".
        options: of the policy, those that differ from its defaults.
        k: of each layer, as `patched` takes a list: a share of the prompt or tokens, or a list of these, one per KV head; one
            number where the policy divides it over the layers itself.
        measured: tokens and pieces of the text, the tolerance, the mean KL from the full cache in nats per token (`kl`; on
            pieces that the search did not use, `unseen_kl`, or None), and the share of the full cache's bytes.

    Example:
        profile = kvpatch.load_profile("profile.json")
        print(profile.policy, profile.k, profile.measured["share"])
        with kvpatch.patched(model, profile=profile):
            model.generate(**inputs)
    """

    model: Mapping[str, Any]
    policy: str
    options: Mapping[str, Any]
    k: tuple[Any, ...] | float
    measured: Mapping[str, Any]

    def alone(self, given: Mapping[str, object]) -> None:
        """Raise KVPatchError if arguments of `patched` that the profile decides are given too."""
        for name, value in given.items():
            raise KVPatchError(
                f"{name}={value!r:.60} is given beside profile=, which decides policy, k, schedule and the policy's options: "
                f"leave {name} out, or leave profile out and give policy and k."
            )


def save_profile(profile: Profile, path: str | PathLike[str]) -> None:
    """Write a profile to the file `path`.

    Raises:
        KVPatchError: the file cannot be written.
    """
    about = {
        "format": FORMAT,
        "model": dict(profile.model),
        "policy": profile.policy,
        "options": dict(profile.options),
        "k": list(profile.k) if isinstance(profile.k, tuple) else profile.k,
        "measured": dict(profile.measured),
    }
    text = json.dumps(about | {"checksum": checksum(_described(about), {})}, indent=1) + "\n"
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"), "profile")


def _described(about: dict[str, Any]) -> str:
    """Return the text of which the checksum is."""
    return json.dumps(about, sort_keys=True)


def opened(profile: object) -> Profile:
    """Return a Profile, also of a file. Raises KVPatchError for anything else, and as `load_profile`."""
    if isinstance(profile, Profile):
        return profile
    if not isinstance(profile, str | PathLike) or not str(profile):
        raise KVPatchError(f"profile={profile!r:.60} is no profile: give the file that `kvpatch tune` wrote.")
    return load_profile(profile)


def load_profile(path: str | PathLike[str]) -> Profile:
    """Read a profile that `kvpatch tune` wrote.

    Args:
        path: the file.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or no profile.

    Example:
        profile = kvpatch.load_profile("profile.json")
        with kvpatch.patched(model, profile=profile):
            model.generate(**inputs)
    """
    if not isinstance(path, str | PathLike) or not str(path):
        raise KVPatchError(f"path={path!r} is no path: give the file that `kvpatch tune` wrote.")
    with readable(path, "profile", "`kvpatch tune`", "Make it anew with `kvpatch tune`."):
        about = _about(_text(Path(path)))
        return _made(about)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise InvalidError(f"it has more than {LARGEST:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidError("it is no text") from None


def _about(text: str) -> dict[str, Any]:
    """Return the file's values, of the right kinds."""
    about = parse(text)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InvalidError(f"it is not of this version of kvpatch ({FORMAT!r})")
    about = table("it", about, (*_NAMES, "checksum"))
    given = about.pop("checksum")
    verify_checksum(given, _described(about), {})
    model, options = about["model"], about["options"]
    if not isinstance(model, dict) or not all(isinstance(value, str | int) for value in model.values()):
        raise InvalidError("it names no model")
    if not isinstance(about["policy"], str) or len(about["policy"]) > _LONGEST or not isinstance(options, dict):
        raise InvalidError("it names no policy, or no options")
    for name, number in table("measured", about["measured"], MEASURED).items():
        count = name in ("tokens", "pieces")
        if not (is_count(number, least=1) if count else _is_number(number) or (number is None and name == "unseen_kl")):
            raise InvalidError(f"measured says {name} is {number!r:.40}")
    return about


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _made(about: dict[str, Any]) -> Profile:
    """Return the profile, if policy, options and budgets are some that there are."""
    given = about["options"].items()
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
    if "schedule" in options:
        raise InvalidError("its options have a schedule, which is no option of a policy")
    try:
        k = _sizes(about["k"], about["model"])
        get_policy(about["policy"]).with_options(**options)
    except KVPatchError as error:
        raise InvalidError(str(error).rstrip(".")) from error
    return Profile(about["model"], about["policy"], options, k, about["measured"])


def _sizes(k: object, model: Mapping[str, Any]) -> tuple[Any, ...] | float:
    if isinstance(k, int | float):
        check_k(k, f"its k={k!r}")
        return k
    if not isinstance(k, list) or len(k) != model.get("layers"):
        shown = f"has {len(k)} entries" if isinstance(k, list) else "is no list"
        raise InvalidError(f"its k {shown}, where one for each of {model.get('layers')!r:.20} layers belongs")
    for layer, sizes in enumerate(k):
        if sizes == []:
            raise InvalidError(f"its k[{layer}] is empty")
        for one in sizes if isinstance(sizes, list) else [sizes]:
            if not isinstance(one, int | float):
                raise InvalidError(f"its k[{layer}] holds {one!r:.40}, which is neither tokens nor a share")
            check_k(one, f"its k[{layer}]={one!r}")
    return tuple(k)


def changed(name: str, policy: Policy) -> dict[str, Any]:
    """Return the options in which a policy differs from the one that a name gives, without that which generate() sets."""
    own = get_policy(name).options()
    others = {option: value for option, value in policy.options().items() if option in own and value != own[option]}
    others.pop("generation_length", None)
    return others
