"""Counters of steps and columns: as numbers, and as tensors for steps under torch.compile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .token_ids import TAPE, UNKNOWN


class DeviceCounters:
    """Counters for decode steps under torch.compile, as 0-d tensors: such steps advance them, other passes set them at the end.

    columns: columns read, int64; limit: columns up to which there is room, int64. steps: decode steps since the prompt,
    float32; temperature_steps: over which a score's temperature changes, float32. tape_BN: ids of the newest traced steps,
    int64, that of a column in the place of its number modulo N.
    """

    def __init__(self, device: torch.device, B: int, room: int) -> None:
        """Make the counters, all 0, on a device. B: batch rows. room: steps whose ids the tape must hold, if more than TAPE."""
        self.columns, self.limit = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        self.steps, self.temperature_steps = torch.zeros((), device=device), torch.zeros((), device=device)
        self.tape_BN = torch.full((B, max(TAPE, room)), UNKNOWN, device=device)

    def write_tape(self, ids_B1: Tensor | None) -> None:
        """For `begin_step`: write a compiled step's ids to the tape, a ring of the newest ids. ids_B1: None for embeddings."""
        place = (self.columns % self.tape_BN.shape[1]).view(1)
        if ids_B1 is None:
            self.tape_BN.index_fill_(1, place, UNKNOWN)
        else:
            self.tape_BN.index_copy_(1, place, ids_B1.long())

    def read_tape(self, start: int, count: int) -> Tensor:
        """Return the ids [B,count] of compiled steps from a column on, for `catch_up`; UNKNOWN where they were overwritten."""
        N = self.tape_BN.shape[1]
        place = torch.arange(start, start + count, device=self.tape_BN.device)
        ids_BQ = self.tape_BN[:, place % N]
        return ids_BQ if count <= N else ids_BQ.masked_fill(place < start + count - N, UNKNOWN)


@dataclass
class StepCounters:
    """Decode steps since the prompt.

    steps: of the row that has taken the most. steps_behind_B: how many fewer each row has taken, [B] float64, if a temperature
    depends on it. temperature_steps_B: over which each row's temperature changes, [B] float64, if the rows were asked for
    different numbers of tokens. tensors_or_none: counters for steps under torch.compile, of which has_uncounted_steps tells.
    """

    steps: int = 0
    steps_behind_B: Tensor | None = None
    temperature_steps_B: Tensor | None = None
    tensors_or_none: DeviceCounters | None = None
    has_uncounted_steps: bool = False

    @property
    def tensors(self) -> DeviceCounters:
        """`tensors_or_none`, once a pass has ended."""
        assert self.tensors_or_none is not None
        return self.tensors_or_none

    def keep_rows(self, columns: int) -> None:
        """Set the counters to those of the remaining rows, after other rows were dropped. columns: of the longest row left."""
        if self.steps_behind_B is None:
            self.steps = min(self.steps, columns)  # a row has taken no more steps than it has columns
        else:
            least = int(self.steps_behind_B.min())  # steps that even the farthest of the rows is behind
            self.steps, self.steps_behind_B = self.steps - least, self.steps_behind_B - least
