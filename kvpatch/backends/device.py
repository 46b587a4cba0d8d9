"""The GPU that kernels run on."""

from __future__ import annotations

import torch


def find_capability() -> int | None:
    """Return the major compute capability of the current CUDA device, 9 on an H100; None where there is no such device."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
