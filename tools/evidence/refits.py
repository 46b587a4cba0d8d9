"""What refitted values gain over the policy that they go around: a table of lines that `run` has measured."""

from __future__ import annotations

import itertools
from pathlib import Path

from .page import USES, Results
from .statistics import estimate, judge_all
from .tables import markdown

BASES = ("kvzip", "kvzip, 8 bits", "kvzip, 4 bits", "snapkv")
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3)
CHOSEN_ON = {"document": 16}
"""Samples at the beginning of a task on which the form of the refit was chosen: they do not count."""
USED = [use for use in USES if use.task in ("document", "code-later", "asked")]


def name_refit(base: str) -> str:
    """Return the label of the refit of a row: "refit(kvzip), 8 bits" of "kvzip, 8 bits"."""
    policy, comma, options = base.partition(",")
    return f"refit({policy}){comma}{options}"


def write_table(folder: Path) -> str:
    """Write a row for each kind of probe, base and budget: nats a token above the full cache's, and the paired difference."""
    cells, gains = {}, {}
    for results in [Results(folder, use) for use in USED]:
        names = {digest: line["sample"] for lines in results.lines.values() for digest, line in lines.items()}
        chosen_on = CHOSEN_ON.get(results.use.task, 0)
        unseen = {digest for digest, name in names.items() if int(name.split()[-1]) >= chosen_on}
        for base, k in itertools.product(BASES, BUDGETS):
            alone, fit = (base, k), (name_refit(base), k)
            if gained := results.differences(fit, alone, only=unseen):
                both = unseen & results.lines[fit].keys() & results.lines[alone].keys()
                loss = [f"{estimate(results.differences(cell, only=both)).mean:.3f}" for cell in (alone, fit)]
                key = results.use.title, base, k
                cells[key], gains[key] = [*loss, str(estimate(gained))], gained
    rows = [
        [title, f"`{base}`", f"{k:g}", *cells[title, base, k], f"{p:.2g}", str(len(gains[title, base, k]))]
        for (title, base, k), p in judge_all(gains).items()
    ]
    return markdown(["", "base", "k", "base loses", "its refit loses", "difference", "p", "texts"], rows)
