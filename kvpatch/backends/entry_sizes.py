"""Bytes of a cache's entries, as entries.py lays them out; imports no torch."""

from __future__ import annotations

import math

FULL = 16  # `bits` of entries in the model's own precision
BITS = (FULL, 8, 4)
GROUP = 32  # channels of a key that share a scale, at most


def count_groups(key: int, value: int, latent: bool = False) -> int:
    """Return the number of groups into which a key's channels are cut; each group is equally large and has one scale.

    key, value: numbers of each. A group has at most GROUP channels. latent: a value is the first numbers of its key, and no
    group has channels both of the value and beyond it.
    """
    D = math.gcd(key, value) if latent else key
    return key // next(size for size in range(min(D, GROUP), 0, -1) if D % size == 0)


def count_rounded_bytes(bits: int, size: int, groups: int, itemsize: int) -> int:
    """Return the bytes of an entry of `size` rounded numbers: codes, and a scale and a zero of `itemsize` bytes per group."""
    return 2 * groups * itemsize + (size * bits + 7) // 8


def count_entry_bytes(bits: int, key: int, value: int, itemsize: int, latent: bool = False) -> int:
    """Return the bytes of a token's key and value in one head. `Target.bytes_per_token` and plans count by it.

    key, value: numbers of each. itemsize: bytes of a number of the model's dtype. latent: a value is the first numbers of its
    key, so that only the key is stored.
    """
    if bits == FULL:
        return (key if latent else key + value) * itemsize
    keys = count_rounded_bytes(bits, key, count_groups(key, value, latent), itemsize)
    return keys if latent else keys + count_rounded_bytes(bits, value, 1, itemsize)


def count_centre_bytes(bits: int, key: int, itemsize: int) -> int:
    """Return the bytes of the centre that a head's keys of so many numbers are rounded around."""
    return 0 if bits == FULL else key * itemsize
