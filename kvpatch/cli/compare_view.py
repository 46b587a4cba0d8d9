"""Output of `kvpatch compare`: a table with notes, one sentence of advice, and a picture."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import plotting
from ..evaluation.divergence import Figures, Result, Row

CHANCE = "random"
"""Baseline that every policy should beat: always measured, never advised."""

_HEADS = ("policy", "k", "tokens", "KL", "worst", "as full", "loss", "KV kB", "of full", "time")
_LEGEND = (
    "tokens: held per head at the end. KL: mean over the fed tokens of KL(full || evicted) of the next token, nats; worst: "
    "the largest. The prediction after the prompt itself is left out: nothing had been evicted before it. as full: share of "
    "predictions whose likeliest token is the full cache's. loss: by how much the fed text's own rises, nats per token. KV "
    "kB: keys and values allocated at the end. time: per fed token, the unpatched model being 1; rough, for each was run once."
)


def show(console: Console, result: Result, tolerance: float, agreement: float) -> None:
    """Print the table, its notes and the advice."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    table.add_row(*_full(result))
    for _, group in groupby(result.rows, key=lambda row: row.k):
        table.add_row()
        for row in group:
            table.add_row(*_cells(row, result))
    console.print(table)
    console.print(_LEGEND, style="dim", soft_wrap=True)
    for line in notes(result.rows):
        console.print(line, soft_wrap=True)
    console.print(f"\n{advice(result, tolerance, agreement)}", soft_wrap=True)
    console.print("One text is one text: try several of yours before you choose.", soft_wrap=True)


def _full(result: Result) -> tuple[str, ...]:
    """Format the unpatched model's row."""
    nothing = Figures(0, 0.0, 0.0, 1.0, 0.0, result.nbytes, (result.n + result.fed,) * 2, result.seconds)
    return _cells(Row("full", "", nothing), result)


def _cells(row: Row, result: Result) -> tuple[str, ...]:
    name, one = f"{row.policy} (chance)" if row.policy == CHANCE else row.policy, row.figures
    if one is None:
        return name, row.k, "", "refused"
    low, high = one.held
    return (
        name,
        row.k + "*" * bool(one.cut),
        f"{low:,}" if low == high else f"{low:,}-{high:,}",
        f"{one.kl:.4f}",
        f"{one.worst:.2f}",
        f"{one.agreement:.0%}",
        "" if one.loss is None else f"{one.loss:+.3f}",
        f"{one.nbytes / 1000:,.0f}",
        f"{one.nbytes / result.nbytes:.0%}",
        f"{one.seconds / result.seconds:.2f}" if result.seconds else "",
    )


def notes(rows: list[Row]) -> list[str]:
    """Return a line per policy that protects more than a budget holds, and a line per reason of refusal."""
    cut: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for row in rows:
        if row.figures is None:
            refused.setdefault(row.error, []).append(f"{row.policy} at k={row.k}")
        for option, (size, left) in row.figures.cut.items() if row.figures else ():
            cut.setdefault(row.policy, []).append(f"{option} {size} cut to {left} at k={row.k}")
    reason = "protects more than the budget holds, which leaves nothing to choose by score"
    lines = [f"* {policy} {reason}: {', '.join(sizes)}." for policy, sizes in cut.items()]
    return lines + [f"refused: {', '.join(which)}: {why}" for why, which in refused.items()]


def advice(result: Result, tolerance: float, agreement: float) -> str:
    """Advise the setting with the fewest bytes within both limits, or the one with the lowest KL if none is within them.

    Ties go to the lower KL. Settings that hold as much as the full cache, and chance, are never advised.
    """
    candidates = [
        (row, row.figures)
        for row in result.rows
        if row.figures is not None and row.policy != CHANCE and row.figures.nbytes < result.nbytes
    ]
    limits = f"a KL of {tolerance:g} nats per token and {agreement:.0%} agreement"
    if not candidates:
        return "No setting that holds less than the full cache was measured, so there is none to advise."
    within = [pair for pair in candidates if _within(pair[1], tolerance, agreement)]
    if not within:
        row, one = min(candidates, key=lambda pair: pair[1].kl)
        return f"None of these settings stays within {limits} on this text; the closest is {_described(row, one, result)}."
    row, one = min(within, key=lambda pair: (pair[1].nbytes, pair[1].kl))
    said = f"The cheapest of these settings within {limits} on this text is {_described(row, one, result)}"
    chance = next((other.figures for other in result.rows if (other.policy, other.k) == (CHANCE, row.k)), None)
    if chance is not None and _within(chance, tolerance, agreement):
        return f"{said}; eviction at random stays within it there too, so this text cannot tell policies apart."
    return f"{said}."


def _within(one: Figures, tolerance: float, agreement: float) -> bool:
    return one.kl <= tolerance and one.agreement >= agreement


def _described(row: Row, one: Figures, result: Result) -> str:
    kl, share = f"a KL of {one.kl:.4f} (worst token {one.worst:.2f})", f"{one.nbytes / result.nbytes:.0%}"
    return f"{row.policy} at k={row.k}: {share} of the full cache's bytes, {kl}, {one.agreement:.1%} agreement"


def picture(result: Result, tolerance: float, title: str) -> Any:
    """Draw KL against the budget, a line per policy."""
    measured = [(row, row.figures) for row in result.rows if row.figures is not None]
    curves: dict[str, list[tuple[int, float]]] = {row.policy: [] for row, _ in measured}
    for row, one in sorted(measured, key=lambda pair: pair[1].budget):
        curves[row.policy].append((one.budget, one.kl))
    return plotting.divergence(curves, CHANCE, {one.budget: row.k for row, one in measured}, tolerance, title)
