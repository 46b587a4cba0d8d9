"""Snapshot of a cache: what is small of it, so that a report outlives the keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backends.entry_sizes import FULL, count_entry_bytes
from .layer import SlotLayer
from .lifetimes import Lifetimes
from .settings import CacheSettings
from .state import TextState


@dataclass(frozen=True)
class LayerPart:
    """Part of a layer that a report needs.

    positions_BHT: of the held tokens, not copied; -1 in an empty slot. mass_BH, unfitted_BH: as in SlotLayer. nbytes: bytes
    allocated for keys and values. full_nbytes: bytes that a layer would need which keeps every column, or the layer's own
    sliding window. token_nbytes: bytes of one token in all heads and rows.
    """

    positions_BHT: Tensor
    mass_BH: Tensor | None
    unfitted_BH: Tensor | None
    nbytes: int
    full_nbytes: int
    token_nbytes: int = 0

    @classmethod
    def of(cls, layer: SlotLayer, bound: int | None) -> LayerPart:
        """Return what reports need of a layer, without its keys and values: positions, bytes, and what was noted of heads.

        `Snapshot.of` and `end_layer` call it. bound: the layer's own sliding window in tokens, or None.
        """
        B, H = layer.positions.shape[:2]
        kept = min(layer.columns_read, bound or layer.columns_read)
        about = *layer.kv.sizes, layer.dtype.itemsize, layer.latent
        full = B * H * kept * count_entry_bytes(FULL, *about)  # of a cache that evicts nothing
        token = B * H * count_entry_bytes(layer.bits, *about)  # of one token in each head and row
        noted = layer.mass_BH, layer.unfitted_BH
        return cls(layer.positions[:, :, : layer.columns_used], *noted, layer.kv.nbytes, full, token)


@dataclass(frozen=True)
class Snapshot:
    """Small parts of a cache. They share its tensors: take it of a cache that is about to go, or copy the tensors.

    parts: by layer, of those that have read a text. columns_read: padding included. lengths_B: tokens of each row without
    padding, or None. ran: by task, the backend that ran last and the reason against each preferred one. peak_nbytes: most
    bytes allocated at any time. acted: the budget acted in some pass. seconds: of the last generate(), by part.
    lifetimes: as in TextState. state_nbytes: bytes of a hybrid's states. steps: decode steps since the newest prompt.
    """

    settings: CacheSettings
    parts: dict[int, LayerPart]
    columns_read: int
    lengths_B: Tensor | None
    ran: dict[str, tuple[str, str]]
    peak_nbytes: int
    acted: bool
    seconds: dict[str, float]
    lifetimes: Lifetimes | None
    state_nbytes: int = 0
    steps: int = 0

    @classmethod
    def of(cls, cache: TextState) -> Snapshot:
        """Take a snapshot for `Report` or `Patch.record`, which outlives the cache. It waits for compiled steps alone."""
        cache.catch_up()
        layers, bounds = cache.layers, cache.settings.bounds
        parts = cache.layer_parts or {  # a cache for one pass (without use_cache) has emptied its layers
            index: LayerPart.of(layer, bounds[index]) for index, layer in enumerate(layers) if layer.is_initialized
        }
        lengths_B = None if cache.seen_B is None else cache.read_B
        # a cache for one pass has emptied the layers that count columns
        seen = cache.pass_record.columns if cache.layer_parts and cache.pass_record is not None else cache.columns_read
        peak = max(cache.meter.peak, sum(part.nbytes for part in parts.values()))
        # acted: some token was computed after an eviction; seconds: times of the last generate()
        acted, seconds = (True, {}) if cache.pass_record is None else (cache.pass_record.acted, cache.pass_record.seconds())
        ran = dict(cache.backend_choice.ran_last)  # backends that computed attention
        rest = cache.lifetimes, cache.states.nbytes, cache.counters.steps  # lifetimes: when tokens were evicted
        return cls(cache.settings, parts, seen, lengths_B, ran, peak, acted, seconds, *rest)
