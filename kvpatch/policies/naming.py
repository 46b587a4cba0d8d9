"""Names of policies and of combinations, checked and read without torch; presets.py makes policies of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import KVPatchError, find_nearest, match_name, suggest
from .facts import COMBINATIONS, FACTS

SCHEDULES = ("prompt", "decode", "both")
POSITIONS = ("original", "renumbered")
COMBINED = re.compile(rf"\s*({'|'.join(COMBINATIONS)})\((.+)\)\s*", re.IGNORECASE)
_CALL = re.compile(r"\s*([^()]+)\((.+)\)\s*")


class Division(NamedTuple):
    """Division of a policy's budget over heads and layers, whatever the scores are.

    schedule: None if the policy never evicts. every: tokens that decode steps evict at once. beta: slope of a pyramid (see
    Pyramid), or None. protects: tokens of the observation window, which every layer keeps. shared: as in `Fact`.
    """

    schedule: str | None
    every: int
    beta: int | float | None
    protects: int
    shared: str


def split_combination(name: str) -> tuple[list[str], str]:
    """Split the name of a combination, for all who read names of policies: combinations, outermost first, and the policy.

    Example:
        >>> split_combination("critical(adaptive(roco))")
        (['critical', 'adaptive'], 'roco')
    """
    combinations = []
    while (combined := COMBINED.fullmatch(name)) is not None:
        combinations.append(combined[1].lower())
        name = combined[2]
    return combinations, name


def list_defaults(combinations: Iterable[str], policy: str) -> dict[str, Any]:
    """Return the options of a policy of FACTS, and of combinations around it, with their defaults.

    `find_division`, `check_policy` and `find_repetition` call it.
    """
    defaults = FACTS[policy].list_options()
    for name in combinations:
        defaults |= COMBINATIONS[name].options
    return defaults


def find_division(name: str, schedule: str | None, options: Mapping[str, Any]) -> Division:
    """Look up how a named policy divides its budget over heads and layers; `kvpatch.plan` begins with it, without torch.

    name: of a policy in the table FACTS, or a combination of one. schedule: what the user asks for, or None for the policy's
    default. options: those that the user has set. In the Division, `shared` tells which heads share one budget, `protects` the
    size of an observation window (the last queries of a prompt) whose tokens every layer keeps.

    Raises:
        KVPatchError: the table has no policy of this name, or it has no such option.
    """
    check_policy(name, options)
    combinations, base = split_combination(name)
    policy = match_name(base, FACTS)  # in any spelling
    if policy is None:
        raise KVPatchError(f"Policy {base!r} is none of the table: give one of {', '.join(FACTS)}.")
    fact = FACTS[policy]
    values = {**list_defaults(combinations, policy), **options}
    rows = [COMBINATIONS[outer] for outer in combinations]
    default = next((row.schedule for row in rows if row.schedule), fact.schedule)
    shared = next((row.shared for row in rows if row.shared), fact.shared)
    protects = 0 if policy == "cur" else values.get("window", 0)  # the window of cur is one of keys, not of queries
    when = None if policy == "full" else schedule or default
    return Division(when, values["every"], values.get("beta"), protects, shared)


def suggest_policy(name: object, known: Collection[str]) -> str:
    """Return ``" Did you mean 'refit(h2o)'?"`` for the error of `refuse_name` about an unknown policy; "" if none is near."""
    combinations, base = [], str(name)
    while (call := _CALL.fullmatch(base)) is not None:
        combinations.append(find_nearest(call[1], COMBINATIONS))  # None if none is near
        base = call[2]
    parts = [*combinations, find_nearest(base, known)]
    return "" if None in parts else f" Did you mean {'('.join(map(str, parts)) + ')' * len(combinations)!r}?"


def check_policy(name: str, options: Collection[str] | None = None) -> None:
    """Refuse a misspelt policy or option without importing torch: commands call it at once; `get_policy` checks the rest.

    Raises:
        KVPatchError: no policy of this name, or it has none of the `options` of that name.
    """
    combinations, name = split_combination(name)
    if (known_as := match_name(name, FACTS)) is None:
        if name in _list_registered():  # a policy that the program has registered
            return
        raise refuse_name(name, FACTS)
    check_options(known_as, options or (), list_defaults(combinations, known_as))


def check_options(policy: str, options: Collection[str], known: Collection[str]) -> None:
    """Raise KVPatchError for an option of a user that is not among the policy's (`known`), for `patched` and `with_options`."""
    for option in options:
        if option not in known:
            raise KVPatchError(
                f"Policy {policy!r} has no option {option!r}.{suggest(option, known)} It has: {', '.join(known)}."
            )


def refuse_name(name: object, known: Collection[str]) -> KVPatchError:
    """Return the error for a policy that is none of `known`, with the nearest of them."""
    shown = repr(name) if name is None or isinstance(name, str | int | float | type) else f"of type {type(name).__name__}"
    return KVPatchError(f"Unknown policy {shown}.{suggest_policy(name, known)} Known: {', '.join(known)}.")


def _list_registered() -> Collection[str]:
    """Return the names of all registered policies if the library has been imported, by a program that registers its own."""
    presets = sys.modules.get("kvpatch.policies.presets")
    return () if presets is None else presets.list_policies()
