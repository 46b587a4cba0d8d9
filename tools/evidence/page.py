"""Tables, picture and sentences of the first part of docs/results.md, from lines of JSON."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .runs import read_lines
from .settings import FULL, LABELS, MIDDLE, NULL, UNREAD
from .statistics import Estimate, estimate, estimate_share, find_sides
from .tables import mark, markdown, shown_share

Cell = tuple[str, float]
"""A label and a budget."""
WHOLE: Cell = (FULL, 1.0)


@dataclass(frozen=True)
class Use:
    """A table of the page: one kind of probe of a task. field: of the line; per: what one unit of the figure is."""

    title: str
    task: str
    kind: str
    field: str
    per: str
    about: str


USES = (
    Use("A fact, the question in the prompt", "asked", "fact", "nats", "digit",
        "Four four-digit codes in 730 to 830 tokens of prose, one asked at the prompt's end."),
    Use("A fact, the question after compression", "document", "fact", "nats", "digit",
        "Such prose is read and compressed; then two of its four codes are asked, each from the same cache."),
    Use("The text goes on", "document", "next tokens", "kl", "token",
        "The next 63 tokens of the same prose, as far from the full cache's predictions as the table says."),
    Use("Code, the request in the prompt", "code", "body", "nats", "token",
        "800 to 1,300 tokens of Python; the prompt ends with the request to repeat a function, whose next 48 tokens count."),
    Use("Code, the request after compression", "code-later", "body", "nats", "token",
        "The same functions, asked after compression."),
    Use("Instructions of the system prompt", "instructions", "instruction", "nats", "token",
        "Four rules in the system prompt, 560 tokens of prose, then a request for each rule's words."),
    Use("The worst instruction", "instructions", "instruction", "worst", "token",
        "The same, of each prompt the rule that lost most."),
    Use("Tool calls over a conversation", "tools", "call", "nats", "token",
        "BFCL's conversations of 480 to 1,110 tokens, the budget held over all turns; the last turn's calls are judged."),
    Use("A list, the question in the prompt", "lists", "code", "nats", "digit",
        "Forty keys with a four-digit code each, some 460 tokens; the prompt ends with the question for one."),
    Use("A list, the questions after compression", "lists-later", "code", "nats", "digit",
        "The same lists, of which four codes are asked, each from the same cache."),
    Use("HumanEval", "human-eval", "solution", "nats", "token",
        "Three solved problems and a fourth, whose published solution is judged to its 64th token."),
    Use("A chat of eight turns", "turns", "code", "nats", "digit",
        "A note of some hundred tokens in each turn, the budget held over all; the last turn asks for four of the codes."),
    Use("A long text, the question in the prompt", "asked-long", "fact", "nats", "digit",
        "Four codes in 3,000 tokens of prose, one asked at the prompt's end."),
    Use("A long text, the question after compression", "document-long", "fact", "nats", "digit",
        "Such prose is read and compressed; then two of its four codes are asked, each from the same cache."),
    Use("A long text goes on", "document-long", "next tokens", "kl", "token",
        "The next 63 tokens of the same prose."),
)  # fmt: skip


class Results:
    """Lines of one use, by label, budget and sample."""

    def __init__(self, folder: Path, use: Use) -> None:
        self.use = use
        self.lines: dict[Cell, dict[str, dict[str, Any]]] = {}
        for line in read_lines(folder / f"{use.task}.jsonl"):
            self.lines.setdefault((line["label"], line["k"]), {})[line["digest"]] = line

    @property
    def budgets(self) -> list[float]:
        """Budgets at which the null was measured, lowest first."""
        return sorted({k for label, k in self.lines if label == NULL})

    def values(self, cell: Cell) -> dict[str, float]:
        """One value a sample."""
        return {digest: line["kinds"][self.use.kind][self.use.field] for digest, line in self.lines.get(cell, {}).items()}

    def differences(self, a: Cell, b: Cell = WHOLE, only: Collection[str] | None = None) -> list[float]:
        """a's value less b's, sample by sample, for those that both have, in a fixed order. only: digests that count."""
        own, other = self.values(a), self.values(b)
        both = own.keys() & other.keys()
        return [own[digest] - other[digest] for digest in sorted(both if only is None else both & set(only))]

    def bytes(self, cell: Cell) -> float:
        """Mean share of the full cache's bytes."""
        found = [line["bytes"] for line in self.lines[cell].values()]
        return sum(found) / len(found)

    def kept(self, cell: Cell) -> Estimate | None:
        """Share of the full cache's gain over not having read the text that is kept, by a bootstrap over its samples."""
        lost = self.differences(cell)
        gained = self.differences((UNREAD, 0.0), only=self.lines.get(cell, {}))
        return estimate_share(lost, gained) if lost else None

    def compare_with_null(self) -> dict[Cell, int]:
        """-1 where a row loses less than the null, +1 where it loses more, 0 where neither is sure; Holm over the table."""
        cells = [(label, k) for label in LABELS for k in self.budgets if label != NULL]
        return find_sides({cell: found for cell in cells if (found := self.differences(cell, (NULL, cell[1])))})


def write_table(results: Results) -> str:
    """One use: a row for each policy, in the order of the loss at a fifth; the loss beside the full cache with its interval."""
    budgets, sides = results.budgets, results.compare_with_null()
    middle = MIDDLE if MIDDLE in budgets else budgets[0]
    losses = {cell: estimate(found) for cell in results.lines if (found := results.differences(cell))}

    def write_cell(cell: Cell) -> str:
        one = losses.get(cell)
        return mark(f"{one:.2f}", sides.get(cell, 0)) if one else ""

    rows = []
    for label in sorted((label for label in LABELS if (label, middle) in losses), key=lambda label: losses[label, middle].mean):
        kept = results.kept((label, middle))
        share = "" if kept is None else shown_share(kept)
        rows.append([f"`{label}`", *(write_cell((label, k)) for k in budgets), f"{results.bytes((label, middle)):.3f}", share])
    return markdown(["policy", *(f"k = {k:g}" for k in budgets), f"bytes, k = {middle:g}", f"gain kept, k = {middle:g}"], rows)


def describe(results: Results) -> str:
    """Title, what was measured and the two ends: the full cache and the text not read."""
    use = results.use
    full, unread = (estimate(list(results.values(cell).values())) for cell in (WHOLE, (UNREAD, 0.0)))
    ends = f"Full cache {full.mean:.2f}, text not read {unread.mean:.2f} nats a {use.per}; {full.samples} samples."
    return f"### {use.title}\n\n{use.about} {ends}"


def write_section(folder: Path) -> str:
    """All tables, of the uses that have lines."""
    measured = [results for use in USES if (results := Results(folder, use)).budgets]
    return "\n\n".join(f"{describe(results)}\n\n{write_table(results)}" for results in measured)
