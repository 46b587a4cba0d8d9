"""Division of a budget over layers, once per prompt; the total of the uniform budget is kept to the token. Imports no torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

from ..errors import KVPatchError
from .budgets import Rule, is_number


@dataclass(frozen=True)
class Pyramid:
    """Budgets that fall linearly from the first layer to the last [PyramidKV].

    The last layer gets budget / beta, but no less than `least` tokens (the observation window and one more); the mean over
    layers is the uniform budget.

    Differs from the paper: the total is exact to the token (rounded by largest remainders). The slope is flattened where the
    first layer's share would exceed the prompt, as in the authors' code.

    Attributes:
        beta: ratio of the mean budget to the last layer's, at least 1.
    """

    beta: int | float = 20

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""
        if not is_number(self.beta) or not 1 <= self.beta < float("inf"):
            raise KVPatchError(f"beta={self.beta!r} must be a number of at least 1: the last layer gets budget / beta.")


@dataclass(frozen=True)
class Sloped(Rule):
    """The budget of one layer of a pyramid.

    Attributes:
        uniform: the budget that is divided.
        pyramid: divides it.
        layer: index among the `n_layers` that share it.
        last: fewest tokens of the last layer.
        bounded: whether no layer can hold more than the prompt.
    """

    uniform: Rule
    pyramid: Pyramid
    layer: int
    n_layers: int
    last: int
    bounded: bool

    @property
    def evicts(self) -> bool:
        return self.uniform.evicts

    def tokens(self, n: int) -> int:
        most = n if self.bounded else None
        return split_budget(self.pyramid.beta, self.uniform.tokens(n), self.n_layers, self.last, most)[self.layer]

    def highest(self, n: int, H: int, new: int | None = 0) -> list[int]:
        """Return the most tokens of each of H heads after any prompt of up to `n` tokens.

        `count_tokens` and the worker of vLLM reserve memory by it. A layer's budget is largest after the shortest or the
        longest prompt; rounding adds at most a token.
        """
        return [max(self.tokens(1), self.tokens(n)) + 1] * H


@functools.lru_cache(maxsize=1024)
def split_budget(beta: int | float, budget: int, n_layers: int, least: int, most: int | None) -> tuple[int, ...]:
    """Divide n_layers * budget along a line from the first layer to the last, which gets budget / beta, for `Sloped.tokens`.

    The result, tokens per KV head of each layer, is cached, as each layer asks as a prompt ends. least: tokens that each layer
    gets, as far as the budget allows. most: of the first layer, such as the prompt's length; None: no bound. The line is of
    Fractions, so that all processes round alike: up in the layers with the largest remainders.
    """
    last = max(budget / Fraction(beta), Fraction(min(least, budget)))
    if most is not None:  # the first layer gets 2 * budget - last
        last = max(last, Fraction(2 * budget - most))
    last = min(last, Fraction(budget))
    step = (2 * budget - 2 * last) / max(n_layers - 1, 1)
    line = [2 * budget - last - step * layer for layer in range(n_layers)] if n_layers > 1 else [Fraction(budget)]
    tokens = [int(value) for value in line]
    by_remainder = sorted(range(n_layers), key=lambda layer: (tokens[layer] - line[layer], layer))
    for layer in by_remainder[: n_layers * budget - sum(tokens)]:
        tokens[layer] += 1
    return tuple(tokens)
