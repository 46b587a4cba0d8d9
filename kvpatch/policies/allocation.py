"""Division of a budget over the KV heads of one layer (Adaptive), or of all layers (Global), at the end of a prompt.

The total is that of the uniform budget, to the token. slopes.py divides a budget over layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import is_number, share
from .selection import FIRST, LAST, mask_top


@dataclass(frozen=True)
class Adaptive:
    """One budget per layer, shared by its heads according to their scores [AdaKV; CriticalKV Algorithm 2].

    Each head first receives `floor` times the uniform budget for its own top scores, which include its protected tokens; a
    head never receives fewer tokens than it must protect. The rest of H * budget goes to the highest scores over all heads
    of the layer; ties go to the higher position, then to the lower head. The allocation happens at the end of a prompt or
    block; while decoding, each head keeps its budget.

    Differs from the paper: the floor is hard and the total exact, where the authors blend and round.

    Attributes:
        floor: share of the uniform budget that every head receives, in [0, 1].
    """

    floor: int | float = 0.2
    schedules: ClassVar[tuple[str, ...]] = ("prompt", "both")
    only_then: ClassVar[str] = "divides its budget over heads where the prompt ends, but this schedule keeps the prompt whole"
    over_layers: ClassVar[bool] = False  # whether the heads of all layers share one budget

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""
        if not is_number(self.floor) or not 0 <= self.floor <= 1:
            raise KVPatchError(f"floor={self.floor!r} must be a share of the uniform budget, in [0, 1].")

    def least(self, budget: int, nominal: int) -> int:
        """Return how many tokens each head gets before the scores of all heads divide the rest, for `PromptEnd.least`.

        budget: the uniform budget, tokens for each head. nominal: tokens that each head must protect, at most `budget`.
        """
        return max(share(float(self.floor), budget), nominal)

    def counts(self, key_BNT: Tensor, least_BN: Tensor, total_B1: Tensor) -> Tensor:
        """Divide tokens over heads by score: return how many each may keep, int64 [B,N].

        `_share_budget` calls it as a prompt or block ends. Heads on other processes are among the N.

        Args:
            key_BNT: eviction keys (numbers that sort tokens: the lowest is evicted first) of the N heads that share the budget;
                FIRST, the lowest number, for empty slots.
            least_BN: tokens that each head receives in any case (see `least`).
            total_B1: tokens that all N heads may keep together.
        """
        # a head's least_BN best tokens rank above all others, so that no other head takes their place
        granted = mask_top(key_BNT, least_BN[..., None], None)
        key_BNT = key_BNT.masked_fill(granted & (key_BNT > FIRST), LAST)  # LAST ranks above every score
        B, N, T = key_BNT.shape
        # count each head's tokens among the total_B1 best; stable: of equal entries the lower head's comes first
        ranked, index = key_BNT.flatten(1).sort(dim=-1, descending=True, stable=True)
        taken = (torch.arange(N * T, device=key_BNT.device) < total_B1) & (ranked > FIRST)
        return torch.zeros(B, N, dtype=torch.long, device=key_BNT.device).scatter_add_(1, index // T, taken.long())


@dataclass(frozen=True)
class Global(Adaptive):
    """One budget for the whole model, shared by the heads of all layers according to their scores [KVzip; DefensiveKV].

    Each head first receives `floor` times its layer's uniform budget for its own top scores, which include its protected
    tokens. The rest of the sum of all budgets goes to the highest scores over all heads of all layers; ties go to the higher
    position, then to the lower layer, then to the lower head. No layer evicts before the last one has read the prompt, so a
    prompt takes the memory of all its tokens until then.

    Differs from the paper: protected tokens are kept beside the floor.

    Attributes:
        floor: share of the uniform budget that every head receives, in [0, 1].
    """

    over_layers: ClassVar[bool] = True
