"""The named policies: a table, combinations, and the registry."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ..errors import KVPatchError, suggest
from .allocation import Adaptive, Pyramid
from .policy import Policy
from .scopes import DeviationScope, Scope
from .scores import (
    Accumulated,
    AccumulatedQuantized,
    DilatedRecency,
    GumbelSoftmax,
    KeyNorm,
    Last,
    Mean,
    ObservationWindow,
    Random,
    Recency,
    Score,
)
from .selection import TwoStage

_COMBINED = re.compile(r"\s*(critical|adaptive|pyramid)\((.+)\)\s*")

# ---- combinations ----


def critical(base: str | Policy, **options: Any) -> Policy:
    """`base` with CriticalKV's two-stage selection instead of the top by score [CriticalKV Algorithm 1].

    Args:
        base: a name or a Policy.
        **options: alpha, eps, norm (see TwoStage), or options of the base.

    Raises:
        KVPatchError: the base's score is no weight (it may be negative), or an unknown option.
    """
    return _with("critical", base, selection=TwoStage()).with_options(**options)


def adaptive(base: str | Policy, **options: Any) -> Policy:
    """`base` with a budget that the heads of a layer share by their scores [AdaKV]; options: floor."""
    return _with("adaptive", base, over_heads=Adaptive()).with_options(**options)


def pyramid(base: str | Policy, **options: Any) -> Policy:
    """`base` with budgets that fall from the first layer to the last [PyramidKV]; options: beta."""
    return _with("pyramid", base, over_layers=Pyramid()).with_options(**options)


def _with(prefix: str, base: str | Policy, **part: Any) -> Policy:
    policy = base if isinstance(base, Policy) else get_policy(base)
    if policy.score is None:
        raise KVPatchError(f"{prefix}({policy.name!r}): {policy.name!r} never evicts, so there is nothing to combine.")
    return dataclasses.replace(policy, name=f"{prefix}_{policy.name}", **part)


def _table(*rows: Policy) -> dict[str, Policy]:
    return {row.name: row for row in rows}


# fmt: off
POLICIES = _table(
    Policy("full",            None,                   schedule="both", source="the baseline: never evicts"),
    Policy("random",          Random(),               source="RoCo, baselines"),
    Policy("window",          Recency(),              source="RoCo 4.1"),
    Policy("dilated_window",  DilatedRecency(),       source="Keyformer Figure 2"),
    Policy("streaming_llm",   Recency(),              Scope(sinks=4), source="StreamingLLM"),
    Policy("key_attention",   Accumulated(),          source="Keyformer 2.3.1"),
    Policy("h2o",             Accumulated(),          Scope(recent=0.5), source="H2O"),
    Policy("scissorhands",    AccumulatedQuantized(), Scope(recent=0.5), source="ScissorHands"),
    Policy("tova",            Last(),                 source="TOVA"),
    Policy("roco",            Mean(),                 DeviationScope(recent=10), source="RoCo 4.3"),
    Policy("keyformer",       GumbelSoftmax(),        Scope(recent=0.3), source="Keyformer Algorithm 1"),
    Policy("snapkv",          ObservationWindow(),    schedule="prompt", source="SnapKV"),
    Policy("pyramidkv",       ObservationWindow(),    schedule="prompt", source="PyramidKV", over_layers=Pyramid()),
    Policy("adakv",           ObservationWindow(),    schedule="prompt", source="AdaKV", over_heads=Adaptive()),
    Policy("key_norm",        KeyNorm(),              source="L2-norm baseline"),
)
# fmt: on
for _base in ("snapkv", "pyramidkv", "adakv"):
    _critical = dataclasses.replace(critical(POLICIES[_base]), source="CriticalKV Algorithms 1 and 2")
    POLICIES[_critical.name] = _critical


def list_policies() -> tuple[str, ...]:
    """Names of all registered policies, in the order of the table; `critical`, `adaptive` and `pyramid` combine any of them."""
    return tuple(POLICIES)


def get_policy(name: str) -> Policy:
    """The policy registered as `name`, or a combination written out, such as "critical(adaptive(roco))".

    Raises:
        KVPatchError: an unknown name, with the nearest one.
    """
    if isinstance(name, str) and (combined := _COMBINED.fullmatch(name)) is not None:
        return {"critical": critical, "adaptive": adaptive, "pyramid": pyramid}[combined[1]](combined[2])
    if isinstance(name, Score):
        raise KVPatchError(f"{name!r} is a score, which is one part of a policy: give Policy('my_policy', {name!r}).")
    if not isinstance(name, str) or name not in POLICIES:
        meant = suggest(name, POLICIES) or suggest(str(name).lower(), POLICIES)
        raise KVPatchError(f"Unknown policy {name!r}.{meant} Known: {', '.join(POLICIES)}.")
    return POLICIES[name]


def register_policy(name: str, policy: Policy) -> None:
    """Make `patched(model, policy=name)` work for a Policy of your own.

    Raises:
        KVPatchError: `name` is taken or no identifier, or `policy` is no Policy.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise KVPatchError(f"A policy's name must be an identifier such as 'my_policy', not {name!r}.")
    if name in POLICIES:
        raise KVPatchError(f"A policy named {name!r} is already registered; choose another name.")
    if not isinstance(policy, Policy):
        raise KVPatchError(
            f"register_policy takes a kvpatch.Policy, not {type(policy).__name__}: build one from a score and a scope, "
            "or change a named one with get_policy('h2o').with_options(recent=0.1)."
        )
    POLICIES[name] = dataclasses.replace(policy, name=name)
