"""What refitted values gain over the policy that they go around: a table of lines that `run` has measured."""

from __future__ import annotations

from pathlib import Path

from .page import USES, Results
from .runs import read_lines
from .settings import FULL
from .statistics import compare_with_zero, correct_holm, estimate
from .tables import markdown

BASES = ("kvzip", "kvzip, 8 bits", "kvzip, 4 bits", "snapkv")
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3)
CHOSEN_ON = {"document": 16}
"""Samples at the beginning of a task on which the form of the refit was chosen: they do not count."""
USED = [use for use in USES if use.task in ("document", "code-later", "asked")]


def name_refit(base: str) -> str:
    """Return the label of the refit of a row.

    Example:
        >>> name_refit("kvzip, 8 bits")
        'refit(kvzip), 8 bits'
    """
    policy, comma, options = base.partition(",")
    return f"refit({policy}){comma}{options}"


def write_table(folder: Path) -> str:
    """Write a row for each kind of probe, base and budget: nats a token above the full cache's, and the paired difference."""
    found = []
    for use in USED:
        path = folder / f"{use.task}.jsonl"
        results, names = Results(path), {line["digest"]: line["sample"] for line in read_lines(path)}
        unseen = [digest for digest, name in names.items() if int(name.split()[-1]) >= CHOSEN_ON.get(use.task, 0)]
        for base in BASES:
            for k in BUDGETS:
                if gained := results.differences(use, (name_refit(base), k), (base, k), only=unseen):
                    both = set(unseen) & results.lines[name_refit(base), k].keys() & results.lines[base, k].keys()
                    labels = (base, name_refit(base))
                    loss = [estimate(results.differences(use, (label, k), (FULL, 1.0), only=both)) for label in labels]
                    found.append((use.title, base, k, loss, gained))
    raised = correct_holm([compare_with_zero(gained) for *_, gained in found])
    rows = [
        [
            title,
            f"`{base}`",
            f"{k:g}",
            *(f"{one.mean:.3f}" for one in loss),
            str(estimate(gained)),
            f"{p:.2g}",
            str(len(gained)),
        ]
        for (title, base, k, loss, gained), p in zip(found, raised, strict=True)
    ]
    return markdown(["", "base", "k", "base loses", "its refit loses", "difference", "p", "texts"], rows)
