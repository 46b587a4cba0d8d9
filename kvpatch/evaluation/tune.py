"""Search for a policy and budgets of each layer that hold the fewest bytes within a tolerance, on the user's own text.

Every measurement is `Comparison.figures`: KL from the full cache and bytes, on pieces of the text. The search is bounded and
has no random numbers of its own:

1. Each policy, with one k for all layers: the smallest of a grid within the tolerance, by bisection. The best are those with
   the fewest bytes.
2. The best again, with smaller observation windows; then with heads that share their layer's budget above a floor
   (`adaptive`), or with other floors.
3. Tokens move between bands of layers while the KL falls; then all layers shrink together as far as the tolerance allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..hooks.target import Target
from ..policies import Policy, adaptive
from ..storage.profile import Profile, changed
from .divergence import Comparison

Pieces = Sequence[tuple[Tensor, int]]
"""Token ids [1,T] of pieces of text, each with the tokens of its prompt; the rest is fed one by one."""
GRID = tuple(step / 40 for step in range(2, 40))
"""Shares of the prompt that are tried for all layers, 0.05 to 0.975."""
FLOORS = (0.2, 0.5, 0.8)
"""Shares of a layer's budget that each of its heads is sure of."""
WINDOWS = (16, 8)
"""Rows of the observation window, which is protected: a large one leaves little of a small budget."""
BANDS = 8
"""Groups of layers between which tokens move, at most."""
STEPS = (0.4, 0.2, 0.1)
"""Shares of a band's budget that move at once, largest first."""
FINALISTS, MOVES = 2, 4


@dataclass(frozen=True)
class Quality:
    """Quality on pieces of text, on average: KL from the full cache in nats per token, and share of its bytes."""

    kl: float
    share: float


@dataclass(frozen=True)
class Setting:
    """A policy by the name that builds it, and the share of the prompt that each layer holds, with its quality."""

    name: str
    policy: Policy
    k: tuple[float, ...]
    quality: Quality

    @property
    def size(self) -> tuple[float, ...] | float:
        """The budget as `patched` takes it."""
        return size(self.policy, self.k)

    @property
    def rank(self) -> tuple[float, float]:
        """Bytes, then KL."""
        return round(self.quality.share, 6), self.quality.kl


class Search:
    """A search on one model and text.

    Args:
        model: not patched.
        pieces: token ids [1,T] of pieces of text, each with the tokens of its prompt; the rest is fed one by one.
        tolerance: largest mean KL from the full cache, nats per token.
        on_measure: called with a policy's name before each measurement.
        seed: of the policies' random numbers.

    Raises:
        KVPatchError: the model has no adapter, or its predictions are NaN.

    Example:
        search = Search(model, [(ids, 512)], 0.05)
        setting = search.run({"roco": kvpatch.get_policy("roco")})
    """

    def __init__(
        self,
        model: Any,
        pieces: Pieces,
        tolerance: float,
        on_measure: Callable[[str], None] = lambda name: None,
        seed: int = 0,
    ) -> None:
        self.model, self.pieces, self.tolerance, self.on_measure, self.seed = model, pieces, tolerance, on_measure, seed
        self.comparisons = [Comparison(model, ids, n, seed=seed) for ids, n in pieces]
        self.layers = len(Target.find(model).attentions)
        count = min(BANDS, self.layers)
        self.bands = [range(i * self.layers // count, (i + 1) * self.layers // count) for i in range(count)]
        self.refused: dict[str, str] = {}
        self._known: dict[tuple[Any, ...], Quality | None] = {}

    def most(self, policies: int) -> int:
        """Return the most measurements that a search among so many policies takes."""
        bisected = policies + FINALISTS * (len(FLOORS) + len(WINDOWS))
        moved = len(STEPS) * (2 * len(self.bands) + MOVES) if len(self.bands) > 1 else 0
        return ceil(log2(len(GRID) + 1)) * bisected + FINALISTS * (moved + ceil(log2(_SHRINKS)) + 1)

    def run(self, policies: Mapping[str, Policy]) -> Setting:
        """Return the setting that holds the fewest bytes within the tolerance.

        policies: by the names that build them.

        Raises:
            KVPatchError: none stays within the tolerance.
        """
        found = [one for name, policy in policies.items() if (one := self._uniform(name, policy)) is not None]
        if not found:
            why = "".join(f" {name}: {said}" for name, said in [*self.refused.items()][:1])
            raise KVPatchError(
                f"None of {', '.join(policies)} stays within a KL of {self.tolerance:g} nats per token at k={GRID[-1]}: give a "
                f"larger --tolerance, or other --policies.{why}"
            )
        for variants in (_windows, _floors):
            for one in sorted(found, key=lambda one: one.rank)[:FINALISTS]:
                new = [self._uniform(name, policy) for name, policy in variants(one)]
                found += [variant for variant in new if variant is not None]
        best = sorted(found, key=lambda one: one.rank)[:FINALISTS]
        return min([*best, *(self._shrunk(self._moved(one)) for one in best)], key=lambda one: one.rank)

    def measure(self, name: str, policy: Policy, k: tuple[float, ...]) -> Quality | None:
        """Return the quality of a setting, or None if the policy refuses it; each is measured once."""
        options = policy.options()
        key = name, options.get("floor"), options.get("window"), k
        if key not in self._known:
            self.on_measure(name)
            self._known[key] = self._measured(name, policy, k)
        return self._known[key]

    def _measured(self, name: str, policy: Policy, k: tuple[float, ...]) -> Quality | None:
        try:
            return quality(self.comparisons, policy, size(policy, k))
        except KVPatchError as error:
            self.refused[name] = str(error)
            return None

    def _uniform(self, name: str, policy: Policy) -> Setting | None:
        """Return the smallest budget of the grid, the same for all layers, within the tolerance; None if there is none."""
        return self._least(name, policy, [(k,) * self.layers for k in GRID])

    def _least(self, name: str, policy: Policy, ascending: Sequence[tuple[float, ...]]) -> Setting | None:
        """Return the first of ascending budgets within the tolerance, by bisection."""
        low, high, found = 0, len(ascending), None
        while low < high:
            middle = (low + high) // 2
            one = self.measure(name, policy, ascending[middle])
            if name in self.refused:
                return None
            if one is not None and one.kl <= self.tolerance:
                high, found = middle, Setting(name, policy, ascending[middle], one)
            else:
                low = middle + 1
        return found

    def _moved(self, one: Setting) -> Setting:
        """Return a setting from which tokens were moved between bands of layers as long as the KL fell at no more bytes."""
        if len(self.bands) == 1 or divides(one.policy):
            return one
        for step in STEPS:
            one = self._moved_by(one, step)
        return one

    def _moved_by(self, one: Setting, step: float) -> Setting:
        """Measure each band with more and with less, then try the pairs that promise most, each at most once."""
        amount = step * sum(one.k) / self.layers
        kl = {(band, sign): self._kl(one, [(band, sign * amount)]) for band, sign in product(range(len(self.bands)), (1, -1))}
        pairs = [*permutations(range(len(self.bands)), 2)]
        pairs.sort(key=lambda pair: (kl[pair[0], 1] + kl[pair[1], -1], pair))
        for to, source in pairs[:MOVES]:
            ratio = len(self.bands[to]) / len(self.bands[source])  # so that the sum over layers stays
            k = self._with(one, [(to, amount), (source, -amount * ratio)])
            new = None if k is None else self.measure(one.name, one.policy, k)
            if k is not None and new is not None and new.kl < one.quality.kl and new.share <= one.quality.share + _SLACK:
                one = Setting(one.name, one.policy, k, new)
        return one

    def _kl(self, one: Setting, changes: Sequence[tuple[int, float]]) -> float:
        k = self._with(one, changes)
        found = None if k is None else self.measure(one.name, one.policy, k)
        return float("inf") if found is None else found.kl

    def _with(self, one: Setting, changes: Sequence[tuple[int, float]]) -> tuple[float, ...] | None:
        """Return a setting's budgets with those of bands changed; None if one leaves the range of the grid."""
        k = list(one.k)
        for band, change in changes:
            for layer in self.bands[band]:
                k[layer] = round(k[layer] + change, 4)
        return tuple(k) if min(k) >= _SMALLEST and max(k) <= GRID[-1] else None

    def _shrunk(self, one: Setting) -> Setting:
        """Return the setting with all budgets made smaller by one factor, as far as the tolerance allows."""
        factors = [(_SHRINKS - step) / _SHRINKS for step in range(_SHRINKS // 2, 0, -1)]
        smaller = [tuple(max(_SMALLEST, round(k * factor, 4)) for k in one.k) for factor in factors]
        return self._least(one.name, one.policy, smaller) or one


_SHRINKS = 80
_SMALLEST = 0.01
_SLACK = 0.002  # of the full cache's bytes: rounding to tokens, and room of heads that differ


def _windows(one: Setting) -> Iterable[tuple[str, Policy]]:
    """Yield a setting's policy with each smaller observation window."""
    for window in WINDOWS:
        if one.policy.score.protects_window and window < one.policy.options().get("window", 0):
            yield one.name, one.policy.with_options(window=window)


def _floors(one: Setting) -> Iterable[tuple[str, Policy]]:
    """Yield a setting's policy with heads that share a budget, for each floor."""
    for floor in FLOORS:
        try:
            has = "floor" in one.policy.options()
            name = one.name if has else f"adaptive({one.name})"
            yield name, one.policy.with_options(floor=floor) if has else adaptive(one.policy, floor=floor)
        except KVPatchError:  # its heads cannot differ
            return


def divides(policy: Policy) -> bool:
    """Tell whether a policy divides one budget over the layers itself."""
    return policy.over_layers is not None or policy.over_model


def size(policy: Policy, k: tuple[float, ...]) -> tuple[float, ...] | float:
    """Return budgets of layers as `patched` takes them: one number, of equal ones, where the policy divides it itself."""
    return k[0] if divides(policy) else k


def quality(comparisons: Sequence[Comparison], policy: Policy, k: Any) -> Quality:
    """Return the quality of a policy and budget, as `patched` takes them, on some pieces.

    Raises:
        KVPatchError: as `patched`.
    """
    figures = [comparison.figures(policy, k) for comparison in comparisons]
    shares = [one.nbytes / comparison.nbytes for one, comparison in zip(figures, comparisons, strict=True)]
    return Quality(sum(one.kl for one in figures) / len(figures), sum(shares) / len(shares))


def tune(search: Search, policies: Mapping[str, Policy], unseen: Pieces = ()) -> Profile:
    """Run a search and return its profile.

    Args:
        search: on the model and its text.
        policies: by the names that build them.
        unseen: pieces as those of the search, on which the profile is measured once more.

    Raises:
        KVPatchError: as `Search.run`.
    """
    best = search.run(policies)
    others = [Comparison(search.model, ids, n, seed=search.seed) for ids, n in unseen]
    measured = {
        "tokens": sum(ids.shape[1] for ids, _ in search.pieces),
        "pieces": len(search.pieces),
        "tolerance": search.tolerance,
        "kl": best.quality.kl,
        "share": best.quality.share,
        "unseen_kl": quality(others, best.policy, best.size).kl if others else None,
    }
    return Profile(Target.find(search.model).identity(), best.name, changed(best.name, best.policy), best.size, measured)


def cut(ids_1T: Tensor, n: int, new: int, most: int, first: Sequence[int] = ()) -> list[tuple[Tensor, int]]:
    """Cut pieces out of a text, evenly spread and without overlap, each with the tokens of its prompt, as `Search` takes them.

    Args:
        ids_1T: token ids of the text.
        n: tokens of each prompt.
        new: tokens after it.
        most: how many pieces, at most.
        first: tokens in front of each piece, among its `n`.
    """
    own = n + new - len(first)
    count = min(most, ids_1T.shape[1] // own)
    front_1F = ids_1T.new_tensor([*first])[None]
    starts = [i * (ids_1T.shape[1] - own) // max(count - 1, 1) for i in range(count)]
    return [(torch.cat([front_1F, ids_1T[:, start : start + own]], 1), n) for start in starts]
