"""Measurements of the model, which a pass over text has made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..measures import Calibration
from .base import Need


@dataclass(frozen=True)
class Calibrated(Need[None]):
    """Statistics of a calibration of this model, which a score reads from its option `calibration`.

    Attributes:
        names: of the statistics, keys of measures.MEASURES.
        calibration: None if the user has given none, which is refused.
    """

    names: tuple[str, ...]
    calibration: Calibration | None = None
    alone: ClassVar[bool] = False

    @property
    def refuses(self) -> Mapping[str, str]:
        """Features (by names in served.py) that a calibration excludes, with the end of the sentence that refuses each.

        Two go on after the policy's name. "other positions": the model's positions do not count the row's tokens, so that
        queries cannot be rotated ("turn", a statistic) to where they follow the keys. "renumbered": positions="renumbered".
        """
        turns = {"other positions": "turns queries to where they follow the keys"} if "turn" in self.names else {}
        return turns | {
            "renumbered": "whose calibration is of keys at original positions",
            "vllm": "it needs a calibration, which these settings cannot hold: use 'key_diff'",
        }
