"""EvictingCache: the cache that users and transformers work with under a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..policies.budgets import check_count
from . import checks, concat, editing, invariants
from .modes import Moving
from .state import TextState, writable


class EvictingCache(TextState):
    """A transformers cache that keeps `budget` tokens per KV head. Made by the patched model, or by `Patch.new_cache()`.

    Example:
        cache = patch.new_cache()
        model(document, past_key_values=cache)
        answers = [model.generate(question, past_key_values=cache.clone()) for question in questions]

    A question needs a clone of its own, for a cache goes on with the text that it has read. It keeps the ids of all of it, 8
    bytes a token, and the model that has read it. generate() raises an error if its input_ids differ from that text anywhere,
    or its attention_mask does, or if the model has other weights or another adapter by now. Of tokens that came without ids
    (inputs_embeds, caches filled outside, files of earlier versions) it says once that they are not compared. It cannot tell
    what new tokens alone follow: given to the model itself, or to generate() under an attention_mask over both.
    """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns (tokens, padding included) that the cache has READ, whether or not they were evicted.

        Models and transformers ask, to number new tokens. layer_idx: any layer's number in the decoder. Steps of compiled code
        are counted first; while such code is traced the result is a 0-d tensor.
        """
        if torch.compiler.is_compiling() and self.counters.tensors_or_none is not None:
            return self.counters.tensors_or_none.columns  # type: ignore[return-value]
        self.catch_up()
        if self.settings.layer_numbers is not None:  # the cache has only some of the decoder's layers, with these `numbers`
            layer_idx = self.settings.numbers.index(layer_idx) if layer_idx in self.settings.numbers else 0
        checks.check_layer("layer_idx", layer_idx, len(self.layers))
        return self.layers[layer_idx].columns_read

    @property
    def is_compileable(self) -> bool:
        """True if generate() may compile the decode step: buffers keep their size, and each of the decoder's layers is here."""
        return self.plans.static_room is not None and self.settings.layer_numbers is None

    @property
    def is_croppable(self) -> bool:
        """True if crop() can take back coming tokens: `activate_past_recording()` was called, and a hybrid's states allow it.

        Assisted decoding of transformers 5.24 asks for it.
        """
        stack = self.settings.layer_numbers  # a hybrid's layers with keys or states; None: all layers have keys
        states_croppable = stack is None or stack.croppable or not stack.states
        return states_croppable and all(layer.record_past for layer in self.layers)

    def positions(self, layer: int) -> Tensor:
        """Return the text positions of the tokens that a layer still holds: int64 [B,Hkv,T], unordered; -1 in an empty slot."""
        checks.check_layer("layer", layer, len(self.layers))
        slot_layer = self.layers[layer]
        checks.check_filled(slot_layer.is_initialized)
        return slot_layer.positions[:, :, : slot_layer.columns_used].clone()

    def held(self, layer: int) -> Tensor:
        """Count the tokens that each KV head holds, int64 [B, Hkv]."""
        return (self.positions(layer) >= 0).sum(-1)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, over all layers and batch rows; those of a hybrid's states: `states.nbytes`."""
        return sum(layer.kv.nbytes for layer in self.layers)

    def next_positions(self, Q: int = 1) -> Tensor:
        """Return the positions of each row's next Q tokens, int64 [B,Q], to pass as position_ids where rows differ in length.

        Raises:
            KVPatchError: the cache is empty, or Q is no number of tokens.
        """
        checks.check_filled(self.seen_B is not None)
        check_count("Q", Q, "tokens")
        return self.read_B[:, None] + torch.arange(Q, device=self.read_B.device)  # read_B: tokens read, without padding

    def check_invariants(self) -> None:
        """Check the invariants that hold between passes; waits for the device.

        A head's positions are all different and of tokens that were read, budgets are kept, and counters agree with the slots.
        Allocated slots exceed the tokens held by at most 1/16, or 8 entries per head if that is more.

        Raises:
            InvalidError: an invariant is broken, which is a defect of this library.
        """
        invariants.check_cache(self)

    # ---- copies ----

    def clone(self) -> EvictingCache:
        """Return an independent copy, for several questions after one context."""
        self.catch_up()  # count the steps of compiled code
        with self.reading("clone()"):  # raises if another thread changes the cache
            new = copy.deepcopy(self)
        new.pass_record = copy.copy(self.pass_record)  # of the passes over this cache, for reports
        return new

    def __copy__(self) -> EvictingCache:
        """Copy as `clone` does: of two caches with the same layers, each would go on at the other's positions."""
        return self.clone()

    @writable
    def __deepcopy__(self, memo: dict[int, object]) -> EvictingCache:
        """Copy all state of the text, for `clone()`. The copy shares the settings, and constants of the model (`of_model`)."""
        new = memo[id(self)] = super().__copy__()
        of_model = (self.make_rotary_table, *(item for layer in self.layers for item in (layer.geometry, layer.output_rows)))
        memo.update({id(item): item for item in of_model if item is not None})  # deepcopy leaves these as they are
        vars(new).update(copy.deepcopy(self._copy_attributes(), memo))
        return new

    def _copy_attributes(self) -> dict[str, Any]:
        """Return the attributes of a copy by name; bound steps and stacked layers are left out, for the copy makes its own."""
        return {**vars(self), "pass_record": None, "steps": None, "now": None, "stack_due": self.stacked or self.stack_due}

    @writable
    def select_rows(self, rows: int | list[int] | Tensor) -> EvictingCache:
        """Return a new cache of these rows alone, such as a conversation that leaves a batch; this one stays as it is.

        Only these rows are copied. `concatenate` brings them back to a batch.

        Args:
            rows: a row, int64 indices, or a bool mask [B].

        Raises:
            KVPatchError: the cache is empty or has no such row.

        Example:
            conversation = cache.select_rows(2)
        """
        checks.check_filled(self.seen_B is not None)
        index = checks.check_rows([rows] if type(rows) is int else rows, self.seen_B, "rows", "select_rows")
        self.catch_up()  # count the steps of compiled code
        with self.reading("select_rows()"):  # raises if another thread changes the cache
            new = self._copy_sharing()
            new._map_rows("select_rows()", lambda tensor: tensor[index.to(tensor.device), ...])
        limits_by_id = {id(layer.limits): new_layer.limits for layer, new_layer in zip(self.layers, new.layers, strict=True)}
        for layer, new_layer in zip(self.layers, new.layers, strict=True):
            new_layer.limits = limits_by_id[id(layer.limits)]  # layers that shared protected sizes share them again
        new.pass_record = copy.copy(self.pass_record)
        return new

    def _copy_sharing(self) -> EvictingCache:
        """Return a copy for `select_rows` to select rows of. Until then it shares the tensors of layers, states and ids."""
        tensors = self.counters.tensors_or_none
        uncopied = (self.make_rotary_table, None if tensors is None else tensors.tape_BN)
        new, memo = super().__copy__(), {id(item): item for item in uncopied}
        attributes = self._copy_attributes() | dict.fromkeys(("layers", "states", "shared_score", "ids"))  # set below
        vars(new).update(copy.deepcopy(attributes, memo))
        new.layers, new.states = [layer.copy_sharing() for layer in self.layers], self.states.copy_sharing()
        new.shared_score, new.ids = self.shared_score, self.ids
        return new

    @staticmethod
    @writable
    def concatenate(caches: Sequence[EvictingCache], consume: bool = False) -> EvictingCache:
        """Join the rows of several caches, in their order, into one cache to continue their texts together.

        Texts may have any lengths: get_seq_length() of the result is the longest one's, and nothing is padded. A forward
        takes one token per row and no attention_mask (or one of the new columns only); position_ids are filled in, and if
        given must equal `next_positions()`. Drop rows with batch_select_indices().

        Args:
            caches: made under one patch, each at the end of a prompt or after generated tokens.
            consume: empty the caches layer by layer, so that at most one layer is held twice.

        Raises:
            KVPatchError: caches have different settings or model shapes; one is empty or in the middle of a prompt, was made
                with room=, or read padding without position_ids.
        """
        return concat.join_texts(caches, consume)

    # ---- rows of the batch ----

    def _map_rows(self, what: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor whose first axis is the batch by `change` of it, which selects, reorders or repeats rows.

        `select_rows`, `reorder_cache` and the batch_ methods call it. what: the method, for errors. If texts were concatenated,
        rows differ in length: the longest row left sets the counters of columns and steps, which shrink when a longer one goes.
        """
        with self.changing(what):
            self.catch_up()
            try:
                seen_B = None if self.seen_B is None else change(self.seen_B)
            except BaseException:  # an error with the first tensor leaves the cache unchanged
                self.end_change()
                raise
            self.unstack_layers(due=False)  # layers stacked for decoding get buffers of their own
            for layer in self.layers:
                layer.map_rows(change)
            self.states.map_rows(change)
            before_B, self.seen_B, counters, turns = self.seen_B, seen_B, self.counters, self.turns
            self.shared_score = None if self.shared_score is None else change(self.shared_score)
            pair = (counters.steps_behind_B, counters.temperature_steps_B)
            counters.steps_behind_B, counters.temperature_steps_B = (None if one is None else change(one) for one in pair)
            self.rows.gaps_B = None if self.rows.gaps_B is None else change(self.rows.gaps_B)  # padding after tokens
            self.ids = self.ids.map_rows(change)
            self.model_stamp = None if self.model_stamp is None else self.model_stamp.map_rows(change)  # who read them
            if counters.tensors_or_none is not None:
                counters.tensors_or_none.tape_BN = change(counters.tensors_or_none.tape_BN)  # ids of the newest compiled steps
            self.lifetimes = None if self.lifetimes is None else self.lifetimes.map_rows(change)
            if turns.unfinished:  # a prompt that comes in several passes goes on; begin_B: tokens of each row before it
                turns.begin_B = change(torch.tensor(turns.begin_B, device="cpu")).tolist()
            if self.rows.concatenated and self.seen_B is not None:  # no mask counts its columns: they are the longest row's
                counters.tensors_or_none, columns = None, int(self.seen_B.max())
                self.rows.columns_at_edit -= min(self.columns_read - columns, self.rows.columns_at_edit)
                self.ids.keep_last(columns)
                for layer in self.layers:
                    layer.columns_read = columns
                counters.keep_rows(columns)
            if self._may_shrink(before_B):
                editing.trim_slots(self)

    @writable
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put row `beam_idx[i]` at row i, after each step of beam search. `lifetimes` keeps dropped rows, for records."""
        self.refuse_unfinished()
        checks.check_beams(beam_idx, self.seen_B)
        lost = None if self.lifetimes is None or self.seen_B is None else self.lifetimes.select_dropped(beam_idx, self.seen_B)
        self._map_rows("reorder_cache()", lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))
        if self.lifetimes is not None:
            self.lifetimes.dropped_rows = lost

    @writable
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these batch rows alone, as when other texts have ended: int64 indices, or a bool mask [B]."""
        self.refuse_unfinished()
        index = checks.check_rows(indices, self.seen_B)
        self._map_rows("batch_select_indices()", lambda tensor: tensor[index.to(tensor.device), ...])

    @writable
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` copies of it, for several continuations of a text."""
        self.refuse_unfinished()
        check_count("repeats", repeats, "copies of each row")
        self._map_rows("batch_repeat_interleave()", lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _may_shrink(self, before_B: Tensor | None) -> bool:
        """Tell `_map_rows` if fewer slots may be enough: some head may have empty ones, and rows can differ.

        before_B: tokens of each row before the change. If rows of the same lengths remain, they may only have been reordered,
        which leaves no slot empty, unless rows of one length can hold different numbers of tokens (`may_differ`).
        """
        if before_B is None or self.seen_B is None or not any(layer.may_have_empty for layer in self.layers):
            return False
        may_differ = any(layer.evict_interval > 1 or isinstance(layer.mode, Moving) for layer in self.layers)
        may_differ = may_differ or self.rows.concatenated or self.rows.columns_at_edit > 0 or self.turns.prompts_read > 1
        return may_differ or set(before_B.tolist()) != set(self.seen_B.tolist())

    # ---- editing ----

    @writable
    def forget(self, spans: Sequence[tuple[int, int]], row: int | None = None) -> None:
        """Take tokens out of the text: all layers and heads go on as if these had been masked from now on.

        Tokens after them were computed while they were there, and stay. Positions stay, too (`positions="renumbered"` closes
        up). The bytes are free at once; budgets stay as the prompt's end fixed them, so that new tokens fill the room. Ids and
        `get_seq_length()` still count what was forgotten. crop() cannot take back an edit.

        Args:
            spans: (start, stop) in positions of the text, stop left out; they may not overlap.
            row: of the batch; None: each row.

        Raises:
            KVPatchError: a span is not of the text; the cache is empty, in the middle of a prompt, in an engine's pages, or was
                made with room=; the model keeps a recurrent state, or other processes hold some of its heads.

        Source: design of this library; what dropping a tool result costs a model is on docs/guides/agents.md.

        Example:
            cache.forget([(120, 865)])
        """
        editing.forget(self, spans, row)

    replace = insert = editing.refuse_reading

    # ---- rollback ----

    @writable
    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last tokens exactly: keys, values, positions, scores and free slots.

        Args:
            tokens_to_remove: their number, negated, as in transformers; if positive, the length to crop to (before 5.15).

        Raises:
            KVPatchError: the steps were not recorded (call `activate_past_recording()` before them), or a hybrid's recurrent
                state cannot be taken back.
        """
        editing.crop(self, tokens_to_remove)
