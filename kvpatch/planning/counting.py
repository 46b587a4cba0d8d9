"""Bytes of a cache for any length of the text: what cache/holding.py counts, times the bytes of an entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..backends.entry_sizes import FULL, count_centre_bytes, count_entry_bytes
from ..cache.holding import Holding, Terms, count_by_terms
from ..policies.budgets import MAX_POSITION, Budget, Rule, Size
from ..policies.naming import Division
from ..policies.slopes import Pyramid, Sloped
from .configuration import Layer, Shape


class Bytes(NamedTuple):
    """Bytes of one text's keys and values.

    held: of the tokens that are held. allocated: the most that their buffers take. reading: the most while a prompt is read.
    """

    held: int
    allocated: int
    reading: int


@dataclass(frozen=True)
class Counter:
    """Counter of a cache's bytes, by each layer's Terms: its budget, and when tokens are evicted.

    bits, itemsize: of the numbers held, and bytes of one in the model's dtype. shares_budget: whether the layers share one
    budget, which is divided once the last layer has read the prompt.
    """

    layers: tuple[Layer, ...]
    terms: tuple[Terms, ...]
    bits: int
    itemsize: int
    shares_budget: bool = False

    def hold(self, prompt: int, new: int) -> list[Holding]:
        """Return what each layer holds after a prompt of so many tokens and `new` ones."""
        pairs = zip(self.layers, self.terms, strict=True)
        return [count_by_terms(terms, prompt, new, heads=layer.heads) for layer, terms in pairs]

    def count(self, prompt: int, new: int) -> Bytes:
        """Count the bytes of one text's cache, for `plan`, after a prompt of `prompt` tokens and `new` generated tokens.

        The result has the bytes of the tokens held, those allocated for slots, and the most while the prompt is read.
        """
        held = allocated = largest = 0  # largest: of the layers' buffers
        for layer, holding in zip(self.layers, self.hold(prompt, new), strict=True):
            entry = self._count_entry(layer, self.bits)  # of one token in one head
            fixed = layer.heads * count_centre_bytes(self.bits, layer.key, self.itemsize)  # of what rounded keys are centred on
            held += sum(holding.heads) * entry + fixed
            buffers = layer.heads * holding.slots * entry + fixed
            allocated, largest = allocated + buffers, max(largest, buffers)
        full_prompts = [layer.heads * prompt * self._count_entry(layer, FULL) for layer in self.layers]
        # layers that share one budget all hold the whole prompt until the last has read it, and then one gets new buffers
        # after the other; otherwise each evicts before the next one reads, so that one at a time holds it
        peak = sum(full_prompts) + largest if self.shares_budget else allocated + max(full_prompts)
        return Bytes(held, allocated, max(peak, allocated))

    def _count_entry(self, layer: Layer, bits: int) -> int:
        return count_entry_bytes(bits, layer.key, layer.value, self.itemsize, layer.latent)


def count_full(shape: Shape, itemsize: int, tokens: int) -> int:
    """Count the bytes of a text's cache without a policy: of every token, in a sliding layer of those in its window."""
    sizes = ((layer, min(tokens, layer.window or tokens)) for layer in shape.layers)
    return sum(layer.heads * n * count_entry_bytes(FULL, layer.key, layer.value, itemsize, layer.latent) for layer, n in sizes)


def make_counter(shape: Shape, division: Division, budget: Budget, bits: int, itemsize: int) -> Counter:
    """Make the Counter of `plan`: find by which budget and schedule each layer holds tokens; a sliding layer holds its window.

    division: when the policy evicts, and how layers and heads share a budget: `beta` is of a pyramid, in which later layers get
    less, and `protects` counts the newest tokens that every layer keeps. bits, itemsize: as in Counter.
    """
    full_layers = [index for index, bound in enumerate(shape.bounds) if bound is None]
    terms = []
    for index, bound in enumerate(shape.bounds):
        rule: Rule = budget.rules[index] if bound is None else Size(bound)
        if bound is not None:  # a sliding layer
            terms.append(Terms(rule, "both"))
            continue
        if division.beta is not None and division.schedule is not None:
            # a layer's place among those of full attention says its share of the budget
            bounded, last = division.schedule != "decode", division.protects + 1
            rule = Sloped(rule, Pyramid(division.beta), full_layers.index(index), len(full_layers), last, bounded)
        schedule = division.schedule if rule.evicts else None
        terms.append(Terms(rule, schedule, division.every, divided=bool(division.shared)))
    shares_budget = division.shared == "model" and division.schedule is not None
    return Counter(shape.layers, tuple(terms), bits, itemsize, shares_budget)


def find_most(fits: Callable[[int], bool], limit: int) -> int:
    """Find by bisection the most tokens, up to `limit`, for which fits(tokens) is True; 0 if it is for none."""
    low, high = 0, min(limit, MAX_POSITION)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
