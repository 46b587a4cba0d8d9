"""Means with intervals, by a paired bootstrap over samples and trained models.

Training seeds differ more than policies do, so the model is the unit of replication: a draw takes trained models with
replacement within each recipe, then samples with replacement within each model taken. Recipes weigh the same, models weigh the
same within their recipe. All settings are read off the same draws, so a difference of two is paired. With one model of a recipe
the interval knows nothing of other training seeds, and with three it is still on the narrow side: see `carried`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval, over `samples` samples of `models` models. signs: models above, below zero."""

    mean: float
    low: float
    high: float
    samples: int
    models: int
    signs: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def carried(self) -> int:
        """+1 or -1: the interval leaves zero out, and of three models or more all but one in eight have that sign. Else 0."""
        if self.models < 3:
            return 0
        side = 1 if self.low > 0 else -1 if self.high < 0 else 0
        agreeing = self.signs[0 if side > 0 else 1]
        return side if agreeing >= self.models - self.models // 8 else 0


class Bootstrap:
    """Draws over a fixed layout of samples. models: of each sample, (recipe, model) in any order."""

    def __init__(self, models: Sequence[tuple[str, str]], draws: int = DRAWS, seed: int = 0) -> None:
        self.models = list(models)
        rows: dict[str, dict[str, list[int]]] = {}
        for at, (recipe, model) in enumerate(models):
            rows.setdefault(recipe, {}).setdefault(model, []).append(at)
        rng, total = np.random.default_rng(seed), len(self.models)
        self.weights_DS = np.zeros((draws, total))
        self.plain_S = np.zeros(total)
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

    def estimate(self, values_S: Sequence[float] | np.ndarray) -> Estimate:
        """The mean of one value per sample. A difference of two settings' values is a paired difference."""
        values = np.asarray(values_S, dtype=float)
        low, high = np.quantile(self.weights_DS @ values, (0.025, 0.975))
        means = [values[at].mean() for at in self.by_model.values()]
        signs = sum(mean > 1e-9 for mean in means), sum(mean < -1e-9 for mean in means)
        return Estimate(float(self.plain_S @ values), float(low), float(high), len(values), len(means), signs)
