"""Bytes that transformers' offloaded cache moves for a token, counted where it moves them.

Its layers go to the host after each update and come back before the next one, whole. The count is of the layers that its own
code sends and fetches, in its own order; on a CPU nothing moves, and streams of a device are stood in for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


@dataclass
class Moved:
    """Bytes that crossed to the device (read) and to the host (written)."""

    read: int = 0
    written: int = 0


class CountedLayer(DynamicLayer):
    """A layer that notes what is sent to the host and what comes back."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()
        self.moved, self.away = moved, False

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def offload(self) -> None:
        """Send it to the host."""
        self.moved.written += self.nbytes
        self.away = True
        super().offload()

    def prefetch(self) -> None:
        """Fetch it, if it is away."""
        self.moved.read += self.nbytes if self.away else 0
        self.away = False
        super().prefetch()


def count_offloaded(model: Any, ids_1N: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Return the full caches that an offloaded cache reads and writes for a token, of `tokens` after the first.

    The text of N tokens is read first. What is read and written is divided by what the cache holds at the end.
    """
    moved, counts = Moved(), list[tuple[int, int]]()
    with mock.patch("torch.Stream", mock.MagicMock()), mock.patch("torch.cuda.default_stream"), torch.no_grad():
        cache = DynamicCache(offloading=True)
        cache.layers = [CountedLayer(moved) for _ in range(model.config.num_hidden_layers)]
        cache.layer_class_to_replicate = None
        new = ids_1N
        for _ in range(tokens + 1):
            new = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
            counts.append((moved.read, moved.written))
    held = sum(layer.nbytes for layer in cache.layers)
    return tuple((last - first) / tokens / held for first, last in zip(counts[0], counts[-1], strict=True))  # type: ignore[return-value]
