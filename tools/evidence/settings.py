"""Policies as they are compared: a label, a name and options. Budgets are shares of the prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MIDDLE, MOST = 0.2, 60
"""The budget at which everything is measured, and on how many samples."""
NULL = "random, ends kept"
"""What a policy must beat: eviction at random that spares the prompt's first four and its newest 64 tokens."""

RARER = ("chunk_kv", "compactor", "cur", "defensive_snapkv", "dropkv", "key_diff", "kvzip_plus", "lag_kv", "pyramidkv")
"""Policies measured on a few samples, for their own pages alone."""


@dataclass(frozen=True)
class Row:
    """A policy with options, under a label. beside: measured only where it is named."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    beside: bool = False


ROWS = {
    row.label: row
    for row in (
        Row("random", "random"),
        Row(NULL, "random", {"sinks": 4, "recent": 64}),
        Row("streaming_llm", "streaming_llm"),
        Row("h2o", "h2o"),
        Row("tova", "tova"),
        Row("roco", "roco"),
        Row("keyformer", "keyformer"),
        Row("keyformer, no noise", "keyformer", {"noise": "none"}),
        Row("snapkv", "snapkv"),
        Row("adakv", "adakv"),
        Row("critical_adakv", "critical_adakv"),
        Row("expected_attention", "expected_attention"),
        Row("leverage", "leverage"),
        Row("kvzip", "kvzip", {"floor": 0.2}),
        Row("refit(kvzip)", "refit(kvzip)", {"floor": 0.2}),
        Row("refit(snapkv)", "refit(snapkv)", beside=True),
        *(Row(name, name, beside=True) for name in RARER),
        *(
            Row(f"{name}, {bits} bits", name, {"bits": bits, **({"floor": 0.2} if "kvzip" in name else {})}, beside=True)
            for name in ("full", "h2o", "snapkv", "kvzip", "refit(kvzip)")
            for bits in (8, 4)
        ),
    )
}
LABELS = tuple(label for label, row in ROWS.items() if not row.beside)
"""Of the rows that stand in tables and pictures of all policies."""
FULL, UNREAD = "full", "text not read"


def rows_of(*labels: str) -> tuple[Row, ...]:
    """Return the rows of these labels."""
    return tuple(ROWS[label] for label in labels)


@dataclass(frozen=True)
class Setting:
    """A row at a budget."""

    row: Row
    k: float

    @property
    def key(self) -> str:
        """One string for label, policy, options and budget, by which lines are found again."""
        return json.dumps([self.row.label, self.row.policy, self.row.options, self.k], sort_keys=True)


@dataclass(frozen=True)
class Cells:
    """What is measured at one budget: rows, and on how many samples."""

    k: float
    samples: int
    rows: tuple[Row, ...] = rows_of(*LABELS)
