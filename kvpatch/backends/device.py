"""The GPU that kernels run on."""

from __future__ import annotations

import torch


def find_capability() -> int | None:
    """Return the device's major compute capability, or None without a device."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
