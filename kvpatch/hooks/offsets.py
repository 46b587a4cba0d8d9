"""Offsets of positions after images: Qwen's models that read images keep one for each row of a batch, as `rope_deltas`.

An offset is of the text that the model has read last. A cache keeps the offsets of its own texts, and sets them on the model
before it goes on with these texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache.cache import EvictingCache

NAME = "rope_deltas"


def has_offsets(model: nn.Module | None) -> bool:
    """Tell if a model keeps offsets of positions after images (`rope_deltas`); model: the one around the decoder, or None."""
    return model is not None and NAME in vars(model)


def note_offsets(model: nn.Module, cache: EvictingCache, B: int, device: torch.device) -> None:
    """Copy `rope_deltas` [B,1] from the model around the decoder to `cache.ids` as a pass begins; 0 for a text without images.

    `_begin_pass` calls it. Models that read images keep it: an image takes fewer positions than tokens, and this is the
    difference for later tokens. A model without the attribute changes nothing.
    """
    if not has_offsets(model):
        return
    given = vars(model)[NAME]
    if isinstance(given, Tensor) and given.ndim == 2 and len(given) and B % len(given) == 0:  # a row for each text or beam
        cache.ids.offsets_B1 = given if B == len(given) else given.repeat_interleave(B // len(given), 0)
    elif not cache.get_seq_length():
        cache.ids.offsets_B1 = torch.zeros(B, 1, dtype=torch.long, device=device)


def clear_offsets(model: nn.Module | None, cache: EvictingCache) -> None:
    """Set a cache's offsets of positions to 0: its text was read without `model`, which computes them, so it has no images.

    `load_cache` and `_read_prefix` call it. model: the one around the decoder, or None.
    """
    if has_offsets(model):
        cache.ids.offsets_B1 = torch.zeros(len(cache.lengths_B), 1, dtype=torch.long, device=cache.lengths_B.device)


def forget_offsets(model: Any) -> None:
    """Clear the model's offsets of positions, for `before_outer`: a new text without images would get those of the last one."""
    if has_offsets(model):
        model.rope_deltas = None


def give_back_offsets(model: nn.Module, cache: EvictingCache, B: int | None) -> None:
    """Set a cache's `rope_deltas` (offsets of positions after images) on the model that computes positions from them.

    `_run_with_cache` calls it before a generate() over the cache, `before_outer` before a pass, as another text may have been
    read since. An empty cache changes nothing. B: rows of that pass, if known.
    """
    offsets = cache.ids.offsets_B1
    if offsets is None or not cache.get_seq_length():
        return
    # generate() takes one row for a text, and repeats it for its beams; the cache has a row for each beam
    beams = len(offsets) // B if B and len(offsets) % B == 0 else 1
    # in a decode step the model itself has them: looking through all modules would take long
    holders: list[Any] = [model] if has_offsets(model) else [*filter(has_offsets, model.modules())]
    for holder in holders:
        holder.rope_deltas = offsets[::beams]
