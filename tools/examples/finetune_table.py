"""docs/finetuning.md, from the runs of finetune_under_budget."""

from __future__ import annotations

from statistics import mean
from typing import Any

Run = dict[str, Any]


def short(run: Run) -> str:
    """One run in a line."""
    parts = (f"{arm} " + " ".join(f"{way} {mean(run[arm][way]):.3f}" for way in WAYS) for arm in ARMS)
    return f"{run['model']} seed {run['seed']}: " + "; ".join(parts)


ARMS, WAYS = ("shipped", "control", "tuned"), ("full", "block", "token")


def page(runs: list[Run]) -> str:
    return "\n".join(map(short, runs))
