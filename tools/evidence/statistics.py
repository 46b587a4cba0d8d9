"""Means with intervals, and paired comparisons corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

DRAWS, DRAWS_OF_MODELS = 4000, 2000
LEVEL = 0.05
"""A difference is sure where p is below this."""
Key = TypeVar("Key")
ZERO = 1e-9
"""What is nearer to zero than this is zero."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95% interval (bootstrap, percentiles). signs: of several models those above, below zero."""

    mean: float
    low: float
    high: float
    samples: int
    signs: tuple[int, int] = (0, 0)
    models: int = 1

    @property
    def carried(self) -> int:
        """+1 or -1: the interval leaves zero out, and of three models or more all but one in eight have that sign. Else 0."""
        if self.models < 3:
            return 0
        side = 1 if self.low > 0 else -1 if self.high < 0 else 0
        agreeing = self.signs[0 if side > 0 else 1]
        return side if agreeing >= self.models - self.models // 8 else 0

    def __format__(self, form: str) -> str:
        """Format the mean and its interval, each by a form such as .2f."""
        form = form or ".3f"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def __str__(self) -> str:
        return f"{self}"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate a mean of one model's samples. Differences of two settings, sample by sample, give a paired difference."""
    array = np.asarray(values, dtype=float)
    low, high = np.quantile(_draw_means(array), (0.025, 0.975))
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def estimate_share(lost: Sequence[float], gained: Sequence[float]) -> Estimate:
    """Estimate 1 - mean(lost) / mean(gained) over the same draws of samples."""
    low, high = np.quantile(1 - _draw_means(np.array(lost)) / _draw_means(np.array(gained)), (0.025, 0.975))
    return Estimate(float(1 - np.mean(lost) / np.mean(gained)), float(low), float(high), len(lost))


def _draw_means(values_S: np.ndarray) -> np.ndarray:
    return values_S[np.random.default_rng(0).integers(0, len(values_S), (DRAWS, len(values_S)))].mean(1)


class Bootstrap:
    """Draws of trained models, and of samples within each, over a fixed layout. models: of each sample, (recipe, model).

    Training seeds differ more than policies do, so the model is the unit of replication: a draw takes models with replacement
    within each recipe, then samples with replacement within each model taken. Recipes weigh the same, models weigh the same
    within their recipe. All settings are read off the same draws, so a difference of two is paired. Draws of C models from C
    spread too little by the root of (C - 1) / C, which is put right.
    """

    def __init__(self, models: Sequence[tuple[str, str]], draws: int = DRAWS_OF_MODELS) -> None:
        rows: dict[str, dict[str, list[int]]] = {}
        for at, (recipe, model) in enumerate(models):
            rows.setdefault(recipe, {}).setdefault(model, []).append(at)
        rng, total = np.random.default_rng(0), len(models)
        self.weights_DS, self.plain_S = np.zeros((draws, total)), np.zeros(total)
        self.by_model: dict[str, list[int]] = {}
        for recipe in sorted(rows):
            clusters = rows[recipe]
            chosen_DC = rng.integers(0, len(clusters), (draws, len(clusters)))
            for c, model in enumerate(sorted(clusters)):
                at, share = clusters[model], 1 / (len(rows) * len(clusters))
                self.by_model[model] = at
                self.plain_S[at] = share / len(at)
                # a model that is taken twice brings two draws of samples of its own
                for slot in range(len(clusters)):
                    taken = rng.multinomial(len(at), np.full(len(at), 1 / len(at)), size=draws) / len(at)
                    self.weights_DS[:, at] += share * taken * (chosen_DC[:, slot] == c)[:, None]
            if len(clusters) > 1:
                own = sorted(at for found in clusters.values() for at in found)
                wider = (len(clusters) / (len(clusters) - 1)) ** 0.5
                self.weights_DS[:, own] = self.plain_S[own] + wider * (self.weights_DS[:, own] - self.plain_S[own])

    def estimate(self, values_S: Sequence[float] | np.ndarray) -> Estimate:
        """Estimate the mean of one value per sample."""
        values = np.asarray(values_S, dtype=float)
        low, high = np.quantile(self.weights_DS @ values, (0.025, 0.975))
        means = [values[at].mean() for at in self.by_model.values()]
        signs = sum(one > ZERO for one in means), sum(one < -ZERO for one in means)
        return Estimate(float(self.plain_S @ values), float(low), float(high), len(values), signs, len(means))


def compare_with_zero(differences: Sequence[float]) -> float:
    """Return p of a paired permutation test that the mean difference is 0: signs flipped at random."""
    array = np.asarray(differences, dtype=float)
    if not array.any():
        return 1.0
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (DRAWS * 5, len(array)))
    as_far = np.abs((signs * array).mean(1)) >= abs(array.mean()) - 1e-12
    return float((as_far.sum() + 1) / (len(as_far) + 1))


def judge_all(differences: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Return p of each mean difference, corrected for their number."""
    ps = [compare_with_zero(found) for found in differences.values()]
    return dict(zip(differences, correct_holm(ps), strict=True))


def find_sides(differences: Mapping[Key, Sequence[float]]) -> dict[Key, int]:
    """Return -1 or +1 for each mean difference that is surely below or above zero, corrected for their number, else 0."""
    return {key: int(np.sign(sum(differences[key]))) if p < LEVEL else 0 for key, p in judge_all(differences).items()}


def correct_holm(ps: Sequence[float]) -> list[float]:
    """Raise p-values of a family of comparisons so that the chance of any false one is below the level [Holm 1979]."""
    order, raised, highest = np.argsort(ps), [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[at]))
        raised[at] = highest
    return raised
