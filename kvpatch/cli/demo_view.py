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
from ..policies.facts import FACTS
from ..report import Report
from ..report_text import block
from .needles import TextBatch


@dataclass(frozen=True)
class DemoOutcome:
    """Outcome of one policy and budget; the first outcome is the unpatched model's.

    Attributes:
        policy: name of the policy.
        k: the budget.
        right: bool [B], questions that were answered right.
        nbytes: bytes allocated for keys and values.
        later: as `right`, for questions that came after the eviction.
        loss: of the source file, nats per token.
        tokens: likeliest next tokens of the source file.
    """

    policy: str
    k: float
    right: Tensor
    nbytes: int
    later: Tensor
    loss: float
    tokens: Tensor

    def format_cells(self, full: DemoOutcome) -> dict[str, str]:
        """Return the cells of a row of the demo's table, by column. full: the unpatched model's outcome, to compare with.

        `show` calls it when all is measured. later: answers to questions that came after the prompt's eviction. "as full":
        share of predictions that equal those of `full`.
        """
        return {
            "k": f"{self.k:g}",
            "right": _format_right(self.right),
            "later": _format_right(self.later),
            "perplexity": f"{math.exp(self.loss):.2f}",
            "as full": f"{(self.tokens == full.tokens).float().mean():.0%}",
            "KV kB": f"{self.nbytes / 1000:,.0f}",
            "of full": f"{self.nbytes / full.nbytes:.0%}",
        }

    def to_dict(self, full: DemoOutcome) -> dict[str, Any]:
        """Return a row of --json as plain values, for `run`. full: the unpatched outcome."""
        return {
            "policy": self.policy,
            "k": self.k,
            "questions": len(self.right),
            "right": int(self.right.sum()),
            "right_later": int(self.later.sum()),
            "perplexity": math.exp(self.loss),
            "as_full": float((self.tokens == full.tokens).float().mean()),
            "nbytes": self.nbytes,
            "full_nbytes": full.nbytes,
        }


def _format_right(right: Tensor) -> str:
    return f"{int(right.sum())}/{len(right)}"


Reports = dict[tuple[str, float], Report]


def show_story(console: Console, policies: list[str]) -> None:
    """Print what is asked of the policies, and what each of them is for. `run` calls it before anything is measured."""
    console.print(
        "\nA prompt hides four facts, the needles, and asks for one. Each policy keeps the share k of the prompt's tokens and "
        "answers from those.\n"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name in policies:
        table.add_row(name, FACTS[name].describe_use() if name in FACTS else "")
    console.print(table)
    console.print()


def show(console: Console, outcomes: list[DemoOutcome], reports: Reports, text: TextBatch) -> None:
    """Print the demo's table, and a line of characters per policy that shows which parts of one prompt it kept.

    `run` calls it when all is measured. reports: which tokens each policy kept of the first prompt, by policy and budget.
    """
    full = outcomes[0]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", style="cyan", no_wrap=True)
    for head in full.format_cells(full):
        table.add_column(head, justify="right")
    for one in outcomes:
        table.add_row(one.policy, *one.format_cells(full).values())
    console.print(table)
    console.print(_LEGEND, style="dim")
    _print_strips(console, reports, text)


_LEGEND = (
    "right: answers, the question being part of the prompt. later: answers where the question comes when the context has been "
    "read and evicted. perplexity: of the source file's next tokens. as full: share of them where the likeliest token is the "
    "full cache's."
)


def _print_strips(console: Console, reports: Reports, text: TextBatch, width: int = 64) -> None:
    """Print a line per policy at the smallest budget: the share of heads that kept each part of a prompt.

    `show` calls it last.
    """
    k = min(share for _, share in reports)  # reports: by policy and budget
    kept = {  # by policy: for each token of the prompt, the share of heads that kept it
        policy: report.kept().float().mean((0, 1))
        for (policy, share), report in reports.items()
        if share == k or policy == "full"
    }
    n = len(next(iter(kept.values())))
    # each character stands for the tokens between two neighbouring edges
    edges = torch.linspace(0, n, min(width, n) + 1).round().long().tolist()

    def mark_part(a: int, b: int) -> str:
        """Return the mark above the strips for tokens a to b of the prompt: "?" question, "A" asked, "n" needle."""
        for spans, mark in ((text.marks.question, "?"), (text.marks.asked, "A"), (text.marks.needles, "n")):
            if any(start < b and stop > a for start, stop in spans):
                return mark
        return " "

    console.print(f"\nThe first prompt, as k={k} left it (n needle, A the one asked for, ? question):")
    console.print(f"{'':<14}  {''.join(mark_part(a, b) for a, b in pairwise(edges))}")
    for policy, share in kept.items():
        line = "".join(block(float(share[a:b].mean())) for a, b in pairwise(edges))  # block: a character of that height
        console.print(f"{policy:<14} |{line}|")


def draw_picture(outcomes: list[DemoOutcome], reports: Reports, text: TextBatch) -> Any:
    """Draw which tokens of a prompt each policy kept: a column per budget, a panel per policy. `run` saves the figure."""

    def make_panel(one: DemoOutcome) -> tuple[str, Tensor]:
        """Return a panel's title, and the share [L,T] of each layer's heads that kept each token of the prompt."""
        name = one.policy if one.policy == "full" else f"{one.policy}, k={one.k:g}"
        return f"{name}: {_format_right(one.right)} answers right", reports[one.policy, one.k].kept().float().mean(1)

    ks = dict.fromkeys(one.k for one in outcomes if one.policy != "full")
    columns = [[make_panel(one) for one in outcomes if one.k == k or one.policy == "full"] for k in ks]
    return plotting.draw_panels(columns, text.marks, "Which tokens of one prompt each policy kept when it had been read")
