"""Tables in Markdown, and estimates in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .statistics import Estimate


def markdown(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a table, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(estimate: Estimate | None, signed: bool = False) -> str:
    """Format a mean and its interval. signed: it is a difference, and bold where several models carry it."""
    if estimate is None:
        return "-"
    sign = "+" if signed else ""
    text = f"{estimate.mean:{sign}.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"**{text}**" if signed and estimate.carried else text
