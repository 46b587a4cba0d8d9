"""What refitted values gain over the policy that they go around: a table of lines that `run` has measured."""

from __future__ import annotations

from pathlib import Path

from .page import USES, Results
from .runs import read_lines
from .settings import FULL
from .statistics import compare_with_zero, correct_holm, estimate
from .tables import markdown

BASE, REFIT = "kvzip", "refit(kvzip)"
BUDGETS = (0.05, 0.1, 0.2)
CHOSEN_ON = {"document": 16}
"""Samples at the beginning of a task on which the form of the refit was chosen: they do not count."""
USED = [use for use in USES if use.task in ("document", "code-later")]


def write_table(folder: Path) -> str:
    """Write a row for each kind of probe and budget: nats a token above the full cache's, and the paired difference."""
    found = []
    for use in USED:
        path = folder / f"{use.task}.jsonl"
        results, names = Results(path), {line["digest"]: line["sample"] for line in read_lines(path)}
        unseen = [digest for digest, name in names.items() if int(name.split()[-1]) >= CHOSEN_ON.get(use.task, 0)]
        for k in BUDGETS:
            gained = results.differences(use, (REFIT, k), (BASE, k), only=unseen)
            loss = [estimate(results.differences(use, (label, k), (FULL, 1.0), only=unseen)) for label in (BASE, REFIT)]
            found.append((use.title, k, loss, gained))
    raised = correct_holm([compare_with_zero(gained) for *_, gained in found])
    rows = [
        [title, f"{k:g}", *(f"{one.mean:.3f}" for one in loss), str(estimate(gained)), f"{p:.2g}", str(len(gained))]
        for (title, k, loss, gained), p in zip(found, raised, strict=True)
    ]
    return markdown(["", "k", f"`{BASE}` loses", f"`{REFIT}` loses", "difference", "p", "texts"], rows)
