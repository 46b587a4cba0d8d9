"""The last decode step that used each token, and the longest time between two uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import KVPatchError
from ..budgets import is_number
from ..context import NewTokens
from .base import StepRead
from .window_attention import WindowAttention


@dataclass(frozen=True)
class LastUses(WindowAttention):
    """Positions, int64 [B,H,T]: context.state["last_use"] of the last decode step that used a token, its own at first.

    Attributes:
        alpha: attention above which a decode step uses a token.
        intervals: whether context.state["interval"] has the most steps between two uses in a row, at least 1.
    """

    width: int = 1
    alpha: float = 1e-4
    intervals: bool = False
    entry_by_position: ClassVar[bool] = True

    @property
    def refuses(self) -> Mapping[str, str]:
        return {"insert": "it knows the steps that used a token by their positions"}

    def check(self) -> None:
        if not is_number(self.alpha) or not 0 <= self.alpha < 1:
            raise KVPatchError(f"alpha={self.alpha!r} must be in [0, 1): the attention above which a step uses a token.")

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        last = new.positions_BQ[:, None].expand(new.k_BHQD.shape[:3]).contiguous()
        return {"last_use": last, "interval": torch.ones_like(last)} if self.intervals else {"last_use": last}

    def step(self, step: StepRead) -> None:
        """Write a decode step's position to the state "last_use" of the tokens that it used (attention > alpha), in place.

        `_end_step` calls it. With `intervals`, "interval" is the longest time between two uses. "observed": this step's
        attention, which super().step writes.
        """
        super().step(step)
        layer, newest_B11 = step.layer, step.positions_B1[:, None]
        last, used = layer.statistic("last_use"), layer.statistic("observed") > self.alpha
        if self.intervals:
            longest = layer.statistic("interval")
            longest.copy_(torch.where(used, torch.maximum(longest, newest_B11 - last), longest))
        last.copy_(torch.where(used, newest_B11, last))
