"""EvictingCache: what users and transformers do with a cache under a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..policies.budgets import check_count
from . import checks, concat, invariants
from .state import TextState, writable


class EvictingCache(TextState):
    """A transformers cache that keeps `budget` tokens per KV head. Made by the patched model, or by `Patch.new_cache()`.

    Example:
        cache = patch.new_cache()
        model(document, past_key_values=cache)
        answers = [model.generate(question, past_key_values=cache.clone()) for question in questions]
    """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens SEEN (columns, padding included): positions go on as if nothing were missing. A tensor under torch.compile."""
        if torch.compiler.is_compiling() and self.counters.device is not None:
            return self.counters.device.columns  # type: ignore[return-value]
        self.catch_up()
        checks.layer_of("layer_idx", layer_idx, len(self.layers))
        return self.layers[layer_idx].seen

    @property
    def is_compileable(self) -> bool:
        """True where generate() may compile the decode step by itself."""
        return self.request.room is not None

    def positions(self, layer: int) -> Tensor:
        """Original positions held, int64 [B, Hkv, T], in no order; -1 where a slot is empty."""
        checks.layer_of("layer", layer, len(self.layers))
        one = self.layers[layer]
        checks.filled(one.is_initialized)
        return one.positions[:, :, : one.used].clone()

    def held(self, layer: int) -> Tensor:
        """Number of tokens that each KV head holds, int64 [B, Hkv]."""
        return (self.positions(layer) >= 0).sum(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values really allocated, all layers and rows."""
        return sum(layer.kv.nbytes for layer in self.layers)

    def next_positions(self, Q: int = 1) -> Tensor:
        """Positions of each row's next Q tokens, int64 [B,Q]: the position_ids of a forward over rows of different texts.

        Raises:
            KVPatchError: the cache is empty, or Q is no number of tokens.
        """
        checks.filled(self.seen_B is not None)
        check_count("Q", Q, "tokens")
        assert self.seen_B is not None
        read_B = self.seen_B if self.rows.gaps_B is None else self.seen_B - self.rows.gaps_B
        return read_B[:, None] + torch.arange(Q, device=self.seen_B.device)

    def check_invariants(self) -> None:
        """Check what must hold between passes; waits for the device.

        Positions are unique and real, budgets are kept, counters say what the slots do, and no more is allocated than is held
        and a sixteenth, at least 8 entries a head.

        Raises:
            InvalidError: something does not hold, which is a defect of this library.
        """
        invariants.check(self)

    # ---- copies ----

    @writable
    def clone(self) -> EvictingCache:
        """An independent copy, for several questions after one context."""
        self.catch_up()
        with self.reading("clone()"):
            return copy.deepcopy(self)

    @writable
    def __deepcopy__(self, memo: dict[int, Any]) -> EvictingCache:
        new = memo[id(self)] = copy.copy(self)
        memo[id(self.make_table)] = self.make_table  # which knows the model
        own = {**vars(self), "calls": {}, "stack": None, "stack_due": self.stack is not None or self.stack_due}
        vars(new).update(copy.deepcopy(own, memo))
        return new

    @staticmethod
    @writable
    def concatenate(caches: Sequence[EvictingCache], consume: bool = False) -> EvictingCache:
        """One cache with the rows of several, in their order, for texts that are continued together from here on.

        Their texts may have any lengths: get_seq_length() of the result is the longest's, and nothing is padded. A forward
        takes one token per row, no attention_mask (or one of the new columns alone), and position_ids only if they are
        `next_positions()`: where they are left out they are filled in. Drop rows with batch_select_indices().

        Args:
            caches: made under one patch, each at the end of a prompt or behind generated tokens.
            consume: empty each of them layer by layer, so that no more than one layer is held twice.

        Raises:
            KVPatchError: other settings or another model's shapes, a cache that is empty or in the middle of a prompt, that
                was made with room=, or that read padding without position_ids.
        """
        return concat.concatenate(caches, consume)

    # ---- rows of the batch ----

    def _map_rows(self, what: str, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor whose first axis is the batch."""
        with self.changing(what):
            self.catch_up()
            try:
                seen_B = None if self.seen_B is None else change(self.seen_B)
            except BaseException:  # what cannot be done to one tensor was done to none
                self.release()
                raise
            self.drop_stack()
            for layer in self.layers:
                layer.map_rows(change)
            before, self.seen_B, counters, turns = self.seen_B, seen_B, self.counters, self.turns
            self.shared = None if self.shared is None else change(self.shared)
            counters.lag_B = None if counters.lag_B is None else change(counters.lag_B)
            self.rows.gaps_B = None if self.rows.gaps_B is None else change(self.rows.gaps_B)
            if turns.open:  # what the rest of the prompt will ask
                turns.begin_B = change(torch.tensor(turns.begin_B)).tolist()
            if self.rows.joined and self.seen_B is not None:  # no mask counts its columns: they are the longest row's
                counters.device, columns = None, int(self.seen_B.max())
                for layer in self.layers:
                    layer.seen = columns
            if self._shrinks(before):
                self._fit()

    @writable
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put row `beam_idx[i]` at place i, as beam search does."""
        self.check_whole()
        checks.beams(beam_idx, self.seen_B)
        self._map_rows("reorder_cache()", lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    @writable
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: int64 row numbers, or a bool mask [B]."""
        self.check_whole()
        checks.rows(indices, self.seen_B)
        self._map_rows("batch_select_indices()", lambda tensor: tensor[indices, ...])

    @writable
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row in its place."""
        self.check_whole()
        check_count("repeats", repeats, "copies of each row")
        self._map_rows("batch_repeat_interleave()", lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _shrinks(self, before_B: Tensor | None) -> bool:
        """Tell if the longest of rows that differ may have gone, that had the lengths `before`; beams of one text leave one."""
        if before_B is None or self.seen_B is None or not any(layer.holes for layer in self.layers):
            return False
        return self.rows.joined or self.turns.count > 1 or set(before_B.tolist()) != set(self.seen_B.tolist())

    def _fit(self) -> None:
        """Give back slots that stand empty since rows or tokens have gone, unless there is to be room."""
        for layer in self.layers:
            if self.request.room is None:
                layer.fit()
            else:
                layer.measure()

    # ---- roll-back ----

    @writable
    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last tokens exactly: keys, values, positions, scores and free slots.

        Args:
            tokens_to_remove: minus the number of tokens, as transformers has it; a positive number is the length to
                crop to, as it was before 5.15.

        Raises:
            KVPatchError: the steps were not recorded (call `activate_past_recording()` before them).
        """
        self.check_whole()
        self.catch_up()
        count = checks.removal(tokens_to_remove, self.get_seq_length())
        if count == 0:
            return
        settings = self.settings
        remembers = [on and policy.remembers for on, policy in zip(settings.evicts, settings.policies, strict=True)]
        if not all(layer.can_crop(count, on) for layer, on in zip(self.layers, remembers, strict=True)):
            if self.request.drafts:
                self.reset()
                return
            raise KVPatchError(
                f"Cannot roll back {count} tokens: what they evicted was not recorded. Call "
                "cache.activate_past_recording() before generating them, or cache.clone() before and use the copy."
            )
        with self.changing("crop()"):
            self.drop_stack()
            shared = [layer.crop(count) for layer in self.layers]
            self.shared = self.shared if shared[0] is None else shared[0]
            assert self.seen_B is not None
            self.seen_B = self.seen_B - count
            self.counters.steps = max(self.counters.steps - count, 0)
            self.counters.device = None  # made anew by the next pass
            self._fit()
