"""A policy is five parts put together, and a named policy is one row of a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import KVPatchError, suggest
from .scopes import DeviationScope, Scope
from .scores import (
    Accumulated,
    AccumulatedQuantized,
    DilatedRecency,
    GumbelSoftmax,
    KeyNorm,
    Last,
    Mean,
    Moment,
    ObservationWindow,
    Random,
    Recency,
    Score,
)
from .selection import order, tiers

SCHEDULES = ("prompt", "decode", "both")


@dataclass(frozen=True)
class Policy:
    """Which tokens stay: a score, a scope of what may go, and when.

    score: None never evicts. schedule: "prompt" evicts once, after the prompt; "decode" one token per generated token,
    the prompt being kept whole; "both" does both. Allocation is uniform and selection is top-k. source: the paper.
    Change options with `with_options`, or build a new policy from the parts and hand it to `patched` or
    `register_policy`.
    """

    name: str
    score: Score | None
    scope: Scope = Scope()
    schedule: str = "both"
    source: str = ""

    def __post_init__(self) -> None:
        if self.score is not None and not isinstance(self.score, Score):
            raise KVPatchError(f"score={self.score!r} is not a kvpatch Score (see kvpatch.policies.scores).")
        if not isinstance(self.scope, Scope):
            raise KVPatchError(f"scope={self.scope!r} is not a kvpatch Scope (see kvpatch.policies.scopes).")
        if self.schedule not in SCHEDULES:
            raise KVPatchError(f"schedule={self.schedule!r} must be one of {', '.join(map(repr, SCHEDULES))}.")
        if self.score is not None and self.schedule not in self.score.schedules:
            raise KVPatchError(
                f"schedule={self.schedule!r}: policy {self.name!r} scores tokens by the prompt's last rows, which a "
                f"generated token does not have; use schedule={' or '.join(map(repr, self.score.schedules))}."
            )
        for part in self._parts():
            part.check()

    def _parts(self) -> list[Score | Scope]:
        return [part for part in (self.score, self.scope) if part is not None]

    def options(self) -> dict[str, Any]:
        """Every option by name with its present value."""
        return {f.name: getattr(part, f.name) for part in self._parts() for f in dataclasses.fields(part)}

    def with_options(self, schedule: str | None = None, **options: Any) -> Policy:
        """The same policy with some options changed.

        Raises:
            KVPatchError: an option this policy does not have (the message lists those it has), or a bad value.
        """
        known = self.options()
        for name in options:
            if name not in known:
                raise KVPatchError(
                    f"Policy {self.name!r} has no option {name!r}.{suggest(name, known)} It has: {', '.join(known)}."
                )

        def replace(part: Any) -> Any:
            own = {f.name for f in dataclasses.fields(part)}
            return dataclasses.replace(part, **{k: v for k, v in options.items() if k in own})

        return dataclasses.replace(
            self,
            score=replace(self.score) if self.score is not None else None,
            scope=replace(self.scope),
            schedule=schedule or self.schedule,
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names in scores.STATISTICS that must be summed beside each key."""
        assert self.score is not None
        return tuple(dict.fromkeys((*self.score.statistics, *self.scope.statistics)))

    @property
    def rows(self) -> str:
        """Which query rows of the prompt the policy must see: "none", "tail" or "all"."""
        assert self.score is not None
        return "all" if self.statistics else self.score.rows

    def order(self, moment: Moment, empty: Tensor | None) -> Tensor:
        """One int64 per cached token [B,H,S]: the lowest goes first (selection.py)."""
        assert self.score is not None
        position = moment.positions_BHS
        protected = self.scope.mask(moment)
        dead = None
        if moment.sliding is not None:
            # out of the sliding window of every later query: it can never be attended to again
            dead = moment.newest_B11 + 1 - position >= moment.sliding
        return tiers(
            order(self.score.value(moment), position, self.score.signed), protected=protected, dead=dead, empty=empty
        )


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
    Policy("key_norm",        KeyNorm(),              source="L2-norm baseline"),
)
# fmt: on

# what later parts of the library will bring; asked for now, they get a plain answer
PLANNED = ("pyramidkv", "adakv", "critical_snapkv", "critical_pyramidkv", "critical_adakv")


def policies() -> tuple[str, ...]:
    """Names of all registered policies, in the order of the table."""
    return tuple(POLICIES)


def get_policy(name: str) -> Policy:
    """The policy registered as `name`. Raises KVPatchError for an unknown one, with the nearest name."""
    if name in PLANNED and name not in POLICIES:
        raise KVPatchError(f"Policy {name!r} is not in this version of kvpatch. Available: {', '.join(POLICIES)}.")
    if not isinstance(name, str) or name not in POLICIES:
        raise KVPatchError(f"Unknown policy {name!r}.{suggest(name, POLICIES)} Known: {', '.join(POLICIES)}.")
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
