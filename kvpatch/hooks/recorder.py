"""Recorders of steps: CUDA graphs, and the memory that they may keep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import torch

PART = 16  # the part of a device's memory that the caches of graphs may take together


class Recorder(Protocol):
    """Recorder of one step, which it can repeat."""

    def capture(self, run: Callable[[], None]) -> None:
        """Record what `run` asks of the device. Nothing of it is carried out."""

    def replay(self) -> None:
        """Run again what was recorded, on the same memory."""


class CudaRecorder(Recorder):
    """A CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], None]) -> None:
        """Record what `run` asks of the device; what other threads ask meanwhile is carried out, and is not in the graph."""
        with torch.cuda.device(self.device), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        """Run the recorded step again, on the same memory."""
        self.graph.replay()


def find_limit(device: torch.device) -> int:
    """Return the bytes that graphs may keep on a device: a part of its memory, without limit for other devices than CUDA."""
    return torch.cuda.get_device_properties(device).total_memory // PART if device.type == "cuda" else sys.maxsize
