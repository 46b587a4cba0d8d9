"""The cache of `patched(..., lossless=True)`: every token on the host, and a budgeted cache on the device that drafts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from ..errors import KVPatchError
from .cache import EvictingCache
from .host import HostLayer


@dataclass
class Verified:
    """What drafting came to. passes: over the full cache, after the prompt; moved_nbytes: that they read of it."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    moved_nbytes: int = 0

    @property
    def per_pass(self) -> float:
        """Tokens of a pass: the accepted ones, and its own."""
        return self.accepted / self.passes + 1 if self.passes else 0.0

    @property
    def nbytes_per_token(self) -> float:
        """Bytes of the full cache that were read for a token."""
        return self.moved_nbytes / (self.accepted + self.passes) if self.passes else 0.0


class LosslessCache(Cache):
    """The entries of all tokens of one text on the host, as the unpatched model computes them, beside a budget that drafts.

    A pass over it is the unpatched model's: layer by layer, keys and values come to where the layer computes, the next
    layer's while this one's is used, and go when it has. On a CPU they are read from a mapped file.

    Attributes:
        drafts: the budgeted cache. It may be some tokens behind, which the next draft reads.
        verified: what drafting came to.
    """

    def __init__(self, drafts: EvictingCache, layers: int, folder: Path | None = None) -> None:
        super().__init__(layers=[HostLayer(folder) for _ in range(layers)])
        drafts.activate_past_recording()
        self.drafts, self.verified = drafts, Verified()
        self.ids: list[int] = []  # of the tokens read
        self.again = 0  # tokens read before, which generate()'s first pass brings once more
        self.coming: list[int] = []  # ids of the pass in progress
        self._staged: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}
        self._stream: torch.cuda.Stream | None = None

    # ---- passes ----

    def begin(self, ids: list[int]) -> None:
        """Begin a pass over new tokens; what an interrupted one left behind is dropped."""
        self.coming = ids
        self._staged.clear()
        for layer in self.layers:
            layer.length = len(self.ids)

    def end(self) -> None:
        """Count the tokens of a pass that has run."""
        self._staged.clear()
        for layer in self.layers:
            layer.store.release()
        self.ids += self.coming
        self.coming = []

    def write(self, layer: int, k_1HQD: Tensor, v_1HQD: Tensor) -> None:
        """Take a layer's entries of a prompt that the budgeted cache reads: before any eviction they are the full cache's."""
        own = self.layers[layer]
        own.append(k_1HQD, v_1HQD)
        own.store.release()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append a layer's new entries; return those of all tokens, on the device that computes."""
        if key_states.device.type != "cpu":
            return self._update_staged(key_states, value_states, layer_idx)
        if layer_idx:
            self.layers[layer_idx - 1].store.release()
        self.verified.moved_nbytes += self.layers[layer_idx].nbytes
        return self.layers[layer_idx].update(key_states, value_states)

    def _update_staged(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Run `update` where a device computes, which gets a copy of the rows."""
        layer, device = self.layers[layer_idx], key_states.device
        self.verified.moved_nbytes += layer.nbytes
        for i in (layer_idx, layer_idx + 1):
            if i < len(self.layers) and i not in self._staged:
                self._staged[i] = self._stage(self.layers[i], key_states.shape[2], device)
        rows_TE, done = self._staged.pop(layer_idx)
        if done is not None:
            torch.cuda.current_stream(device).wait_event(done)
        start = layer.length
        layer.append(key_states, value_states)
        k_1HTD, v_1HTD = layer.view(rows_TE)
        k_1HTD[:, :, start:].copy_(key_states)
        v_1HTD[:, :, start:].copy_(value_states)
        return k_1HTD, v_1HTD

    def _stage(self, layer: HostLayer, Q: int, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copy a layer's rows to the device beside its work, with room for Q more."""
        T = layer.length
        rows_TE = layer.store.rows_NE.new_empty(T + Q, layer.store.rows_NE.shape[1], device=device)
        if device.type != "cuda":
            rows_TE[:T].copy_(layer.used_TE)
            return rows_TE, None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which made the memory, and wrote the newest rows
        with torch.cuda.stream(self._stream):
            rows_TE[:T].copy_(layer.used_TE, non_blocking=True)
            rows_TE.record_stream(self._stream)
            return rows_TE, self._stream.record_event()

    # ---- what transformers asks of a cache ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens read."""
        return len(self.ids)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return len(self.ids) + query_length, 0

    def activate_past_recording(self) -> None:
        """Nothing is overwritten: any token can be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, as `EvictingCache.crop` does."""
        left = tokens_to_remove if tokens_to_remove > 0 else len(self.ids) + tokens_to_remove
        if not 0 <= left <= len(self.ids):
            raise KVPatchError(f"crop({tokens_to_remove}): the cache has read {len(self.ids)} tokens.")
        del self.ids[left:]

    def clone(self) -> LosslessCache:
        """Return an independent copy, for several questions after one context."""
        new = LosslessCache(self.drafts.clone(), 0)
        new.layers, new.ids = [layer.copy() for layer in self.layers], list(self.ids)
        return new

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all tokens, on the host; the budget's: `drafts.nbytes`."""
        return sum(layer.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Empty both caches."""
        self.ids.clear()
        self.drafts.reset()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise KVPatchError(
            "lossless=True drafts for one text at a time: beams, several rows and edits of its cache are not served. Leave "
            "lossless out, or use the unpatched model."
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = forget = _refuse
