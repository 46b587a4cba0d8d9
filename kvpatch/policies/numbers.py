"""Numbers on devices: integers of the host, and running sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return an int64 tensor of these numbers. The host does not wait for a GPU, as torch.tensor(values, device=) does."""
    host = torch.tensor(values, dtype=torch.long, pin_memory=device.type == "cuda", device="cpu")
    return host.to(device, non_blocking=True)


def running_sum(weight: Tensor) -> Tensor:
    """Return the cumulative sums [...,T] of weights >= 0, for `Mass.kept`, which counts tokens by the sum of their scores.

    A GPU adds floats in no fixed order. If deterministic algorithms are asked for, it adds whole parts of the total instead.
    """
    if weight.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return weight.cumsum(-1)
    return sum_in_parts(weight)


def sum_in_parts(weight: Tensor) -> Tensor:
    """Return the running sums of weights >= 0, each rounded down to a 2^-40th of their total: integers, exact in any order."""
    part = weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / PARTS
    return (weight / part).long().cumsum(-1).to(weight.dtype) * part


PARTS = 2**40
