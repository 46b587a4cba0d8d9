"""The policy: a record of five exchangeable parts and a schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import KVPatchError, match_name, suggest
from . import own_code
from .allocation import Adaptive
from .budgets import check_count
from .context import EvictionContext, NewTokens
from .merging import Merging
from .naming import SCHEDULES, check_options
from .needs import AnyNeed, Need, Needs
from .needs.second_reading import Rereading
from .quotas import protect_shares
from .scopes import Scope
from .scores import Score
from .selection import FIRST, Selection, eviction_keys, score_keys
from .served import FeatureSet, refuse_pairs
from .slopes import Pyramid
from .statistics import check_names


@dataclass(frozen=True)
class Policy:
    """An eviction policy: the parts that decide which tokens a KV head keeps, and the schedule that decides when.

    Change options with `with_options`, combine policies with `critical`, `adaptive` and `pyramid`, or build a policy from its
    parts and pass it to `patched` or `register_policy`.

    Attributes:
        name: as shown in reports.
        score: importance of each cached token; Never() evicts none.
        scope: tokens protected from eviction.
        schedule: "prompt" evicts once, at the end of the prompt; "decode" keeps the prompt and evicts one token per
            generated token; "both" does both.
        needs: what score and scope read besides positions (policies/needs), each once.
        every: tokens that decode steps evict at once. A head then holds up to `every` - 1 more than its budget between steps,
            and only every so many-th step evicts.
        source: the paper, with section.
        over_layers: Pyramid, or None for the same budget in every layer.
        over_heads: Adaptive or Global, or None for the same budget in every head.
        selection: TwoStage or Chunked, or None to keep the top tokens by score.
        merging: Merge or Refit to change kept values by the evicted ones, or None to drop these.

    Raises:
        KVPatchError: a part of the wrong type, an option out of range, or parts that do not fit together.

    Example:
        policy = Policy("mean_sinks", score=Mean(), scope=Scope(sinks=4, recent=0.25))
        with kvpatch.patched(model, policy, k=0.5):
            model.generate(**inputs)
    """

    name: str
    score: Score
    scope: Scope = Scope()
    schedule: str = "both"
    source: str = ""
    over_layers: Pyramid | None = None
    over_heads: Adaptive | None = None
    selection: Selection | None = None
    merging: Merging | None = None
    every: int = 1
    needs: Needs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the parts of a new policy, one by one and together, and set `needs`, all that they read.

        The class lists the errors. only_then: what a part does that other schedules do not allow, for the message.
        """
        for name, kind, optional in _PARTS:
            part = getattr(self, name)
            if not isinstance(part, kind) and not (optional and part is None):
                raise KVPatchError(f"{name}={part!r} is not a kvpatch {kind.__name__}: give one of {kind.__module__}.")
        if not isinstance(self.name, str) or not self.name:
            raise KVPatchError(f"name={self.name!r} is no name of a policy: give a text such as 'my_policy'.")
        if self.schedule not in SCHEDULES:
            meant = suggest(self.schedule, SCHEDULES)  # the nearest name, for the message
            raise KVPatchError(f"schedule={self.schedule!r} must be one of {', '.join(map(repr, SCHEDULES))}.{meant}")
        use = self._join_schedules()
        if self.schedule not in self.score.schedules:
            why = _explain_schedules(self.score.schedules)
            raise KVPatchError(f"schedule={self.schedule!r}: policy {self.name!r} {why}; use schedule={use}.")
        _check_members(self.score)  # it defines value()
        object.__setattr__(self, "needs", Needs.of((self.score, self.scope, *([self.merging] if self.merging else []))))
        check_count("every", self.every, "tokens that decode steps evict at once")
        for part in (self.over_heads, self.selection, self.merging):
            if part is not None and self.schedule not in part.schedules:
                raise KVPatchError(f"schedule={self.schedule!r}: policy {self.name!r} {part.only_then}; use schedule={use}.")
        refuse_pairs(FeatureSet(self))  # features that exclude each other
        for one in (*self._list_parts(), *self.needs):
            one.check()
        check_names(self.needs.statistics, self.name)

    def _join_schedules(self) -> str:
        """Return the schedules that all parts allow, as "'prompt' or 'both'"; raise KVPatchError if there is none."""
        allowed = list(self.score.schedules)
        for part in (self.over_heads, self.selection, self.merging):
            if part is not None and not (allowed := [one for one in allowed if one in part.schedules]):
                score, other = (" or ".join(map(repr, one.schedules)) for one in (self.score, part))
                raise KVPatchError(
                    f"Policy {self.name!r} has no schedule: its score, {type(self.score).__name__}, takes {score}, and "
                    f"{type(part).__name__} takes {other}. Use a policy that evicts where a prompt ends, such as 'h2o'."
                )
        return " or ".join(map(repr, allowed))

    def _list_parts(self) -> list[Any]:
        return [part for name, _, _ in _PARTS if (part := getattr(self, name)) is not None]

    def options(self) -> dict[str, Any]:
        """Return the value of every option by name, for messages, reports and `with_options`; a tuple if parts differ in it."""
        by_name: dict[str, list[Any]] = {}
        for part in self._list_parts():
            for f in dataclasses.fields(part):
                by_name.setdefault(f.name, []).append(getattr(part, f.name))
        different = {name: tuple(values) for name, values in by_name.items() if values.count(values[0]) < len(values)}
        return {name: values[0] for name, values in by_name.items()} | different | {"every": self.every}

    def with_options(self, schedule: str | None = None, **options: Any) -> Policy:
        """Return a copy with a changed schedule or changed options. The user calls this, and patched() with its own options.

        Raises:
            KVPatchError: an option that this policy does not have (the message lists those it has), or a bad value.

        Example:
            kvpatch.get_policy("h2o").with_options(recent=0.1)
        """
        known = self.options()
        check_options(self.name, options, known)

        def replace(part: Any) -> Any:
            fields = {f.name for f in dataclasses.fields(part)}
            return dataclasses.replace(part, **{k: v for k, v in options.items() if k in fields})

        parts = {name: replace(part) for name, _, _ in _PARTS if (part := getattr(self, name)) is not None}
        schedule = self.schedule if schedule is None else match_name(schedule, SCHEDULES) or schedule
        return dataclasses.replace(self, **parts, schedule=schedule, every=options.get("every", self.every))

    @property
    def _storing(self) -> list[Score | AnyNeed]:
        """Needs of the policy, and its score, that store numbers with each token: their class defines `entry`."""
        return [part for part in (*self.needs, self.score) if type(part).entry not in (Need.entry, Score.entry)]

    @property
    def stores(self) -> bool:
        """Tell whether the score or a need stores something with each token."""
        return bool(self._storing)

    @property
    def entry_by_position(self) -> bool:
        """Tell whether the numbers stored with a token (`entry`) follow from its position: then `entry_ahead` makes them."""
        storing = self._storing
        return bool(storing) and all(isinstance(part, Need) and part.entry_by_position for part in storing)

    @property
    def projects(self) -> bool:
        """Tell whether values are weighed by the output projection."""
        return self.weighs_values or any(need.projects for need in self.needs)

    @property
    def remembers(self) -> bool:
        """Tell whether decode steps must update statistics although they evict nothing, for the prompt of a later turn."""
        return bool(self.needs.sums) and self.schedule == "prompt" and self.scope.turns != "first"

    @property
    def reads(self) -> bool:
        """Tell whether a need reads prompts as they pass."""
        return any(need.is_read for need in self.needs)

    @property
    def revises(self) -> bool:
        """Tell whether later tokens of a prompt change what a need stores with earlier ones."""
        return any(isinstance(part, Need) and (part.is_read or isinstance(part, Rereading)) for part in self._storing)

    @property
    def aligned(self) -> bool:
        """Tell whether heads with equal scores hold the same tokens: scopes of other kinds may rank each head's own."""
        return self.over_heads is None and self.selection is None and type(self.scope).mask is Scope.mask

    @property
    def over_model(self) -> bool:
        """Tell whether the heads of all layers share one budget, so that no layer evicts before the last has read a prompt."""
        return self.over_heads is not None and self.over_heads.over_layers

    @property
    def evicts(self) -> bool:
        """Tell whether tokens are evicted at all."""
        return self.score.evicts

    @property
    def weighs_values(self) -> bool:
        """Tell whether the selection reads norms of projected values."""
        return self.selection is not None and self.selection.weighs_values

    @property
    def keeps_norms(self) -> bool:
        """Tell whether norms of projected values are stored with the tokens."""
        return self.weighs_values and (self.schedule != "prompt" or self.over_model)

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        """Return the numbers that the score and its needs store with tokens that enter the cache, by name. Changes nothing.

        `score_entry` calls it as tokens are written, `entry_ahead` for coming ones. is_own: a user wrote the class.
        """
        entries: dict[str, Tensor] = {}
        for part in sorted((*self.needs, self.score), key=own_code.is_own):  # a user's last: it is blamed for equal names
            if own_code.is_own(part):
                kept = {name for need in self.needs if need is not part for name in need.states}
                entries |= own_code.call_entry(part, self.name, new, entries.keys() | kept)
            else:
                entries |= part.entry(new)
        return entries

    def eviction_keys(self, context: EvictionContext, empty: Tensor | None) -> Tensor:
        """Return the eviction keys, int64 [B,H,T]: the token with the lowest key is evicted first (see selection.py).

        `PromptEnd` calls it as a prompt or block ends, `_evict_over_budget` at decode steps; sets `context.value` to the
        scores.

        empty: bool [B,H,T], empty slots; they get the lowest key. None where there are none.
        """
        position = context.positions_BHT
        score, scope = self.score, self.scope
        own = own_code.is_own(score)
        value = own_code.call_value(score, self.name, context) if own else score.value(context)
        protected = own_code.call_mask(scope, self.name, context) if own_code.is_own(scope) else scope.mask(context)
        context.value = value
        if context.watch is not None:
            context.watch(value)
        dead = context.dead_BHT  # left a sliding window: no later query sees them
        keys = score_keys(value, position, score.signed or own)  # a user's class may say signed = False and be wrong
        if scope.quota is not None:  # spans of the prompt that each keep a share
            protected = protect_shares(context, keys, protected, dead)
        keys = eviction_keys(keys, protected=protected, dead=dead, empty=empty)
        if self.selection is None:
            return keys
        keys = self.selection.eviction_keys(context, value, keys, protected, dead)
        return keys if empty is None else keys.masked_fill(empty, FIRST)


_PARTS: tuple[tuple[str, type, bool], ...] = (  # of each part its attribute, its class, and whether it may be None
    ("score", Score, False),
    ("scope", Scope, False),
    ("over_layers", Pyramid, True),
    ("over_heads", Adaptive, True),
    ("selection", Selection, True),
    ("merging", Merging, True),
)


def _explain_schedules(schedules: tuple[str, ...]) -> str:
    """Return why a score allows these schedules alone, for the error of `Policy.__post_init__` about another schedule."""
    if "prompt" in schedules:
        return "scores the tokens of a prompt, once it is read, and no generated ones"
    if "both" in schedules:
        return "is made for decode steps, at which this schedule evicts nothing"
    return "scores tokens by what decode steps attend to, which a prompt does not have"


def _check_members(score: Score) -> None:
    """Raise KVPatchError, for `Policy.__post_init__`, if a score that evicts has no method `value`."""
    if score.evicts and type(score).value is Score.value:
        raise KVPatchError(
            f"Score {type(score).__name__} has no method value, which returns a number for each cached token [B,H,T], higher "
            "for those to keep: def value(self, context)."
        )
