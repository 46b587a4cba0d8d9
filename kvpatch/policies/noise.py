"""Counter-based random numbers: a hash of (seed, layer, head, query position, key position), not a generator's stream.

A token therefore keeps its number regardless of its slot, of the order in which rows, heads and blocks are computed, of beam
reordering and of rollback. A row of a padded batch draws the same numbers as alone, and a saved cache needs no generator
state. Rows of a batch share their draws, position by position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GUMBEL_MEAN, GUMBEL_STD = 0.5772, 1.2825
_MASK = 0xFFFFFFFF


def _mix_bits(h: Tensor) -> Tensor:
    """Hash each number, for `uniform`, by MurmurHash3's 32-bit finalizer. int64 may overflow; the low 32 bits stay right."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def uniform(seed: int, layer: int | Tensor, head: Tensor, query: Tensor | int, key: Tensor) -> Tensor:
    """Return random numbers, uniform in (0, 1), float32, in the broadcast shape of head, query and key: a hash of these.

    Random scores, Keyformer's noise and `sample_rows` take them; no generator's state changes.

    Args:
        seed: the policy's seed.
        layer: index of the layer, or a tensor of them.
        head: index of the query or KV head in the whole model, int64, as `query` and `key` are.
        query: position of the query; -1 for a number that belongs to the key alone.
        key: position of the key.
    """
    start = (((seed * 0x9E3779B1 + 0x165667B1) & _MASK) + layer * 0x7FEB352D) & _MASK
    h = _mix_bits((head * 0x27D4EB2F + start) & _MASK)
    h = _mix_bits(h ^ ((query * 0x2C1B3C6D + 0x297A2D39) & _MASK))
    h = _mix_bits(((key * 0x1B873593 + 0x52DCE729) ^ h) & _MASK)
    # 23 bits and a half: the largest value is still below one in float32
    return ((h >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(u: Tensor) -> Tensor:
    """Transform uniform numbers to the standard Gumbel distribution: mean 0.5772, standard deviation 1.2825."""
    return -torch.log(-torch.log(u))


def gaussian(u: Tensor) -> Tensor:
    """Transform uniform numbers to a normal distribution with the standard Gumbel's mean and standard deviation."""
    return GUMBEL_MEAN + GUMBEL_STD * normal(u)


def normal(u: Tensor) -> Tensor:
    """Transform uniform numbers to the standard normal distribution."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * u - 1.0)
