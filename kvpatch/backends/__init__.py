"""Who computes attention and the statistics of its probabilities. Today: plain torch, on any device."""

from . import torch_backend

BACKENDS = {"torch": torch_backend}

__all__ = ["BACKENDS", "torch_backend"]
