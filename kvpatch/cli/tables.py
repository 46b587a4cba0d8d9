"""The registries as tables: for `kvpatch policies`, `kvpatch architectures` and the README."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ..arch.adapter import REGISTRY
from ..policies import POLICIES, Policy

POLICY_COLUMNS = ("policy", "score", "never evicted", "options", "when", "source")
ARCHITECTURE_COLUMNS = ("architecture", "what it is", "attention classes")
_COMMON = {"sinks": 0, "recent": 0, "protect": None, "turns": "all"}  # of every policy: shown where they differ


def policy_rows() -> list[tuple[str, ...]]:
    """One row per registered policy, in POLICY_COLUMNS."""
    return [_policy_row(policy) for policy in POLICIES.values()]


def _policy_row(policy: Policy) -> tuple[str, ...]:
    if policy.score is None:
        return policy.name, "-", "everything", "", "never", policy.source
    options = {name: value for name, value in policy.options().items() if name not in _COMMON or value != _COMMON[name]}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return policy.name, _score(policy), _kept(policy), given, policy.schedule, policy.source


def _score(policy: Policy) -> str:
    """The score and the parts beside the scope, by class name: "gumbel softmax"."""
    parts = [getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name != "scope"]
    return ", ".join(_spaced(type(part).__name__) for part in parts if dataclasses.is_dataclass(part))


def _spaced(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _kept(policy: Policy) -> str:
    """What the scope protects, in words."""
    scope, words = policy.scope, []
    if scope.sinks:
        words.append(f"the first {scope.sinks}")
    if scope.recent:
        words.append(f"the newest {_size(scope.recent)}")
    if policy.score is not None and policy.score.protects_tail:
        words.append("the observation window")
    if scope.deviation:
        words.append(f"the top {_size(scope.deviation)} by standard deviation")
    return "; ".join(words) or "-"


def _size(value: Any) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:.0%} of the budget"


def architecture_rows() -> list[tuple[str, ...]]:
    """One row per adapter, in ARCHITECTURE_COLUMNS."""
    adapters = {id(adapter): adapter for adapter in REGISTRY.values()}
    return [
        (adapter.name, adapter.summary, ", ".join(qualified.rsplit(".", 1)[-1] for qualified in adapter.classes))
        for adapter in adapters.values()
    ]


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table for the README; the first column and the options are set as code."""

    def cell(column: str, text: str) -> str:
        return f"`{text}`" if text and column in ("policy", "architecture", "options") else text

    lines = [columns, ("---",) * len(columns)]
    lines += [tuple(cell(column, text) for column, text in zip(columns, row, strict=True)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refresh(text: str) -> str:
    """The README with its two generated tables as the registries have them now."""
    tables = {
        "policies": markdown(POLICY_COLUMNS, policy_rows()),
        "architectures": markdown(ARCHITECTURE_COLUMNS, architecture_rows()),
    }
    for name, table in tables.items():
        start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(stop)
        text = f"{before}{start}\n{table}\n{stop}{after}"
    return text


if __name__ == "__main__":
    from pathlib import Path

    readme = Path(__file__).parents[2] / "README.md"
    readme.write_text(refresh(readme.read_text(encoding="utf-8")), encoding="utf-8")
