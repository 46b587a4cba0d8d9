"""Entries of a cache: a head's numbers of one token as they are, or rounded to 8 or 4 bits and packed into bytes.

A rounded entry is a row of bytes: the scale of each group of channels, then the zero of each, then the codes. So it is
gathered, moved, copied and saved like any other row. What is rounded of a key is its difference from a centre that all keys of
a head share: else a channel that is large in every key would take up the whole range of its group.

Where a value is a part of its key (latent attention), the key's entry holds both: nothing else is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..policies.context import accumulator
from .entry_sizes import FULL as FULL
from .entry_sizes import count_groups, count_rounded_bytes

CPU_BLOCK = 1 << 18  # numbers unpacked at a time on the CPU: 1 MiB of float32, about a core's L2 cache
DEVICE_BLOCK = 1 << 22  # on other devices: 16 MiB


@dataclass(frozen=True)
class Exact:
    """Entries [...,D] in the model's own precision."""

    exact, bits, latent = True, FULL, False

    def encode(self, x: Tensor) -> Tensor:
        """Return the entries of numbers [...,D]: the numbers themselves."""
        return x

    def decode(self, entries: Tensor) -> Tensor:
        """Return the numbers [...,D] of entries: the entries themselves."""
        return entries

    def dot(self, q_NGD: Tensor, entries_NTW: Tensor) -> Tensor:
        """Return the products [...,G,T] of queries with keys."""
        return torch.matmul(q_NGD, entries_NTW.mT)

    def mix(self, p_NGT: Tensor, entries_NTW: Tensor) -> Tensor:
        """Return the sums [...,G,D] of values weighted by `p`."""
        return torch.matmul(p_NGT, entries_NTW)

    def cached(self, x: Tensor) -> Tensor:
        """Return new keys or values as attention will read them from the cache: unchanged, since nothing is rounded."""
        return x

    def size(self, entries: Tensor) -> int:
        """Return D, how many numbers an entry stands for."""
        return entries.shape[-1]

    def of(self, heads_N: Tensor | slice) -> Exact:
        """Return the codec of the entries of some heads: this one, which is the same for all heads."""
        return self


@dataclass(frozen=True)
class Rounded:
    """Entries [...,width] of bytes, for D numbers in groups that each have a scale and a zero.

    Of a group x of differences from the centre, zero = min(x), scale = (max(x) - min(x)) / (2^bits - 1), both rounded to
    `dtype`, the model's; a code is round((x - zero) / scale), half to even, between 0 and 2^bits - 1; its number is centre +
    zero + scale * code, rounded to `dtype`. A group of equal differences keeps them.

    centre: [B,H,1,D] of `dtype`, or of any shape that goes with the entries' [...,D]; None: zeros.
    """

    bits: int
    D: int
    groups: int
    dtype: torch.dtype
    centre: Tensor | None = field(default=None, compare=False, repr=False)

    exact = latent = False

    @property
    def header_bytes(self) -> int:
        """Bytes of the scales and zeros, with which an entry begins."""
        return 2 * self.groups * self.dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes of an entry."""
        return count_rounded_bytes(self.bits, self.D, self.groups, self.dtype.itemsize)

    def encode(self, x: Tensor) -> Tensor:
        """Round new keys or values [...,D], less their centre, to the bytes that the cache stores: scales, zeros and codes.

        `Slots.encode_pair` calls it before they are written. Each group of channels has a scale (step) and a zero (lowest
        number).
        """
        x = x.detach().to(accumulator(self.dtype))  # float32 for 16-bit numbers
        x = (x if self.centre is None else x - self.centre).unflatten(-1, (self.groups, -1))
        low, high = x.aminmax(dim=-1, keepdim=True)
        top = 2**self.bits - 1
        scale, zero = ((high - low) / top).to(self.dtype), low.to(self.dtype)
        step = scale.to(x.dtype)
        # step 0: all numbers are equal
        codes = ((x - zero.to(x.dtype)) / step.masked_fill(step == 0, 1.0)).round_().clamp_(0, top)
        numbers = torch.cat([scale, zero], -2).squeeze(-1)
        return torch.cat([numbers.view(torch.uint8), self._pack_codes(codes.flatten(-2).to(torch.uint8))], -1)

    def decode(self, entries: Tensor) -> Tensor:
        """Return the numbers [...,D] of stored entries in the model's dtype, for prompts and scores. Changes nothing."""
        scale, zero, codes = self._read(entries)
        x = codes.mul_(scale[..., None]).add_(zero[..., None]).flatten(-2)
        return (x if self.centre is None else x + self.centre).to(self.dtype)

    def dot(self, q_NGD: Tensor, entries_NTW: Tensor) -> Tensor:
        """Return the products [...,G,T] of a decode step's queries with rounded keys, from their codes, without unpacking keys.

        The function `dot` calls it. Each group of channels adds (query . codes) * scale + (sum of the query) * zero; query .
        centre is added once.
        """
        scale_NTg, zero_NTg, codes_NTgd = self._read(entries_NTW)
        q_NGgd, scale_NgT = q_NGD.unflatten(-1, (self.groups, -1)), scale_NTg.mT.contiguous()
        x = torch.matmul(q_NGgd.sum(-1), zero_NTg.mT)
        if self.centre is not None:
            x += torch.matmul(q_NGD, self.centre.to(x.dtype).mT)
        for g in range(self.groups):
            x.addcmul_(torch.matmul(q_NGgd[..., g, :], codes_NTgd[..., g, :].mT), scale_NgT[..., g : g + 1, :])
        return x

    def mix(self, p_NGT: Tensor, entries_NTW: Tensor) -> Tensor:
        """Return a decode step's output [...,G,D], for the function `mix`: weighted sums of values, from codes as in `dot`."""
        scale_NTg, zero_NTg, codes_NTgd = self._read(entries_NTW)
        sums = [torch.matmul(p_NGT * scale_NTg[..., None, :, g], codes_NTgd[..., g, :]) for g in range(self.groups)]
        out = (torch.stack(sums, -2) + torch.matmul(p_NGT, zero_NTg)[..., None]).flatten(-2)
        return out if self.centre is None else out + p_NGT.sum(-1, keepdim=True) * self.centre

    def _read(self, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split entries into scales, zeros [...,g] and codes [...,g,d] of g groups of d channels, for `decode` and `dot`."""
        dtype = accumulator(self.dtype)
        numbers = entries[..., : self.header_bytes].clone(memory_format=torch.contiguous_format).view(self.dtype).to(dtype)
        scale, zero = numbers.unflatten(-1, (2, self.groups)).unbind(-2)
        return scale, zero, self._unpack_codes(entries[..., self.header_bytes :]).to(dtype).unflatten(-1, (self.groups, -1))

    def cached(self, x: Tensor) -> Tensor:
        """Return new keys or values [...,D] as attention will read them from the cache, that is rounded. For scores."""
        return self.decode(self.encode(x))

    def size(self, entries: Tensor) -> int:
        """Return D, how many numbers an entry stands for (its bytes are `width`)."""
        return self.D

    def of(self, heads_N: Tensor | slice) -> Rounded:
        """Return the codec with the centres of some heads alone, for entries [N,...,width]; they are numbered n = b * H + h."""
        return self if self.centre is None else replace(self, centre=self.centre.flatten(0, 1)[heads_N])

    def _pack_codes(self, codes: Tensor) -> Tensor:
        """Pack codes [...,D] to bytes, for `encode`. 4-bit codes go in pairs: the first half of D fills the low halves."""
        if self.bits == 8:
            return codes
        half = (self.D + 1) // 2
        return codes[..., :half] | (torch.nn.functional.pad(codes[..., half:], (0, self.D % 2)) << 4)

    def _unpack_codes(self, packed: Tensor) -> Tensor:
        """Return the codes [...,D], uint8, of bytes that `_pack_codes` has made; for `_read`."""
        if self.bits == 8:
            return packed
        packed = packed.contiguous()  # bytes between headers are slow to shift
        return torch.cat([packed & 15, packed >> 4], -1)[..., : self.D]


@dataclass(frozen=True)
class Latent:
    """Codec of values that are the first D numbers of their keys (latent attention). Only keys are stored, by codec `whole`."""

    whole: Exact | Rounded
    D: int

    latent = True

    @property
    def exact(self) -> bool:
        """Tell whether the keys' entries are numbers, not bytes."""
        return self.whole.exact

    def within(self, entries: Tensor) -> Tensor:
        """Return a view of the keys' entries that has the values: their first D numbers, or rounded entries whole."""
        return entries[..., : self.D] if self.exact else entries

    def decode(self, entries: Tensor) -> Tensor:
        """Return the values [...,D] of the keys' entries: the first D numbers of each."""
        return self.whole.decode(entries)[..., : self.D]

    def mix(self, p_NGT: Tensor, entries_NTW: Tensor) -> Tensor:
        """Return the sums [...,G,D] of values weighted by `p`."""
        return self.whole.mix(p_NGT, entries_NTW)[..., : self.D]

    def cached(self, x: Tensor) -> Tensor:
        """Return new values as attention will read them from the cache: the first D channels of keys, rounded. For scores."""
        if isinstance(whole := self.whole, Exact):
            return x
        # a codec of these D channels alone rounds them as the whole key's does: each group lies before or after channel D
        centre = None if whole.centre is None else whole.centre[..., : self.D]
        return Rounded(whole.bits, self.D, self.D * whole.groups // whole.D, whole.dtype, centre).cached(x)

    def size(self, entries: Tensor) -> int:
        """Return D, how many numbers a value has."""
        return self.D

    def of(self, heads_N: Tensor | slice) -> Latent:
        """Return the codec with the centres of some heads alone, as `Rounded.of`."""
        return replace(self, whole=self.whole.of(heads_N))


Codec = Exact | Rounded | Latent
Codecs = tuple[Exact | Rounded, Codec]
EXACT: Codecs = (Exact(), Exact())


@lru_cache(maxsize=64)
def codecs(bits: int, D: int, E: int, dtype: torch.dtype, latent: bool = False) -> Codecs:
    """Return the codecs that round and read keys of D numbers and values of E numbers, for a cache of so many `bits`.

    A key has a scale for each group of channels, a value has one scale. latent: a value is the first E numbers of its key.
    """
    if latent:
        key_codec = Exact() if bits == FULL else Rounded(bits, D, count_groups(D, E, latent), dtype)
        return key_codec, Latent(key_codec, E)
    return EXACT if bits == FULL else (Rounded(bits, D, count_groups(D, E), dtype), Rounded(bits, E, 1, dtype))


def centre_codecs(codecs: Codecs, centre_BH1D: Tensor | None) -> Codecs:
    """Return the codecs with the centre about which keys are rounded; exact codecs, which have none, as they are.

    `fix_centre` calls it where a prompt ends; the centre stays from then on.
    """
    key, value = codecs
    if isinstance(key, Exact):
        return codecs
    key = replace(key, centre=centre_BH1D)
    return key, replace(value, whole=key) if isinstance(value, Latent) else value


def centre_of(codecs: Codecs) -> Tensor | None:
    """Return the centre [B,H,1,D] of the keys, or None."""
    return None if isinstance(codecs[0], Exact) else codecs[0].centre


def map_centre(codecs: Codecs, change: Callable[[Tensor], Tensor]) -> Codecs:
    """Return the codecs with change(centre) in place of the centre, as when rows are reordered; unchanged without a centre."""
    centre = centre_of(codecs)
    return codecs if centre is None else centre_codecs(codecs, change(centre))


def find_midrange(k_BHTD: Tensor, real_BHT: Tensor) -> Tensor:
    """Return the centre [B,H,1,D] of a prompt's keys: midway between each channel's least and greatest, padding apart.

    `fix_centre` calls it when a prompt has been read, before keys are rounded about this centre. The order of the keys and
    padding do not change it. Where it is NaN or infinite, 0 takes its place.
    """
    empty, dtype = ~real_BHT[..., None], accumulator(k_BHTD.dtype)
    low = k_BHTD.masked_fill(empty, torch.inf).amin(2, keepdim=True).to(dtype)
    middle = (low + k_BHTD.masked_fill(empty, -torch.inf).amax(2, keepdim=True).to(dtype)) / 2
    return middle.nan_to_num_(0.0, 0.0, 0.0).to(k_BHTD.dtype)


def in_full(codecs: Codecs) -> Codecs:
    """Return codecs that leave the same keys and values in the model's own precision, for a layer that reads a prompt."""
    return (Exact(), Latent(Exact(), codecs[1].D)) if isinstance(codecs[1], Latent) else EXACT


def dot(q_NGD: Tensor, entries_NTW: Tensor, codec: Codec) -> Tensor:
    """Return a decode step's logits [...,G,T], queries times cached keys, for `step`; of rounded keys in float32 at least."""
    assert not isinstance(codec, Latent)  # a codec of values, not of keys
    if codec.exact:
        return codec.dot(q_NGD, entries_NTW)
    q_NGD = q_NGD.to(accumulator(q_NGD.dtype))
    products = [codec.dot(q_NGD, entries_NTW[..., lo:hi, :]) for lo, hi in _cut_blocks(entries_NTW, codec)]
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def mix(p_NGT: Tensor, entries_NTW: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """Return a decode step's output [...,G,D] in `dtype`, for `step`: the sum of cached values, weighted by probabilities."""
    if codec.exact:
        return codec.mix(p_NGT.to(dtype), entries_NTW)
    p_NGT = p_NGT.to(accumulator(dtype))
    sums = [codec.mix(p_NGT[..., lo:hi], entries_NTW[..., lo:hi, :]) for lo, hi in _cut_blocks(entries_NTW, codec)]
    return sum(sums[1:], sums[0]).to(dtype)


def _cut_blocks(entries_NTW: Tensor, codec: Codec) -> Iterator[tuple[int, int]]:
    """Yield ranges [lo, hi) of slots so short that the numbers of all heads, once unpacked, fit into a block, for `dot`."""
    *N, T, _ = entries_NTW.shape
    most = CPU_BLOCK if entries_NTW.device.type == "cpu" else DEVICE_BLOCK
    size = max(most // max(math.prod(N) * codec.size(entries_NTW), 1), 1)
    return ((lo, min(lo + size, T)) for lo in range(0, T, size))
