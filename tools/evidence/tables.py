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


def shown_share(estimate: Estimate) -> str:
    """Format a share and its interval in percent."""
    return f"{100 * estimate.mean:.0f}% [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def mark(text: str, side: int) -> str:
    """Mark a difference of losses that is sure: bold below zero, where less is lost, and slanted above."""
    return f"**{text}**" if side < 0 else f"*{text}*" if side > 0 else text
