"""The longest prompt of a plan: a policy that reads it twice needs positions for both, as the patch checks in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import KVPatchError, match_name
from ..policies.budgets import check_count
from ..policies.facts import FACTS
from ..policies.naming import list_defaults, split_combination
from ..policies.repetition import Repetition
from .configuration import Shape
from .counting import find_most


def find_repetition(policy: str, options: Mapping[str, Any]) -> Repetition | None:
    """Return how a policy or combination reads a prompt a second time, for `plan`; None if it has no `instruction=` to do so.

    Raises:
        KVPatchError: the option chunk is no number of tokens, or instruction is no list of token ids.
    """
    outer, base = split_combination(policy)
    merged = list_defaults(outer, match_name(base, FACTS) or base)
    if "instruction" not in merged:
        return None
    merged |= options
    check_count("chunk", merged["chunk"], "tokens")
    given = merged["instruction"]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise KVPatchError(f"instruction={given!r:.60} must be token ids: leave it out of the plan, or give a list of them.")
    # tokens before the first chunk, before later ones, and between either and the text; a plain list is before every chunk
    parts = given if len(given) == 3 and all(isinstance(part, Sequence) for part in given) else (given, given, ())
    first, later, close = map(len, parts)
    return Repetition(merged["chunk"], first + close, later + close)


def find_longest(shape: Shape, new: int, repetition: Repetition | None) -> int | None:
    """Return the tokens of the longest prompt that the model's positions leave, for `plan`; None where they are no limit.

    new: tokens generated after it. repetition: the policy's second reading, which takes positions after the prompt's.
    """
    limit = shape.positions
    if limit is None:
        return None
    if repetition is None:
        return max(limit - new, 0)
    return find_most(lambda n: n + repetition.count_tokens(n) <= limit, max(limit - new, 0))
