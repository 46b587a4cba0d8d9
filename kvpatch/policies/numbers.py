"""Integers of the host as tensors of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return an int64 tensor of these numbers. The host does not wait for a GPU, as torch.tensor(values, device=) does."""
    host = torch.tensor(values, dtype=torch.long, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
