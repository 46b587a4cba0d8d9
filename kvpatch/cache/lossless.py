"""The cache of `patched(..., lossless=True)`: every token on the host, and a budgeted cache on the device that drafts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from transformers import Cache

from ..errors import InvalidError, KVPatchError
from ..policies.budgets import check_count
from ..policies.numbers import on_device
from ..policies.served import refuse
from . import checks, editing
from .cache import EvictingCache
from .host import HostLayer, find_free
from .pickling import Unpicklable
from .state import writable


@dataclass
class Verified:
    """Counts for reports: tokens drafted and accepted, passes over the full cache after the prompt, bytes they read of it."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    moved_nbytes: int = 0

    @property
    def per_pass(self) -> float:
        """Mean number of tokens that a pass yields: the accepted drafts, and one of its own."""
        return self.accepted / self.passes + 1 if self.passes else 0.0

    @property
    def nbytes_per_token(self) -> float:
        """Mean number of bytes of the full cache that were read for each token that passes yielded."""
        return self.moved_nbytes / (self.accepted + self.passes) if self.passes else 0.0


class LosslessCache(Unpicklable, Cache):
    """The entries of all tokens of one text on the host, as the unpatched model computes them, beside a budget that drafts.

    A pass over it reads new tokens as the end of a prompt, into a new budgeted cache. Before a layer attends, `exchange` lends
    it the entries of all earlier tokens, so that attention is full; by the attention of the new tokens the policy then chooses
    those that the budget holds. The next layer's entries are copied meanwhile; on a CPU they are read from a mapped file.

    Attributes:
        layers: the entries of all tokens.
        drafts: the budgeted cache that the newest pass has filled. settings: of the patch.
        verified: what drafting came to.
    """

    layers: list[HostLayer]  # type: ignore[assignment]

    def __init__(self, drafts: EvictingCache, layers: int, folder: Path | None = None) -> None:
        """Make the cache of a new text. drafts: a budgeted cache. layers: their number. folder: for files of all entries."""
        super().__init__(layers=[HostLayer(folder) for _ in range(layers)])
        self.drafts, self.settings, self.verified = drafts, drafts.settings, Verified()  # verified: counts of accepted drafts
        self.ids: list[int] = []  # of the tokens read
        self.kept_positions: list[int] = []  # positions of the tokens held: of all but those that were forgotten
        self.edited = 0  # tokens read when some were last forgotten
        self.resent_tokens = 0  # of those read, which generate()'s first pass brings once more
        self.pending_ids: list[int] = []  # ids of the pass in progress
        self.budget_tokens = 0  # length of text by which the budget of `drafts` was computed
        self._positions_1T: Tensor | None = None  # on the device of the pass
        self._staged: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # rows on the device, end of their copy
        self._stream: torch.cuda.Stream | None = None

    # ---- passes ----

    def begin(self, ids: list[int]) -> EvictingCache:
        """Begin a pass over tokens `ids`, for `begin_pass`; return a new budgeted cache. Drop what an interrupted pass left."""
        self.pending_ids, self._positions_1T = ids, None
        self._staged.clear()
        for layer in self.layers:
            layer.length = len(self.kept_positions)
        self.drafts = self._make_drafts()
        return self.drafts

    @writable
    def _make_drafts(self) -> EvictingCache:
        """Return a budgeted cache for the next pass to fill: it counts the tokens read, but has none. `begin` calls it."""
        new, tokens = EvictingCache(self.settings), torch.tensor([self.ids], device="cpu")
        new.model_stamp = self.drafts.model_stamp
        for layer in new.layers:
            layer.columns_read = len(self.ids)
        if self.ids:
            new.seen_B = torch.tensor([len(self.ids)], device="cpu")
            new.ids.write(tokens, 1, len(self.ids), tokens.device)
        return new

    @property
    def drafting(self) -> bool:
        """True if `drafts` go on from the text: not before the first pass, nor once one was interrupted."""
        drafts, n_read = self.drafts, len(self.ids)
        return n_read > 0 and not drafts.unfinished and drafts.turns.prompts_read > 0 and drafts.columns_read == n_read

    def check_room(self, tokens: int, nbytes: int, device: torch.device) -> None:
        """For `begin_pass`: raise KVPatchError unless the host has room for so many more tokens, of `nbytes` each."""
        first = self.layers[0]
        held = len(first.store.rows_NE) if first.is_initialized else 0
        more = (first.count_rows(len(self.kept_positions) + tokens) - held) * nbytes
        if not more:
            return
        place, free = find_free(first.folder, device)
        if free is not None and more > free:
            raise KVPatchError(
                f"lossless=True keeps the entries of all tokens in {place}: {more:,} bytes more for these {tokens:,} tokens, "
                f"and {free:,} are free. Give offload_folder='/a/folder' on a larger disk, or shorten the text."
            )

    def lend(self) -> None:
        """Let the pass over `drafts`, begun by `_enter_decoder`, read earlier tokens from here: its layers call `exchange`."""
        now = self.drafts.current_pass  # the pass in progress
        now.lender = self
        if self.ids:  # new tokens after the first are drafts, which may be taken back: a share `k` does not count them
            now.share_base_B = [len(self.ids) + 1]
        self.budget_tokens = now.share_base_B[0] if now.share_base_B else 0

    def end(self) -> None:
        """After the decoder: add the pass's tokens to those read, and free what was copied or mapped for it."""
        self._staged.clear()
        for layer in self.layers:
            layer.store.release()
        self.kept_positions += range(len(self.ids), len(self.ids) + len(self.pending_ids))
        self.ids += self.pending_ids
        self.pending_ids, self.drafts.current_pass.lender = [], None

    def exchange(self, layer: int, k_1HQD: Tensor, v_1HQD: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """For `_borrow`, in each layer: store new keys, values; return earlier tokens' and their positions, on its device."""
        stored, device = self.layers[layer], k_1HQD.device
        rows_TE = self._bring(layer, device) if stored.length else None  # copied to the device, or mapped
        stored.append(k_1HQD, v_1HQD)
        if layer:  # attention has run in the layer before
            self.layers[layer - 1].store.release()  # its pages in host memory
        if rows_TE is None:
            return None
        if self._positions_1T is None or self._positions_1T.device != device:  # the same for all layers
            self._positions_1T = on_device([self.kept_positions], device)
        return *stored.view(rows_TE), self._positions_1T

    def _bring(self, layer: int, device: torch.device) -> Tensor:
        """Return the rows of a layer's earlier tokens on its device, and count their bytes."""
        self.verified.moved_nbytes += self.layers[layer].nbytes
        return self.layers[layer].used_TE if device.type == "cpu" else self._bring_staged(layer, device)

    def _bring_staged(self, layer: int, device: torch.device) -> Tensor:
        """Return a layer's rows (keys beside values) on a GPU, for `_bring`; start to copy the next layer's."""
        for i in (layer, layer + 1):  # a layer's rows change in its own turn of a pass, after this
            if i < len(self.layers) and i not in self._staged:
                self._staged[i] = self._stage(self.layers[i], device)
        rows_TE, done = self._staged.pop(layer)
        if done is not None:  # else the copy has ended
            torch.cuda.current_stream(device).wait_event(done)
        return rows_TE

    def _stage(self, layer: HostLayer, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a layer's rows to a device, for `_bring_staged`; return them, and an event at the copy's end."""
        if device.type != "cuda":
            return layer.used_TE.to(device), None
        rows_TE = torch.empty_like(layer.used_TE, device=device)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which made the memory, and wrote the newest rows
        with torch.cuda.stream(self._stream):
            rows_TE.copy_(layer.used_TE, non_blocking=True)
            rows_TE.record_stream(self._stream)
            return rows_TE, self._stream.record_event()

    # ---- a look inside, as EvictingCache gives it ----

    def positions(self, layer: int) -> Tensor:
        """Return the positions of all tokens held, int64 [1,Hkv,T], on the host; of those on the budget: `drafts.positions`."""
        checks.check_layer("layer", layer, len(self.layers))
        checks.check_filled(bool(self.ids))
        return torch.tensor(self.kept_positions, device="cpu").repeat(1, self.layers[layer].sizes[0], 1)

    def held(self, layer: int) -> Tensor:
        """Count the tokens there for each KV head, int64 [1, Hkv]."""
        return (self.positions(layer) >= 0).sum(-1)

    def next_positions(self, Q: int = 1) -> Tensor:
        """Return the positions of the next Q tokens, int64 [1,Q], to pass as position_ids."""
        checks.check_filled(bool(self.ids))
        check_count("Q", Q, "tokens")
        return torch.arange(len(self.ids), len(self.ids) + Q, device="cpu")[None]

    def check_invariants(self) -> None:
        """Raise InvalidError unless the budgeted cache is sound, and each layer has the keys and values of all tokens held."""
        for index, layer in enumerate(self.layers):
            if layer.length < len(self.kept_positions):  # an interrupted pass leaves more
                raise InvalidError(
                    f"Layer {index} has the entries of {layer.length} tokens, and {len(self.kept_positions)} are there."
                )
        if self.drafting:
            self.drafts.check_invariants()

    # ---- what transformers asks of a cache ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens read."""
        return len(self.ids)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return len(self.ids) + query_length, 0

    def activate_past_recording(self) -> None:
        """Do nothing: no token overwrites another here, so that the last ones can always be taken back."""

    @writable
    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last tokens, such as rejected drafts, here and in the budgeted cache, as `EvictingCache.crop` does."""
        count, drafting = checks.count_removed(tokens_to_remove, len(self.ids)), self.drafting
        left = len(self.ids) - count
        if left < self.edited:
            raise KVPatchError(f"crop({tokens_to_remove}): the text was edited after {self.edited} tokens, and stays so.")
        del self.ids[left:], self.kept_positions[len(self.kept_positions) - count :]
        for layer in self.layers:
            layer.length = min(layer.length, len(self.kept_positions))
        if drafting and count:  # the budgeted cache holds tokens
            tokens = self.settings.tokens
            if any(tokens(one, left) < tokens(one, self.budget_tokens) for one in range(self.settings.n_layers)):
                # k is a share, and the text now shorter
                self.drafts = self._make_drafts()  # the next pass chooses anew
            else:
                editing.drop_last(self.drafts, count)

    def go_back(self, ids: Sequence[int]) -> None:
        """For `Chat._generate`: crop the cache to what it shares with `ids`, less their last, which a pass must read."""
        pairs = zip(self.ids, ids[:-1], strict=False)
        common = next((i for i, (read, given) in enumerate(pairs) if read != given), min(len(self.ids), len(ids) - 1))
        if common < max(self.edited, 1):  # crop() cannot go back over an edit
            self.reset()
        elif common < len(self.ids):
            self.crop(common)

    def forget(self, spans: Sequence[tuple[int, int]], row: int | None = None) -> None:
        """Take tokens out of the text, as `EvictingCache.forget` does: later passes are as if they had been masked."""
        spans = list(spans) if isinstance(spans, Iterator) else spans  # read twice
        checks.check_filled(bool(self.ids))
        gone_T = editing.mark_gone(self._make_drafts(), spans, row, "forget()")[0].tolist()  # by position
        if self.drafting:
            self.drafts.forget(spans, row)  # the budgeted cache
        kept = [i for i, place in enumerate(self.kept_positions) if not gone_T[place]]
        self.kept_positions, self.edited = [self.kept_positions[i] for i in kept], len(self.ids)
        for layer in self.layers:
            layer.keep(torch.tensor(kept, device="cpu"))

    def replace(self, *args: object, **kwargs: object) -> None:
        """Refuse to read other tokens into the text: what follows has seen the old ones."""
        refuse("replace", self.settings.list_features(lossless=True))

    insert = replace

    def clone(self) -> LosslessCache:
        """Return an independent copy, for several questions after one context."""
        new = LosslessCache(self.drafts.clone() if self.drafting else self._make_drafts(), 0)  # layers are copied below
        new.layers, new.ids = [layer.copy() for layer in self.layers], list(self.ids)
        new.kept_positions, new.edited, new.budget_tokens = list(self.kept_positions), self.edited, self.budget_tokens
        return new

    def __copy__(self, memo: object = None) -> LosslessCache:
        return self.clone()

    __deepcopy__ = __copy__

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
        """Empty the full cache and the budgeted one, for another text."""
        for stored in (self.ids, self.kept_positions, self._staged):
            stored.clear()
        self.edited = self.resent_tokens = 0
        for layer in self.layers:
            layer.reset()
        self.drafts.reset()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """Stand in for the methods that need several rows, such as reorder_cache(): raise an error."""
        raise KVPatchError(
            "lossless=True drafts for one text at a time: beams and several rows are not served. Take cache.clone() for "
            "several questions about it, leave lossless out, or use the unpatched model."
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = select_rows = concatenate = _refuse
