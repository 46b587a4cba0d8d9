"""The KV heads of this process, where several processes share a model, and what heads of a layer decide together.

Policies are per head, so most of them never notice: keys, scores and the kept set of a head live where the head lives. What
is left is here: random numbers belong to a head's number in the whole model (`first`), and what heads of a layer decide
together (`heads`, `own`) is computed by every process from the same gathered numbers, so that all come to the same end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Parallel:
    """One process among `size` that share every layer's heads evenly, in order; `group` is theirs
    (torch.distributed)."""

    size: int = 1
    rank: int = 0
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        return self  # a copied cache lives in the same process

    def first(self, H: int) -> int:
        """The number, in the whole model, of the first of this process' H heads."""
        return self.rank * H

    def heads(self, own_BH: Tensor, empty: int | None = None) -> Tensor:
        """[B,H,...] of each process -> [B,size*H,...], all heads in order.

        empty: what fills up the last axis where processes hold different numbers of tokens; None where they cannot.
        """
        if self.size == 1:
            return own_BH
        if empty is not None:
            width = torch.tensor(own_BH.shape[-1], device=own_BH.device)
            torch.distributed.all_reduce(width, torch.distributed.ReduceOp.MAX, self.group)
            own_BH = F.pad(own_BH, (0, int(width) - own_BH.shape[-1]), value=empty)
        parts = [torch.empty_like(own_BH, memory_format=torch.contiguous_format) for _ in range(self.size)]
        torch.distributed.all_gather(parts, own_BH.contiguous(), self.group)
        return torch.cat(parts, 1)

    def own(self, all_BH: Tensor) -> Tensor:
        """This process' part of what stands for all heads."""
        return all_BH if self.size == 1 else all_BH.chunk(self.size, 1)[self.rank]

    def __str__(self) -> str:
        return "all heads" if self.size == 1 else f"the heads of process {self.rank} of {self.size}"


WHOLE = Parallel()
