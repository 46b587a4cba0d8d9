"""A policy is five parts put together, and a named policy is one row of a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import KVPatchError, suggest
from .allocation import Adaptive, Pyramid
from .context import EvictionContext
from .scopes import Scope
from .scores import Score
from .selection import FIRST, TwoStage, eviction_keys, score_keys
from .statistics import check_names, kernel_of

SCHEDULES = ("prompt", "decode", "both")


@dataclass(frozen=True)
class Policy:
    """Which tokens stay: a score, a scope of what may go, when, how the budget is divided, and how the kept set is chosen.

    score: None never evicts. schedule: "prompt" evicts once, after the prompt; "decode" one token per generated token,
    the prompt being kept whole; "both" does both. source: the paper. over_layers: None (uniform) or a Pyramid. over_heads:
    None (uniform) or Adaptive. selection: None (the top by score) or TwoStage. Change options with `with_options`,
    combine with `critical`, `adaptive` and `pyramid`, or build a new policy from the parts and hand it to `patched` or
    `register_policy`.
    """

    name: str
    score: Score | None
    scope: Scope = Scope()
    schedule: str = "both"
    source: str = ""
    over_layers: Pyramid | None = None
    over_heads: Adaptive | None = None
    selection: TwoStage | None = None

    def __post_init__(self) -> None:
        for field, kind, optional in _PARTS:
            part = getattr(self, field)
            if not isinstance(part, kind) and not (optional and part is None):
                raise KVPatchError(f"{field}={part!r} is not a kvpatch {kind.__name__}: give one of {kind.__module__}.")
        if not isinstance(self.name, str) or not self.name:
            raise KVPatchError(f"name={self.name!r} is no name of a policy: give a text such as 'my_policy'.")
        if self.schedule not in SCHEDULES:
            raise KVPatchError(f"schedule={self.schedule!r} must be one of {', '.join(map(repr, SCHEDULES))}.")
        if self.score is not None and self.schedule not in self.score.schedules:
            raise KVPatchError(
                f"schedule={self.schedule!r}: policy {self.name!r} scores tokens by the prompt's last rows, which a "
                f"generated token does not have; use schedule={' or '.join(map(repr, self.score.schedules))}."
            )
        if self.over_heads is not None and self.schedule not in self.over_heads.schedules:
            raise KVPatchError(
                f"schedule={self.schedule!r}: policy {self.name!r} divides its budget over heads where the prompt ends, but "
                "this schedule keeps the prompt whole; use schedule='prompt' or 'both'."
            )
        if self.scope.turns != "all" and self.schedule != "prompt":
            raise KVPatchError(
                f"turns={self.scope.turns!r} says what later prompts of a chat count, which schedule={self.schedule!r} does "
                "not allow, for its budget holds all the time; use schedule='prompt'."
            )
        if self.selection is not None and (self.score is None or not self.score.is_weight):
            raise KVPatchError(
                f"Two-stage selection multiplies scores with norms, but the score of policy {self.name!r} is no weight: it "
                "may be negative or only ranks tokens. Use a score made of attention, such as those of h2o, roco or snapkv."
            )
        for part in self._parts():
            part.check()
        if self.score is not None:
            check_names(self.statistics, self.name)

    def _parts(self) -> list[Any]:
        return [part for field, _, _ in _PARTS if (part := getattr(self, field)) is not None]

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

        parts = {field: replace(part) for field, _, _ in _PARTS if (part := getattr(self, field)) is not None}
        return dataclasses.replace(self, **parts, schedule=self.schedule if schedule is None else schedule)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names in statistics.STATISTICS that must be summed beside each key."""
        assert self.score is not None
        return tuple(dict.fromkeys((*self.score.statistics, *self.scope.statistics)))

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        """Each statistic's name, and the kernels' name for the same computation or None."""
        return tuple((name, kernel_of(name)) for name in self.statistics)

    @property
    def rows(self) -> str:
        """Which query rows of the prompt the policy must see: "none", "window" or "all"."""
        assert self.score is not None
        return "all" if self.statistics else self.score.rows

    @property
    def remembers(self) -> bool:
        """Rows of generated tokens count although none evicts: a later turn's prompt will."""
        return bool(self.statistics) and self.schedule == "prompt" and self.scope.turns != "first"

    @property
    def aligned(self) -> bool:
        """Heads whose scores are the same hold the same tokens."""
        return self.over_heads is None and self.selection is None

    def eviction_keys(self, context: EvictionContext, empty: Tensor | None) -> Tensor:
        """One int64 per cached token [B,H,T]: the lowest goes first (selection.py)."""
        assert self.score is not None
        position = context.positions_BHT
        value, protected = self.score.value(context), self.scope.mask(context)
        dead = None
        if context.sliding is not None:
            # out of the sliding window of every later query: it can never be attended to again
            dead = context.newest_B11 + 1 - position >= context.sliding
        ranked = eviction_keys(score_keys(value, position, self.score.signed), protected=protected, dead=dead, empty=empty)
        if self.selection is None or context.keep_BH1 is None:
            return ranked
        ranked = self.selection.eviction_keys(context, value, ranked, protected, dead)
        return ranked if empty is None else ranked.masked_fill(empty, FIRST)


_PARTS: tuple[tuple[str, type, bool], ...] = (
    ("score", Score, True),
    ("scope", Scope, False),
    ("over_layers", Pyramid, True),
    ("over_heads", Adaptive, True),
    ("selection", TwoStage, True),
)
