"""Models with sinks beside those of the same architectures without: what the papers say that needs sinks.

A section of docs/small-models.md: `python -m tools.evaluation.results --alone sinks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.training import sinks, tasks
from tools.training.train import card_of

from . import reading
from .claims import Claim
from .models import BESIDE as PLAIN
from .models import SUNK as MODELS
from .papers import CLAIMS
from .summary import INTERVALS, budget, markdown, shown
from .table import Table

CRITICAL = ("snapkv", "critical_snapkv", "adakv", "critical_adakv")
POLICIES: dict[str, tuple[str, ...]] = {
    "recall": ("window", "streaming_llm", *CRITICAL),
    "needle": ("window", "streaming_llm", *CRITICAL),
    "perturbation": CRITICAL,
}
"""Of each task what is measured."""

TITLE = "Models with sinks"
TEXT = """
Large models put much attention on their first token, whose value is almost nothing. These models learned that, too
(`python -m tools.training llama-sinks`, `tools/training/sinks.py`): from rows of the Bigram-Backcopy task, in which heads
have nothing to do at most tokens, and from a penalty on attention to other tokens than `<bos>`, and on its value, beyond
a fifth of a head's time. A head has a sink where `<bos>` gets over 0.3 of its attention on rows of recall and its value
is below a quarter of the median. Beside them are the models of the same architectures that were trained without either.
`python -m tools.evaluation.results --alone sinks` makes this section. All of it is exploratory but what stands among the
primary comparisons, and says nothing of architectures that the first table does not name.
"""
SCENARIOS = ("in", "after", "stream")


def section(plain: dict[str, Table], sunk: dict[str, Table]) -> str:
    """The section, from the lines of both groups; nothing where there are none."""
    if not plain or not sunk:
        return ""
    blocks = [f"## {TITLE}", TEXT.strip(), INTERVALS, heads()]
    blocks += ["### What the papers say, without and with sinks", claims(plain, sunk)]
    blocks += [reading.section({"without sinks": PLAIN, "with sinks": MODELS})]
    if "recall" in plain and "recall" in sunk:
        blocks += ["### A window and its sinks", WINDOWS, windows(plain["recall"], sunk["recall"])]
    if "perturbation" in plain and "perturbation" in sunk:
        blocks += ["### Heads that two-stage selection moves less", LOWER, lower(plain["perturbation"], sunk["perturbation"])]
    return "\n\n".join(blocks) + "\n"


WINDOWS = "Recall, `right`. Differences are `streaming_llm` less `window`: four first tokens in the place of four recent ones."
LOWER = "Share of (layer, head) in which `l1` is lower with two-stage selection, equal sets left out, over all four texts."


def heads() -> str:
    """Of each model what its first token gets, and what it brings."""
    rows = [row(name, sinks.measure(tasks.load(name)[0])) for name in (*PLAIN, *MODELS)]
    columns = ("", "heads with a sink", "attention on `<bos>`, mean", "at most", "value of a sink, at most")
    return markdown((*columns, "residual, at most", "recall", "needle"), rows)


def row(name: str, found: sinks.Figures) -> list[str]:
    """Of one model: see `heads`."""
    attention = [a for a, _ in sinks.by_head(found)]
    values = [v for a, v in sinks.by_head(found) if sinks.is_sink(a, v)]
    mass = [f"{sum(attention) / len(attention):.2f}", f"{max(attention):.2f}"]
    accuracy = [f"{card_of(name)['accuracy'][task]:.3f}" for task in ("recall", "needle")]
    value, residual = f"{max(values):.2f}" if values else "-", f"{max(found['residual']):.1f}"
    return [name, f"{sinks.share(found):.2f}", *mass, value, residual, *accuracy]


def said() -> Iterator[Claim]:
    """The claims that the section's tables can decide, each once."""
    for claim in (claim for found in CLAIMS.values() for claim in found):
        if claim.task in POLICIES and {claim.a, claim.b} - {""} <= set(POLICIES[claim.task]):
            yield claim


def claims(plain: dict[str, Table], sunk: dict[str, Table]) -> str:
    """A row per claim: the difference, and the verdict, in both groups."""
    rows = []
    for claim in said():
        against = f"`{claim.b}`" if claim.b else f"{claim.level:g}"
        what = f"`{claim.a}` {'above' if claim.sign > 0 else 'below'} {against}, {claim.metric}"
        what += "".join(f", {value}" for value in claim.where.values())
        row = [claim.source, what]
        for tables in (plain, sunk):
            estimate = claim.measured(tables[claim.task]) if claim.task in tables else None
            agreeing = "-" if estimate is None else f"{estimate.signs[0 if claim.sign > 0 else 1]} of {estimate.models}"
            row += [shown(estimate, signed=True), agreeing, claim.verdict(estimate)]
        rows.append(row)
    columns = ("paper", "measured", "without sinks", "models as said", "", "with sinks", "models as said", "")
    return markdown(columns, rows)


def windows(plain: Table, sunk: Table) -> str:
    """By scenario and budget: what a window keeps right, and what four sinks add."""
    rows = []
    for scenario in SCENARIOS:
        pair = [table.where(scenario=scenario) for table in (plain, sunk)]
        for k in pair[0].budgets:
            cells: list[Any] = [scenario, budget(k)]
            for table in pair:
                cells.append(shown(table.mean(("window", k), "right")))
                cells.append(shown(table.difference(("streaming_llm", k), ("window", k), "right"), signed=True))
            rows.append(cells)
    return markdown(("question", "k", "window, without sinks", "difference", "window, with sinks", "difference"), rows)


def lower(plain: Table, sunk: Table) -> str:
    """By model, or group, and policy the share of heads that two-stage selection moves less, a column per budget."""
    names, budgets = ("critical_snapkv", "critical_adakv"), plain.budgets
    parts = [("without sinks", plain), ("with sinks", sunk)]
    parts += [(model, table.where(model=model)) for table in (plain, sunk) for model in table.models]
    rows = [
        [label, *(shown(table.mean((name, k), "heads_lower")) for name in names for k in budgets)] for label, table in parts
    ]
    return markdown(("", *(f"`{name}`, k = {budget(k)}" for name in names for k in budgets)), rows)
