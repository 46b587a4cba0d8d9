"""Offsets of positions after images: Qwen's models that read images keep one for each row of a batch, as `rope_deltas`.

It is of the text that the model has read last. A cache notes its own, and the model gets it back where the cache goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache.cache import EvictingCache

NAME = "rope_deltas"


def has_offsets(model: nn.Module | None) -> bool:
    """Tell if a model keeps offsets."""
    return model is not None and NAME in vars(model)


def note_offsets(model: nn.Module, cache: EvictingCache, B: int, device: torch.device) -> None:
    """Copy the model's `rope_deltas` [B,1], offsets of positions after images, to `cache.ids` as a pass begins."""
    if not has_offsets(model):
        return
    given = vars(model)[NAME]
    if isinstance(given, Tensor) and given.ndim == 2 and len(given) and B % len(given) == 0:
        cache.ids.offsets_B1 = given if B == len(given) else given.repeat_interleave(B // len(given), 0)
    elif not cache.get_seq_length():
        cache.ids.offsets_B1 = torch.zeros(B, 1, dtype=torch.long, device=device)


def clear_offsets(model: nn.Module | None, cache: EvictingCache) -> None:
    """Set a cache's offsets to 0: the decoder has read text without the outer model, which computes them for images."""
    if has_offsets(model):
        cache.ids.offsets_B1 = torch.zeros(len(cache.lengths_B), 1, dtype=torch.long, device=cache.lengths_B.device)


def forget_offsets(model: Any) -> None:
    """Clear the model's offsets before a new text: a text without images would get those of the text before."""
    if has_offsets(model):
        model.rope_deltas = None


def give_back_offsets(model: nn.Module, cache: EvictingCache, B: int | None) -> None:
    """Set the offsets of a cache's positions (after images) on the modules that keep them, before the cache goes on.

    B: rows of the next pass, if known.
    """
    noted = cache.ids.offsets_B1
    if noted is None or not cache.get_seq_length():
        return
    each = len(noted) // B if B and len(noted) % B == 0 else 1  # a text's row is given once for all its beams
    # a step, whose model keeps them itself, has no time to look through its modules
    holders: list[Any] = [model] if has_offsets(model) else [*filter(has_offsets, model.modules())]
    for holder in holders:
        holder.rope_deltas = noted[::each]
