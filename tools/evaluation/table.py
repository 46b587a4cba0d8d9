"""Lines as a table that can be asked for means and differences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .lines import Line
from .stats import Bootstrap, Estimate

Cell = tuple[str, Any]
"""A setting's name and its budget."""


def _cell(name: str, k: Any) -> Cell:
    """The full cache has no budget."""
    return (name, 1.0) if name == "full" else (name, k)


@dataclass(frozen=True)
class Key:
    """One sample of one model and seed: what settings are paired by."""

    recipe: str
    model: str
    seed: int
    sample: str


class Table:
    """The lines of one task, or of a part of its samples.

    cells: settings in the order in which they ran. errors: of a cell, what models said that cannot run it. notes: of a cell.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)
        self.values: dict[Cell, dict[Key, dict[str, float]]] = {}
        self.errors: dict[Cell, dict[str, str]] = {}
        self.notes: dict[Cell, str] = {}
        self._bootstraps: dict[tuple[Key, ...], Bootstrap] = {}
        for line in self.lines:
            cell = (line["name"], line["k"])
            if "error" in line:
                self.errors.setdefault(cell, {})[line["model"]] = line["error"]
                continue
            key = Key(line["recipe"], line["model"], line["seed"], line["sample"])
            self.values.setdefault(cell, {})[key] = line["metrics"]
            if "note" in line:
                self.notes[cell] = line["note"]

    @property
    def cells(self) -> list[Cell]:
        return list(self.values)

    @property
    def names(self) -> list[str]:
        """Settings but `full`, in order, also those that never ran."""
        return [name for name in dict.fromkeys(line["name"] for line in self.lines) if name != "full"]

    @property
    def budgets(self) -> list[Any]:
        found = dict.fromkeys(line["k"] for line in self.lines if line["name"] != "full")
        return sorted(found, key=lambda k: (isinstance(k, str), str(k) if isinstance(k, str) else k))

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(key.model for found in self.values.values() for key in found))

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(line["recipe"] for line in self.lines))

    @property
    def groups(self) -> dict[str, list[Any]]:
        """What the samples are split by, with the values it takes."""
        found: dict[str, dict[Any, None]] = {}
        for line in self.lines:
            for name, value in line.get("group", {}).items():
                found.setdefault(name, {})[value] = None
        return {name: list(values) for name, values in found.items()}

    def parts(self, split: Iterable[str]) -> list[dict[str, Any]]:
        """The combinations of these parts of a group that samples have, in order; [{}] where they have none of them."""
        found: dict[tuple[Any, ...], None] = {}
        names = list(split)
        for line in self.lines:
            if "sample" in line:
                found[tuple((name, line["group"][name]) for name in names if name in line["group"])] = None
        return [dict(one) for one in found] or [{}]

    def where(self, **wanted: Any) -> Table:
        """Only the lines whose group (or model, recipe) has these values. Errors belong to every part."""

        def fits(line: Line) -> bool:
            own = {"model": line["model"], "recipe": line["recipe"]} | line.get("group", {})
            return all(own.get(name) == value for name, value in wanted.items() if name in own or "error" not in line)

        return Table(line for line in self.lines if fits(line))

    def mean(self, cell: Cell, metric: str) -> Estimate | None:
        return self._estimate({key: one[metric] for key, one in self.values.get(cell, {}).items() if metric in one})

    def difference(self, a: Cell, b: Cell, metric: str) -> Estimate | None:
        """a - b over the samples that both have; None where there are none."""
        left, right = self.values.get(a, {}), self.values.get(b, {})
        both = [key for key in left if key in right and metric in left[key] and metric in right[key]]
        return self._estimate({key: left[key][metric] - right[key][metric] for key in both})

    def over(self, a: str, b: str, metric: str, budgets: Iterable[Any], level: float = 0.0) -> Estimate | None:
        """The difference of two settings, or of one and a number (`b` is ""): each sample's mean over the `budgets` it has."""
        found: dict[Key, list[float]] = {}
        for k in budgets:
            for key, one in self.values.get(_cell(a, k), {}).items():
                other = self.values.get(_cell(b, k), {}).get(key, {}).get(metric) if b else level
                if metric in one and other is not None:
                    found.setdefault(key, []).append(one[metric] - other)
        return self._estimate({key: float(np.mean(values)) for key, values in found.items()})

    def _estimate(self, found: dict[Key, float]) -> Estimate | None:
        if not found:
            return None
        keys = tuple(found)
        if keys not in self._bootstraps:
            self._bootstraps[keys] = Bootstrap([(key.recipe, key.model) for key in keys])
        return self._bootstraps[keys].estimate(list(found.values()))
