"""Output of `kvpatch demo`: a table, a strip per policy, and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import plotting
from ..report import Report, block
from .needles import Text


@dataclass(frozen=True)
class Outcome:
    """Outcome of one policy and budget; the first outcome is the unpatched model's.

    Attributes:
        policy: name of the policy.
        k: the budget.
        right: bool [B], questions that were answered right.
        nbytes: bytes allocated for keys and values.
        later: as `right`, for questions that came after the eviction.
        loss: of the source file, nats per token.
        tokens: likeliest next tokens of the source file.
        seconds: time of the decode steps on the source file.
    """

    policy: str
    k: float
    right: Tensor
    nbytes: int
    later: Tensor | None = None
    loss: float | None = None
    tokens: Tensor | None = None
    seconds: float | None = None

    def cells(self, full: Outcome) -> dict[str, str]:
        """Format a row of the table, by column."""
        cells = {"k": f"{self.k:g}", "right": _right(self.right)}
        if self.later is not None:
            cells["later"] = _right(self.later)
        if self.loss is not None and self.tokens is not None and full.tokens is not None:
            cells["perplexity"] = f"{math.exp(self.loss):.2f}"
            cells["as full"] = f"{(self.tokens == full.tokens).float().mean():.0%}"
        cells |= {"KV kB": f"{self.nbytes / 1000:,.0f}", "of full": f"{self.nbytes / full.nbytes:.0%}"}
        if self.seconds and full.seconds:
            cells["speed"] = f"{full.seconds / self.seconds:.2f}"
        return cells


def _right(right: Tensor) -> str:
    return f"{int(right.sum())}/{len(right)}"


Reports = dict[tuple[str, float], Report]


def show(console: Console, outcomes: list[Outcome], reports: Reports, text: Text) -> None:
    """Print the table and the strips."""
    full = outcomes[0]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", style="cyan", no_wrap=True)
    for head in full.cells(full):
        table.add_column(head, justify="right")
    for one in outcomes:
        table.add_row(one.policy, *one.cells(full).values())
    console.print(table)
    shown = " ".join(line for head, line in _LEGEND.items() if head in full.cells(full))
    console.print(shown, style="dim")
    _strips(console, reports, text)


_LEGEND = {
    "right": "right: answers, the question being part of the prompt.",
    "later": "later: answers where the question comes when the context has been read and evicted.",
    "perplexity": "perplexity: of the source file's next tokens.",
    "as full": "as full: share of them where the likeliest token is the full cache's.",
    "speed": "speed: tokens/s while decoding it, the unpatched model being 1.",
}


def _strips(console: Console, reports: Reports, text: Text, width: int = 64) -> None:
    """Print a line per policy at the smallest budget: the share of heads that kept each part of the first prompt."""
    k = min(share for _, share in reports)
    kept = {policy: report.kept().float().mean((0, 1)) for (policy, share), report in reports.items() if share == k}
    n = len(next(iter(kept.values())))
    edges = torch.linspace(0, n, min(width, n) + 1).round().long().tolist()

    def letter(a: int, b: int) -> str:
        for spans, mark in ((text.marks.question, "?"), (text.marks.asked, "A"), (text.marks.needles, "n")):
            if any(start < b and stop > a for start, stop in spans):
                return mark
        return " "

    console.print(f"\nThe first prompt, as k={k} left it (n needle, A the one asked for, ? question):")
    console.print(f"{'':<14} {''.join(letter(a, b) for a, b in pairwise(edges))}")
    for policy, share in kept.items():
        line = "".join(block(float(share[a:b].mean())) for a, b in pairwise(edges))
        console.print(f"[cyan]{policy:<14}[/cyan]|{line}|")


def picture(outcomes: list[Outcome], reports: Reports, text: Text) -> Any:
    """Draw a column of panels per budget, a panel per policy."""

    def panel(one: Outcome) -> plotting.Panel:
        title = f"{one.policy}, k={one.k:g}: {_right(one.right)} answers right"
        return plotting.Panel(title, reports[one.policy, one.k].kept().float().mean(1))

    ks = dict.fromkeys(k for _, k in reports)
    columns = [[panel(one) for one in outcomes if (one.policy, k) in reports and one.k == k] for k in ks]
    return plotting.panels(columns, text.marks, "Which tokens of one prompt each policy kept when it had been read")
