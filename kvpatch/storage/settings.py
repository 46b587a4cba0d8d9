"""Settings: a policy's name, a budget and options in one object, and in a JSON file that can be read and edited.

The file is not trusted: its size, its names and its values are checked when it is read. Nothing in it can run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InvalidError, KVPatchError, suggest
from ..policies import Mass, Policy, Share, Threshold, get_policy
from ..policies.budgets import Rule, as_python, is_list, parse_k
from .kinds import SETTINGS, check_names

HALF = float("0.5")
"""Default of `k` in functions that also take Settings: `k is HALF` tells that the caller gave none, since 0.5 is not HALF."""
LARGEST = 1 << 22
"""Bytes of a file, at most: a table of every head of a large model takes a hundredth."""
OF_PATCH = ("bits", "block", "schedule", "positions", "backend", "seed", "strict")
"""Arguments of `patched` itself that decide what is kept, which the command line and the harness take too; not the policy's."""
RULES = {rule.__name__: rule for rule in (Mass, Share, Threshold)}
"""Budgets that follow the text, by the names that they have in a file."""
_LONGEST = 200  # letters of a policy's name, combinations included
_DEEPEST = 3  # lists in lists


@dataclass(frozen=True)
class Settings:
    """A policy, its budget and further arguments of `patched`, which take the place of policy and k wherever these are given.

    Lists become tuples, and texts such as k="50%" numbers, so that what is loaded equals what was saved.

    Attributes:
        policy: a name of `list_policies()`, or a combination such as "critical(h2o)".
        k: the budget, as `patched` takes it: a share of the prompt, tokens, bytes such as "2GiB", a list of these with one per
            layer, a table `k[layer][head]`, or Share, Mass or Threshold.
        options: keyword arguments of `patched` by name: bits, block, schedule, positions, backend, seed, strict, and options of
            the policy such as window. Numbers, texts, truth values, None and lists of these; what no file holds, such as
            `calibration=`, is given beside the Settings.

    Raises:
        KVPatchError: an unknown policy or option, a value that the policy refuses, or one that JSON cannot hold.

    Example:
        settings = kvpatch.Settings("snapkv", k=0.3, options={"window": 16})
        settings.save("settings.json")
        with kvpatch.patched(model, kvpatch.Settings.load("settings.json")):
            model.generate(**inputs, max_new_tokens=256)
    """

    policy: str
    k: Any = 0.5
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check policy and options, and convert k and options to the form that a file holds; see Raises in the class."""
        if not isinstance(self.policy, str) or len(self.policy) > _LONGEST:
            shown = f"={self.policy!r:.60}" if isinstance(self.policy, str) else f" of type {type(self.policy).__name__}"
            raise KVPatchError(
                f"policy{shown} is no name that a file can hold: give one of list_policies() or a combination "
                "such as 'critical(h2o)', and the policy's options in options=."
            )
        if not isinstance(self.options, Mapping):
            raise KVPatchError(f"options={self.options!r:.60} is no dict: give names and values, such as {{'window': 16}}.")
        object.__setattr__(self, "k", _normalize_budget(self.k, "k"))
        object.__setattr__(self, "options", {name: _normalize_option(name, value) for name, value in self.options.items()})
        self.build_policy()

    def build_policy(self) -> Policy:
        """Return the policy with its options and the schedule, without a budget; Settings are checked by this when made.

        Raises:
            KVPatchError: an unknown policy or option, or a value that the policy refuses.
        """
        policy = get_policy(self.policy)
        known = (*OF_PATCH, *policy.options())
        for name in self.options:
            if name not in known:
                raise KVPatchError(
                    f"Settings with policy {policy.name!r} have no option {name!r}.{suggest(name, known)} They have: "
                    f"{', '.join(known)}."
                )
        of_policy = {name: value for name, value in self.options.items() if name not in OF_PATCH}
        return policy.with_options(self.options.get("schedule"), **of_policy)

    def add_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return policy, k and options as keyword arguments of `patched`, which calls it through `_takes_settings`.

        given: what the call has beside the Settings.

        Raises:
            KVPatchError: `given` has k, or an option that the Settings have.
        """
        if "k" in given:
            raise KVPatchError(
                f"k={given['k']!r:.60} is given beside Settings with k={self.k!r:.60}: give k in the Settings, or beside a "
                "policy's name, not both."
            )
        for name in given:
            if name in self.options:
                has = f"{name}={self.options[name]!r:.60}"
                raise KVPatchError(
                    f"{name}={given[name]!r:.60} is given beside Settings with {has}: leave it out, or change it in "
                    "the Settings."
                )
        return {"policy": self.policy, "k": self.k, **self.options, **given}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the Settings to a JSON file; an earlier one stays until the new one is complete.

        Raises:
            KVPatchError: the file cannot be written.
        """
        written = {"policy": self.policy, "k": _write_budget(self.k), "options": dict(self.options)}
        SETTINGS.write_text(path, SETTINGS.make_description(kvpatch=__version__, **written))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Settings:
        """Read Settings that `save` or `kvpatch compare` wrote.

        Raises:
            KVPatchError: the file is missing or holds no Settings, a name is unknown, or a value cannot be.

        Example:
            settings = kvpatch.Settings.load("settings.json")
        """
        with SETTINGS.reading(path):
            return cls.parse(_read_text(Path(path)))

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Return the Settings that the text of a loaded file holds, for `load`. Raises InvalidError if it holds none."""
        about = SETTINGS.parse_description(text, "", "it")
        try:
            return cls(about["policy"], _read_budget(about["k"]), about["options"])
        except KVPatchError as error:
            raise InvalidError(str(error).rstrip(".")) from error


def _read_text(path: Path) -> str:
    """Read the text of a file, for `Settings.load`. Raises InvalidError if it is too large to be Settings, or no text."""
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise InvalidError(f"it has more than {LARGEST:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidError("it is no text") from None


def _normalize_budget(k: object, where: str, depth: int = 0) -> Any:
    """Return a budget with lists as tuples and texts of numbers as numbers, for `Settings.__post_init__`.

    A Rule (a budget that follows the text) stays; one that no file can hold raises KVPatchError. where: its name in an error.
    depth: lists around it: 2 in a table k[layer][head].
    """
    k = as_python(k)  # numbers of numpy and torch
    if isinstance(k, Rule):
        if type(k) not in RULES.values():
            raise KVPatchError(f"{where}={k} is of no kind that a file can hold: give a number, a size, or {', '.join(RULES)}.")
        return k
    if not is_list(k) or depth == 2:
        return parse_k(k, where)
    if not k:
        raise KVPatchError(f"{where}=[] is empty: give a budget for each layer, or one number for all.")
    return tuple(_normalize_budget(one, f"{where}[{i}]", depth + 1) for i, one in enumerate(k))


def _normalize_option(name: object, value: object, depth: int = 0) -> Any:
    """Return an option's value with lists as tuples, for `Settings.__post_init__`; KVPatchError for one that JSON cannot hold.

    depth: lists around the value, of which _DEEPEST are allowed.
    """
    value = as_python(value)
    if is_list(value) and depth < _DEEPEST:
        return tuple(_normalize_option(name, one, depth + 1) for one in value)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise KVPatchError(
        f"options have {name}={value!r:.60}, which a JSON file cannot hold: give {name}= beside the Settings, or a number, a "
        "text or a list of these."
    )


def _write_budget(k: Any) -> Any:
    """Convert a budget to JSON values, for `Settings.save`: a Rule (such as Mass) to a dict that names it, tuples to lists."""
    if isinstance(k, Rule):
        return {type(k).__name__: dataclasses.asdict(k)}
    return [_write_budget(one) for one in k] if isinstance(k, tuple) else k


def _read_budget(k: object, depth: int = 0) -> Any:
    """Convert a budget from JSON values, for `Settings.parse`. A dict must name a Rule (kind of budget), and becomes it."""
    if isinstance(k, list) and depth < _DEEPEST:
        return [_read_budget(one, depth + 1) for one in k]
    if not isinstance(k, dict):
        return k
    name = next(iter(k), "")
    if len(k) != 1 or name not in RULES:
        raise InvalidError(f"its k names {sorted(k)!r:.60} where one of {', '.join(RULES)} belongs")
    rule = RULES[name]
    return rule(**check_names(f"its {name}", k[name], tuple(one.name for one in dataclasses.fields(rule))))
