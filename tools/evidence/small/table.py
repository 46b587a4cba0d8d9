"""Lines as a table that can be asked for means and differences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..runs import Line
from ..settings import FULL
from ..statistics import Bootstrap, Estimate

Cell = tuple[str, Any]
"""A setting's label and its budget."""
Key = tuple[str, str, str]
"""Recipe, model and sample: what settings are paired by."""
WHOLE: Cell = (FULL, 1.0)


class Table:
    """The lines of one task."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)
        self.values: dict[Cell, dict[Key, dict[str, float]]] = {}
        self._bootstraps: dict[tuple[Key, ...], Bootstrap] = {}
        for line in self.lines:
            if "error" not in line:
                key = line["recipe"], line["model"], line["sample"]
                self.values.setdefault((line["label"], line["k"]), {})[key] = line["metrics"]

    @property
    def labels(self) -> list[str]:
        """Settings but the full cache, in order, also those that never ran."""
        return [label for label in dict.fromkeys(line["label"] for line in self.lines) if label != FULL]

    @property
    def budgets(self) -> list[Any]:
        """Budgets, lowest first."""
        return sorted({line["k"] for line in self.lines if line["label"] != FULL})

    @property
    def models(self) -> list[str]:
        """Models in the order of the lines."""
        return list(dict.fromkeys(line["model"] for line in self.lines))

    def count_samples(self) -> int:
        """Samples of all models."""
        return len({key for values in self.values.values() for key in values})

    def mean(self, cell: Cell, metric: str) -> Estimate | None:
        """Estimate a setting's mean; None where it never ran."""
        return self._estimate({key: one[metric] for key, one in self.values.get(cell, {}).items()})

    def difference(self, a: Cell, b: Cell, metric: str) -> Estimate | None:
        """Estimate a - b over the samples that both have; None where there are none."""
        left, right = self.values.get(a, {}), self.values.get(b, {})
        return self._estimate({key: left[key][metric] - right[key][metric] for key in left if key in right})

    def list_errors(self) -> list[str]:
        """What did not run, a line of Markdown for each reason."""
        found: dict[tuple[str, Any], tuple[dict[str, None], dict[str, None]]] = {}
        for line in self.lines:
            if "error" in line:
                labels, models = found.setdefault((line["error"], line["k"]), ({}, {}))
                labels[f"`{line['label']}`"], models[line["model"]] = None, None
        return [
            f"- {', '.join(labels)} {'does' if len(labels) == 1 else 'do'} not run on {', '.join(models)}: {error} (k = {k:g})"
            for (error, k), (labels, models) in found.items()
        ]

    def _estimate(self, found: dict[Key, float]) -> Estimate | None:
        if not found:
            return None
        keys = tuple(found)
        if keys not in self._bootstraps:
            self._bootstraps[keys] = Bootstrap([(recipe, model) for recipe, model, _ in keys])
        return self._bootstraps[keys].estimate(list(found.values()))
