"""Tensor parallelism: the KV heads of this process, and decisions that need all heads of a layer.

Keys, scores and the kept set of a head stay on the head's process. Two things need more: random numbers depend on a head's
index in the whole model (`first`), and decisions over all heads of a layer (`gather_heads`, `select_heads`) are computed by
every process from the same gathered numbers, so that all processes agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Parallel:
    """This process among `size` that share the heads of every layer evenly and in order.

    Attributes:
        size: number of processes.
        rank: index of this process, 0 <= rank < size.
        group: their torch.distributed process group.
    """

    size: int = 1
    rank: int = 0
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        return self  # a copied cache lives in the same process

    def first(self, H: int) -> int:
        """Return the index, in the whole model, of the first of this process' H heads."""
        return self.rank * H

    def gather_heads(self, own_BH: Tensor, empty: int | None = None) -> Tensor:
        """Gather the [B,H,...] of all processes into [B,size*H,...], heads in order, for decisions over all heads of a layer.

        `_share_budget` and scores of whole layers call it, in all processes, which wait for each other. One alone gets its
        tensor back. empty: fills each last axis up to the longest of any process; None promises that the axes are equally long.
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

    def select_heads(self, all_BH: Tensor) -> Tensor:
        """Select this process' heads from a tensor of all heads."""
        return all_BH if self.size == 1 else all_BH.chunk(self.size, 1)[self.rank]

    def select_numbers(self, rows: list[list[int]]) -> list[list[int]]:
        """Select this process' heads from numbers of all heads by batch row."""
        return [row[self.rank * len(row) // self.size : (self.rank + 1) * len(row) // self.size] for row in rows]

    def __str__(self) -> str:
        return "all heads" if self.size == 1 else f"the heads of process {self.rank} of {self.size}"


WHOLE = Parallel()
