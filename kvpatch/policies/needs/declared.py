"""The needs that the parts of a policy declare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor

from ...errors import KVPatchError
from .base import AnyNeed, Need
from .noisy_sums import NoisySums
from .sums import Sums

Kind = TypeVar("Kind", bound=AnyNeed)
_NOW = {
    "statistics": 'needs = (Sums("cubes"),)',
    "observed_rows": "needs = (WindowAttention(32),)",
    "recent_queries": "needs = (LastQueries(8),)",
    "moments": "needs = (QueryMoments(512),)",
    "reads_held": "needs = (Held(),)",
    "rereads": "needs = (SecondReading(),)",
    "note": "needs = (LastUses(),), or a class of your own with step()",
    "fold": "needs = (WindowAttention(32, fold=...),)",
}
"""Attributes by which scores of earlier versions said what they read, which are refused, and the needs to write instead."""


class Needs(tuple[AnyNeed, ...]):
    """The needs of a policy, each once.

    Attributes:
        sums: the needs that are summed over all rows.
        statistics: names of these sums, keys of statistics.STATISTICS.
        rows: query rows of a prompt whose attention is needed: "none", "window" (the last few) or "all".
    """

    def __init__(self, needs: Iterable[AnyNeed]) -> None:
        """Set `sums` (needs that are sums of attention), `statistics` (their names) and `rows` (of a prompt that they read)."""
        self.sums = tuple(need for need in self if isinstance(need, Sums))
        self.statistics = tuple(one.key for one in self.sums)
        kinds = [need.rows for need in self]
        self.rows = "all" if "all" in kinds else "window" if "window" in kinds else "none"

    @classmethod
    def of(cls, parts: Iterable[Any]) -> Needs:
        """Collect what the score, scope and merging of a policy declare that they read (`needs`), for `Policy.__post_init__`.

        Raises KVPatchError for a `needs` of another type, for two that contradict each other, and for an attribute that scores
        had in earlier versions (_NOW).
        """
        needs_by_state: dict[Any, AnyNeed] = {}
        for part in parts:
            for name in sorted(_NOW.keys() & set(dir(type(part)))):
                raise KVPatchError(
                    f"{type(part).__name__}.{name}: scores and scopes say what they read as needs: {_NOW[name]}, of "
                    "kvpatch.policies.needs."
                )
            needs = part.needs
            if not isinstance(needs, tuple) or not all(isinstance(need, Need) for need in needs):
                raise KVPatchError(
                    f"{type(part).__name__}.needs is {needs!r:.60}: it must be a tuple of kvpatch.policies.needs, such as "
                    'needs = (Sums("sum"),).'
                )
            for need in needs:
                if need.rows not in ("none", "window", "all"):
                    raise KVPatchError(f"{type(need).__name__}.rows is {need.rows!r}: it must be 'none', 'window' or 'all'.")
                first = needs_by_state.setdefault(need.states or type(need), need)
                if first != need and not isinstance(need, Sums):  # of two Sums the first, the score's, counts
                    raise KVPatchError(f"score and scope need {first} and {need}, of which a layer can have one.")
        return cls(needs_by_state.values())

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the need of this kind, or None."""
        return next((need for need in self if isinstance(need, kind)), None)

    def refusal(self, feature: str) -> str | None:
        """Return why one of the needs does not work with a feature (Need.refuses), or None."""
        return next((need.refuses[feature] for need in self if feature in need.refuses), None)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors that the attention of decode steps changes."""
        return tuple(name for need in self for name in need.states)

    def check_state(self, name: str, known: Iterable[str]) -> None:
        """Raise KVPatchError if `Call.statistic` is asked for a tensor that none of the policy's needs keeps up to date.

        known: names of the numbers that entry() stores with tokens.
        """
        if name not in self.states:
            existing = ", ".join(sorted({*known, *self.states})) or "none"
            raise KVPatchError(f"layers keep no numbers {name!r}, but {existing}; entry(new) of a need returns new ones.")

    @property
    def kernels(self) -> tuple[tuple[str, str | None], ...]:
        """Statistics that the needs make of attention, each with the name by which kernels compute it, or None."""
        several = len({one.decay for one in self.sums} - {1.0}) > 1  # kernels know one factor of decay beside 1
        return tuple((name, None if several else kernel) for need in self for name, kernel in need.kernels)

    @property
    def fresh(self) -> bool:
        """Tell whether noise is drawn anew for every query and key instead of stored per key."""
        return any(one.fresh for one in self.sums)

    @property
    def decay(self) -> tuple[float, tuple[str, ...]]:
        """Factor of sums before each addition, and the statistics that have it; the others have 1."""
        decay = next((one.decay for one in self.sums if one.decay != 1.0), 1.0)
        return decay, tuple(one.key for one in self.sums if one.decay == decay != 1.0)

    @property
    def across_layers(self) -> bool:
        """Tell whether all layers share one running sum."""
        return any(one.across_layers for one in self.sums)

    def temperature(self, step: int | Tensor, length: int | Tensor | None) -> float | Tensor:
        """Return the temperature of the statistics' softmax at a decode step, by NoisySums.temperature; 1.0 without it."""
        noisy = self.find(NoisySums)
        return 1.0 if noisy is None else noisy.temperature(step, length)

    @property
    def span(self) -> int:
        """New tokens over which the temperature changes without generate()."""
        noisy = self.find(NoisySums)
        return 1 if noisy is None else noisy.generation_length

    @property
    def lookahead(self) -> int | None:
        """Positions after the newest token whose rotation is needed; None if no rotation is."""
        return max((need.lookahead for need in self if need.lookahead is not None), default=None)

    @property
    def protects(self) -> int:
        """Newest tokens that stay because a need reads their queries."""
        return max((need.protects for need in self), default=0)

    @property
    def alone(self) -> bool:
        """Tell whether a need reads what one layer holds, so that each layer evicts by itself."""
        return any(need.alone for need in self)
