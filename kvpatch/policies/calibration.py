"""Calibrations: measurements of a model that a pass over text makes once, and scores that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .context import EvictionContext, NewTokens, accumulator
from .scores import Score


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measurements of a model's queries, as `kvpatch calibrate` makes them and `load_calibration` reads them.

    Attributes:
        model: values that identify the model.
        directions: of each layer that a budget applies to, the first singular direction [H,D] of each KV head's queries, with
            unit length, turned so that the queries' mean points along it.
        tokens: how many were read.
        digest: checksum of all that.

    Example:
        calibration = kvpatch.load_calibration("calibration.safetensors")
        with kvpatch.patched(model, "q_filter", k=0.5, calibration=calibration):
            model.generate(**inputs)
    """

    model: Mapping[str, Any]
    directions: Mapping[int, Tensor]
    tokens: int
    digest: str
    _placed: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Calibration {self.digest[:16]}>"

    def direction(self, layer: int, like: Tensor) -> Tensor:
        """Return the directions [H,D] of all KV heads of a layer, on the device of `like`, in the dtype of scores."""
        key = layer, like.device, accumulator(like.dtype)
        if key not in self._placed:
            self._placed[key] = self.directions[layer].to(*key[1:])
        return self._placed[key]


@dataclass(frozen=True)
class QueryFilter(Score):
    """Projection of keys on the first singular direction of queries [Q-Filters].

    s[i] = k_i . f, where f is the first right singular vector of the queries of a KV head's group over a text read before, as
    attention uses them, turned so that their mean points along it.

    Differs from the paper: the queries of the whole group make one vector; no mean of vectors is taken.

    Attributes:
        calibration: what `load_calibration` returns.
    """

    calibration: Calibration | None = None
    calibrated: ClassVar[bool] = True

    def check(self) -> None:
        if self.calibration is not None and not isinstance(self.calibration, Calibration):
            raise KVPatchError(
                f"calibration={self.calibration!r:.60} is no calibration: give kvpatch.load_calibration(path) of a file that "
                "`kvpatch calibrate` wrote."
            )

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        assert self.calibration is not None and isinstance(new.layer, int)
        H = new.k_BHQD.shape[1]
        direction = self.calibration.direction(new.layer, new.k_BHQD)[new.first : new.first + H]
        return {"projection": (new.k_BHQD.to(direction.dtype) @ direction[None, :, :, None]).squeeze(-1)}

    def value(self, context: EvictionContext) -> Tensor:
        return context.state["projection"]


@dataclass(frozen=True)
class Recall(Score):
    """The score of a pass that measures queries: it keeps them, and ranks nothing.

    Attributes:
        count: queries to keep, at least as many as the pass has tokens.
    """

    count: int = 1

    @property
    def recent_queries(self) -> int:
        return self.count
