"""Tokens that a KV head holds after a prompt and new ones, and the slots allocated for it: a function of the settings alone.

Engines claim memory by it, `kvpatch.plan` counts bytes by it, and the invariants compare each cache with it. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..policies.budgets import MAX_POSITION, Rule
from .growth import LEAST, SPARE, slack

if TYPE_CHECKING:
    from .settings import CacheSettings


class Terms(NamedTuple):
    """Terms on which a layer holds tokens.

    rule: its budget. schedule: of its policy, None if nothing is ever evicted. every, turns: options of its policy. divided:
    whether heads share the budget by their scores.
    """

    rule: Rule
    schedule: str | None
    every: int = 1
    turns: str = "all"
    divided: bool = False


class Holding(NamedTuple):
    """Size of a layer for one text.

    heads: the most tokens of each head between steps; where heads share a budget by their scores, the mean of those that share.
    slots: the most slots that are allocated for a head, on average.
    """

    heads: list[int]
    slots: int


def count_held(
    settings: CacheSettings,
    layer: int,
    prompt: int,
    new: int | None,
    *,
    heads: int = 1,
    read: int = 0,
    room: int = 0,
    longest: bool = False,
) -> Holding:
    """Count what a layer with `heads` KV heads holds after a prompt of `prompt` tokens and `new` ones fed one by one.

    Engines claim this memory. Tokens are exact where k is a number or a share and every=1. After each block of a prompt, or
    piece that an engine feeds, a head holds at most as many. Slots are these tokens and the spare ones of growth.py, but at
    most what the budget can ever fill; if heads divide one budget, 16 and 1/50 more. In a batch any row may have the slots of
    the longest.

    new: None for any number; MAX_POSITION or more tokens then mean that the layer grows with the text. read: tokens at the
    beginning of the prompt that were a prompt of their own, such as a prefix. room: as in `Patch.new_cache`. longest: count the
    most that any prompt of up to `prompt` tokens may leave.

    Example:
        >>> count_held(patch.settings, 0, prompt=1000, new=200)  # of k=0.25, schedule "both"
        Holding(heads=[250], slots=251)
    """
    policy = settings.policies[layer]
    schedule = policy.schedule if settings.evicts[layer] else None
    # options of the policy that decide how many tokens a layer holds
    terms = Terms(settings.rules[layer], schedule, policy.every, policy.scope.turns, policy.over_heads is not None)
    return count_by_terms(terms, prompt, new, heads=heads, read=read, room=room, longest=longest)


def count_by_terms(
    terms: Terms, prompt: int, new: int | None, *, heads: int = 1, read: int = 0, room: int = 0, longest: bool = False
) -> Holding:
    """Count, as `count_held` does, what a layer holds by its rule and options (`terms`).

    `count_held` calls it, and `Counter.hold` for `kvpatch.plan`, where no policy is made.
    """
    rule, schedule, every, turns, divided = terms  # turns: the prompts of a chat that a budget is for

    def count(prompt: int, new: int | None) -> list[int]:
        return count_tokens(rule, schedule, prompt, new, heads=heads, every=every, longest=longest)

    if read and turns == "each":  # each prompt has a budget of its own
        held = list(map(sum, zip(count(read, 0), count(prompt - read, new), strict=True)))
    elif read and turns == "first":  # what follows is kept whole, as new tokens are
        held = count(read, None if new is None else prompt - read + new)
    else:
        held = count(prompt, new)
    # spare slots, as growth.py adds them
    most = max(held)
    waste = 2 * LEAST + most // SPARE if divided else 0  # divided: heads share the budget by their scores
    slots = most + waste + max(slack(most + waste), room, every)
    # heads that evict never need more slots than at their budget, and one for the next token
    return Holding(held, slots if schedule in (None, "prompt") else min(slots, max(count(prompt, None)) + 1 + waste))


def count_tokens(
    rule: Rule, schedule: str | None, prompt: int, new: int | None, *, heads: int = 1, every: int = 1, longest: bool = False
) -> list[int]:
    """Count the tokens of each head (spare slots not included) under one budget rule; arguments are those of `count_held`.

    `count_by_terms`, `plan` and vLLM's pages call it. schedule: the policy evicts at the end of a "prompt", in "decode" steps,
    or in "both"; None: never.
    """
    grown = MAX_POSITION + every if new is None else new  # a head without a budget may wait to evict, too
    if schedule is None:
        return [prompt + grown] * heads
    budgets = rule.highest if longest else rule.heads  # both: (prompt, heads, new) -> tokens of each head
    kept = [min(most, prompt) for most in budgets(prompt, heads, 0)]
    if schedule == "prompt":
        return [n + grown for n in kept]
    outside = prompt if schedule == "decode" else 0  # the prompt's tokens, which the budget does not count
    # heads that evict `every` tokens at once may hold every - 1 more in between
    limits = [outside + most + every - 1 for most in budgets(prompt, heads, new)]
    return [min(limit, (prompt if longest or outside else n) + grown) for limit, n in zip(limits, kept, strict=True)]


def keeps_new(settings: CacheSettings, layer: int) -> bool:
    """Tell if a layer keeps all tokens that are generated, so that it grows with the text."""
    return not settings.evicts[layer] or settings.policies[layer].schedule == "prompt"
