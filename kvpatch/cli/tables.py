"""Rows of the tables that `kvpatch policies` and `kvpatch architectures` print."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ..arch.adapter import REGISTRY
from ..policies import POLICIES, Policy

POLICY_COLUMNS = ("policy", "score", "never evicted", "options", "when", "source")
ARCHITECTURE_COLUMNS = ("architecture", "what it is", "attention classes")
_COMMON = {"sinks": 0, "recent": 0, "protect": None, "turns": "all"}  # options of every policy: shown where changed


def policy_rows() -> list[tuple[str, ...]]:
    """Return one row of POLICY_COLUMNS per registered policy."""
    return [_policy_row(policy) for policy in POLICIES.values()]


def _policy_row(policy: Policy) -> tuple[str, ...]:
    if not policy.score.evicts:
        return policy.name, "-", "everything", "", "never", policy.source
    options = {name: value for name, value in policy.options().items() if name not in _COMMON or value != _COMMON[name]}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return policy.name, _score(policy), _kept(policy), given, policy.schedule, policy.source


def _score(policy: Policy) -> str:
    """Name the score and the other parts of a policy, except its scope, after their classes: "gumbel softmax"."""
    parts = [getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name != "scope"]
    return ", ".join(_spaced(type(part).__name__) for part in parts if dataclasses.is_dataclass(part))


def _spaced(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _kept(policy: Policy) -> str:
    """Describe the tokens that the scope protects: "the first 4; the newest 10"."""
    scope, protected = policy.scope, []
    if scope.sinks:
        protected.append(f"the first {scope.sinks}")
    if scope.recent:
        protected.append(f"the newest {_size(scope.recent)}")
    if policy.score.protects_window:
        protected.append("the observation window")
    if scope.deviation:
        protected.append(f"the top {_size(scope.deviation)} by standard deviation")
    return "; ".join(protected) or "-"


def _size(value: Any) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:.0%} of the budget"


def architecture_rows() -> list[tuple[str, ...]]:
    """Return one row of ARCHITECTURE_COLUMNS per adapter."""
    adapters = {id(adapter): adapter for adapter in REGISTRY.values()}
    return [
        (adapter.name, adapter.summary, ", ".join(qualified.rsplit(".", 1)[-1] for qualified in adapter.classes))
        for adapter in adapters.values()
    ]
