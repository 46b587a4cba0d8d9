"""One layer's slots: keys, values, the original position of each token, and the score state beside it.

A key's position is in the key (rotary, learned) or in the positions tensor (ALiBi), so the order in memory is free. A layer
that has reached its budget has budget + 1 slots: a decode step writes the new token into the one free slot and names the
next free one. Nothing else moves. Below budget, or if decode steps evict nothing, a layer grows in steps (growth.py).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arch.upstream import CacheLayerMixin
from ..backends.entries import FULL, Latent
from ..errors import KVPatchError
from ..policies.batched import change_tensors
from ..policies.content import sort_by_position
from ..policies.context import OWN_STATE, Limits, accumulator
from ..policies.needs import Note
from ..policies.rhythm import list_moves, list_steps_to_eviction
from . import slots
from .growth import Layout, capacities, plan, slack
from .modes import Appending, Empty, Evicting, Filling, Growing, Mode, Moving, Reading, Slotted
from .narrow import make_prompt_slots, open_slots
from .pickling import Unpicklable
from .rollback import UNDO_STEPS, Undo, record_step, restore_step
from .slots import Slots, collect_entries, fit_columns, gather_entries
from .tensors import HEAD_TENSORS

if TYPE_CHECKING:
    from ..backends.protocol import Geometry


class SlotLayer(Unpicklable, CacheLayerMixin):
    """One layer's keys and values in `kv` (slots.py), and the state beside them. `columns_used` of C columns are in use.

    mode: where the next token goes (modes.py). positions [B,H,C] int64, -1 for an empty slot. state: tensors [B,H,C] or
    [B,H,C,G] beside the keys. columns_read: columns of the text read so far, padding included. may_have_empty: a used slot may
    be empty while a query attends (padding, rows with different budgets). in_text_order: columns hold the tokens in the text's
    order, without gaps between them. first_croppable: the columns before it cannot be cropped, because an eviction chose them
    or some rows' padding lies there.
    """

    def __init__(self, statistics: tuple[str, ...] = (), bits: int = FULL, every: int = 1, latent: bool = False) -> None:
        """Make an empty layer, for `TextState.__init__`.

        statistics: names of the policy's sums of attention, which `state` keeps per slot. bits: of each stored number. every:
        tokens that a head evicts at once. latent: a value is a part of its key, and not stored.
        """
        self.statistics, self.bits, self.evict_interval, self.latent = statistics, bits, every, latent
        self.storage: Callable[[Tensor, Tensor], Slots] | None = None  # of an engine, in place of buffers of the layer's own
        self.record_past = False  # steps are logged for crop(), if `activate_past_recording()` sets it
        self.reset()

    def reset(self) -> None:
        """Set all fields as before the first token, for `__init__`, or as `TextState.reset` empties the cache."""
        self.kv: Slots = slots.nothing()
        self.is_initialized = False
        self.positions: Tensor = torch.empty(0, dtype=torch.long, device="cpu")  # in the text; -1: an empty slot
        self.state: dict[str, Tensor] = {}  # what the policy keeps per slot
        self.mode: Mode = Empty()  # where the next token goes
        self.columns_used = self.columns_read = 0  # of the buffers, and of the text
        self.may_have_empty = False
        self.keep_BH1: Tensor | None = None  # tokens that each head may hold while decoding
        self.lost_BH1: Tensor | None = None  # scores of the tokens that each head has evicted, added up
        self.limits: Limits | None = None  # sizes that are protected from eviction
        self.need_notes: dict[str, Note] = {}  # what the policy remembers of the layer (policies/needs)
        # state of coming tokens that follows from their positions, and the columns seen at the first of them
        self.precomputed_state: tuple[int, dict[str, Tensor]] | None = None
        # what _find_head_starts and free_slots return, kept with the shape and the free_BH from which it follows
        self.known_head_starts: tuple[tuple[int, ...], Tensor] | None = None
        self.known_free_slots: tuple[Tensor, Tensor] | None = None
        self.geometry: Geometry | None = None  # scale, window and ALiBi slopes of the layer's attention
        self.output_rows: Tensor | None = None  # of a projection whose weight had to be dequantized or gathered
        self.mass_BH: Tensor | None = None  # share of the prompt's attention that the kept tokens received
        self.unfitted_BH: Tensor | None = None  # 1: a merging policy's values for the head were not finite, and not taken
        self.traced = False  # the pass is a traced step (compiled.py)
        # keys and values of the used columns with their graph, while a pass computes gradients
        self.graph: tuple[Tensor, Tensor] | None = None
        self.in_text_order = True  # and without gaps
        self.first_croppable = 0
        self.sliding: int | None = None  # the window of attention
        self.undo_log: deque[Undo] = deque(maxlen=UNDO_STEPS)  # what decode steps overwrote, for crop()

    # ---- the interface of a transformers layer ----

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Keys of the columns in use, as in a DynamicCache; for a ragged layer, entries [F,D]. For inspection."""
        return self.kv.as_transformers(self.columns_used)[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Values of the columns in use."""
        return self.kv.as_transformers(self.columns_used)[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty slots for keys and values of these shapes; the first `append` calls this."""
        B, H, _, D = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        keys, values = key_states.new_empty(B, H, 0, D), value_states.new_empty(B, H, 0, value_states.shape[-1])
        self.kv = self._make_slots(keys, values)
        self.positions = torch.empty(B, H, 0, dtype=torch.long, device=self.device)
        self.is_initialized, self.mode = True, Reading()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse to write: only the attention of an unpatched model calls this."""
        raise KVPatchError(
            "This EvictingCache was handed to a model that is not patched (or no longer is): use it inside the "
            "`with kvpatch.patched(...)` block it was made in."
        )

    def get_seq_length(self) -> int:
        """Return the columns read, evicted tokens and padding included: transformers numbers new tokens by it."""
        return self.columns_read

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the mask that transformers makes: it covers the whole text, evicted tokens too."""
        return self.columns_read + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1, which tells transformers that a text may have any length."""
        return -1

    @property
    def own_budget_BH1(self) -> Tensor:
        """Tokens that each head may hold while decoding: `keep_BH1`, which is set in every layer that then evicts."""
        assert self.keep_BH1 is not None
        return self.keep_BH1

    @property
    def own_limits(self) -> Limits:
        """Sizes that are protected from eviction: `limits`, which `set_limits` sets as an evicting layer's prompt ends."""
        assert self.limits is not None
        return self.limits

    def activate_past_recording(self) -> None:
        """Have decode steps logged from now on, so that crop() can take them back (see `log_undo`)."""
        self.record_past = True

    @property
    def batch_size(self) -> int:
        return self.positions.shape[0] if self.is_initialized else -1

    def copy_sharing(self) -> SlotLayer:
        """Return a copy that shares all tensors; `map_rows` then gives the copy tensors of its own.

        `EvictingCache._copy_sharing` calls it for `select_rows`. The copy's undo log is empty: crop() needs new steps.
        """
        new = copy.copy(self)
        new.mode, new.state, new.need_notes = copy.copy(self.mode), dict(self.state), dict(self.need_notes)
        new.undo_log = deque(maxlen=UNDO_STEPS)
        return new

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor whose first axis is the batch by `change` of it, for `EvictingCache._map_rows`.

        `change` selects, reorders (beams) or repeats rows. The undo log and state computed ahead are dropped.
        """
        if not self.is_initialized:
            return
        self.kv = self.kv.map_rows(change, *self.positions.shape[:2])
        per_head = (one.name for one in HEAD_TENSORS)  # attributes with a number for each head
        for name in ("positions", "state", "limits", "need_notes", *per_head):
            setattr(self, name, change_tensors(getattr(self, name), change))
        self.mode.change_rows(change)
        if self.kv.width < self.positions.shape[2]:  # ragged slots, and the longest row was dropped
            C = self.columns_used = self.kv.width
            self.first_croppable = min(self.first_croppable, C)
            self.positions = self.positions[:, :, :C].contiguous()
            self.state = {name: tensor[:, :, :C].contiguous() for name, tensor in self.state.items()}
        self.undo_log.clear()
        self.precomputed_state = None

    # ---- writing ----

    def reserve(self, columns: int, most: list[int] | None = None) -> None:
        """Move to larger buffers, with spare columns, if these have fewer than `columns` columns.

        most: a list of one number, the columns that are ever needed, which bounds the spare ones; None: no bound is known.
        """
        if columns > self.positions.shape[2]:
            self.resize_slots([max(capacities([columns], most, self.count_spare(columns))[0], columns)])

    def resize_slots(self, capacities: list[int], goals: list[int] | None = None) -> None:
        """Move used columns to larger or smaller buffers. Replaces `kv`, `positions` and `state`.

        `reserve`, `allocate`, `give_back_slots` and `_move_slots` call it. capacities: new slots of each head, or one number
        for all heads of dense buffers. goals: slots of each head at its budget, if ragged.
        """
        with torch.inference_mode(False), torch.no_grad():  # buffers stay writable outside inference mode
            self.kv = self.kv.resized(capacities, goals, self.columns_used)
            C = self.kv.width  # slots of each head, of the longest if ragged
            self.positions = fit_columns(self.positions[:, :, : self.columns_used], C, -1)
            self.state = {name: fit_columns(tensor[:, :, : self.columns_used], C, 0) for name, tensor in self.state.items()}
        self.known_free_slots = None

    def _make_slots(self, keys: Tensor, values: Tensor) -> Slots:
        """Return slots that hold a first prompt's keys and values, in memory of the layer's own, or an engine's (`storage`)."""
        return make_prompt_slots(keys, values, self.bits, self.latent) if self.storage is None else self.storage(keys, values)

    def adopt(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor, entry: dict[str, Tensor]) -> None:
        """Take the keys and values of a text's first prompt as storage, without a copy, and set positions and state.

        `_write_columns` calls it as the layer reads that prompt. entry: the tensors that the policy stores with tokens, by
        name. `allocate` copies kept tokens where the prompt ends.
        """
        self.dtype, self.device, self.is_initialized = k_BHQD.dtype, k_BHQD.device, True
        self.kv = self._make_slots(k_BHQD.detach(), v_BHQD.detach())
        self.columns_used = k_BHQD.shape[2]
        self.positions = positions_BQ[:, None].expand(*k_BHQD.shape[:3]).contiguous()
        self.state = dict(entry)
        self._zero_statistics(0)

    def append(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor, entry: dict[str, Tensor]) -> None:
        """Write a pass's keys, values, positions and what the policy stores (`entry`) after used columns; buffers may grow."""
        if not self.is_initialized:
            self.lazy_initialization(k_BHQD, v_BHQD)
        start = self.columns_used
        self.open_columns(k_BHQD.shape[2], entry)
        self.kv = dense = self.kv.make_dense(*k_BHQD.shape[:2])  # ragged slots become dense
        dense.append(start, k_BHQD, v_BHQD)
        self.positions[:, :, start : self.columns_used] = positions_BQ[:, None]

    def statistic(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return the tensor `name` that the policy keeps per slot, such as sums of attention, to be read or changed in place.

        If there is none yet, it is made of zeros: one number a slot, or shaped as `like`.
        """
        if name not in self.state:
            # accumulator(): a dtype with enough bits for sums
            dtype, rest = (accumulator(self.dtype), ()) if like is None else (like.dtype, like.shape[3:])
            self.state[name] = torch.zeros(*self.positions.shape, *rest, dtype=dtype, device=self.positions.device)
        return self.state[name]

    def _zero_statistics(self, start: int) -> None:
        """Set the policy's sums of attention to zero for tokens just written: the used columns from `start` on.

        `statistics`: names of these sums, in `state`.
        """
        for name in self.statistics:
            if name in self.state:  # a new one is zero
                self.state[name][:, :, start : self.columns_used].fill_(0)
            else:
                self.statistic(name)

    def write(self, k_BH1D: Tensor, v_BH1D: Tensor, positions_B1: Tensor | None, entry: dict[str, Tensor]) -> None:
        """Write a decode step's token of each row, in place: into each head's free slot, or after the used columns.

        `run_step` calls it where torch computes the step. entry: what the policy stores with it, by name. positions_B1: None if
        stacked layers write them for all layers at once.
        """
        if self.mode.fills_free_slots:
            self.kv.write_at(self.free_rows(), *self.kv.encode_pair(k_BH1D, v_BH1D))
            self.write_entry(entry)
            if positions_B1 is not None:
                self.write_position(positions_B1)
        elif positions_B1 is None:  # of a stack: the buffers have room (`settled`), and only this layer's part is written
            self.kv.make_dense(*k_BH1D.shape[:2]).append(self.columns_used, k_BH1D, v_BH1D)
            self.write_entry(entry)
            self.columns_used += 1
        else:
            self.append(k_BH1D, v_BH1D, positions_B1, entry)

    def open_columns(self, tokens: int, entry: dict[str, Tensor]) -> None:
        """Make room for tokens after the used columns, and write their state (`entry`); `append`, or a kernel, writes the rest.

        Buffers get no more columns than the budget.
        """
        start = self.columns_used
        self.reserve(start + tokens, self._bound_columns())
        self.columns_used += tokens
        for name, tensor in entry.items():
            self.statistic(name, tensor)[:, :, start : self.columns_used] = tensor
        self._zero_statistics(start)

    def write_position(self, positions_B1: Tensor) -> None:
        """Write a decoded token's position, and zeros for the policy's sums, into each head's free slot or the next column."""
        if not self.mode.fills_free_slots:
            self.positions[:, :, self.columns_used] = positions_B1
            for name in self.statistics:
                self.state[name][:, :, self.columns_used] = 0
            return
        (B, H, _), slot = self.positions.shape, self.free_slots()
        self.positions.view(-1).index_copy_(0, slot, positions_B1.expand(B, H).reshape(-1))
        for name in self.statistics:
            self.state[name].view(-1).index_fill_(0, slot, 0)

    def write_entry(self, entry: dict[str, Tensor]) -> None:
        """Write what the policy stores with a decoded token (`entry`, tensors by name) into the slots that it goes to."""
        for name, tensor in entry.items():
            if not self.mode.fills_free_slots:
                self.state[name][:, :, self.columns_used : self.columns_used + 1] = tensor
                continue
            rows = self.state[name].flatten(0, 2)
            rows.index_copy_(0, self.free_slots(), tensor.reshape(-1, *rows.shape[1:]))

    def make_blanks(self, tokens: int = 1) -> dict[str, Tensor]:
        """Return zeros [B,H,tokens], by name, for state that only marked tokens have, such as the spans of `quota=`.

        `Call.entry` and `Call.step_entry` add them to what new tokens write, for the slot that it goes to may still hold an
        evicted token's mark.
        """
        # OWN_STATE: kinds of state per slot beside what a policy's score stores
        names = [kind.name for kind in OWN_STATE if kind.blank and kind.name in self.state]
        return {name: self.state[name].new_zeros(*self.positions.shape[:2], tokens) for name in names}

    def free_slots(self) -> Tensor:
        """Return the free slots, which the next token goes into, as indices [B*H] into the flattened slots, computed once.

        `write_position` and `write_entry` ask. `known_free_slots` keeps the result while `mode.free_BH` is the same tensor.
        """
        free_BH = self.mode.free_BH
        if self.traced:  # a step of torch.compile keeps no result
            return free_BH.reshape(-1) + self._find_head_starts()
        if self.known_free_slots is None or self.known_free_slots[0] is not free_BH:
            self.known_free_slots = (free_BH, free_BH.reshape(-1) + self._find_head_starts())
        return self.known_free_slots[1]

    def free_rows(self) -> Tensor:
        """Return each head's free slot as an index [B*H] into the flattened keys and values, for `write` and the undo log.

        Ragged or paged storage places heads otherwise than `positions`, into which `free_slots` returns indices.
        """
        return self.kv.rows(self.mode.free_BH, self.free_slots())

    def _find_head_starts(self) -> Tensor:
        """Return the index at which each head's slots begin, flattened [B*H], for `free_slots`."""
        shape = tuple(self.positions.shape)
        if self.traced:  # a step of torch.compile keeps no result
            return torch.arange(0, shape[0] * shape[1] * shape[2], shape[2], device=self.positions.device)
        if self.known_head_starts is None or self.known_head_starts[0] != shape:
            B, H, C = shape
            self.known_head_starts = (shape, torch.arange(0, B * H * C, C, device=self.positions.device))
        return self.known_head_starts[1]

    def view(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention reads in a pass: keys, values, positions of used slots; [F,D] if heads differ in length."""
        T = self.columns_used
        if T == self.positions.shape[2]:
            return self.kv.keys, self.kv.values, self.positions
        return *self.kv.view(T), self.positions[:, :, :T]

    def outline_view(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tensors of the shapes of `view`'s keys and values, not always with their contents, and its positions.

        `Call.keys` asks when a backend is to be chosen: storage that would have to be copied for a view is not copied.
        """
        return *self.kv.outline_view(self.columns_used), self.positions[:, :, : self.columns_used]

    def state_view(self) -> dict[str, Tensor]:
        """Return what the policy keeps for the used slots, tensors by name, for `eviction_context`: views of the tensors."""
        if self.columns_used == self.positions.shape[2]:
            return self.state
        return {name: tensor[:, :, : self.columns_used] for name, tensor in self.state.items()}

    # ---- evicting ----

    def allocate(self, index_BHK: Tensor | None, kept_BHK: Tensor | None, layout: Layout) -> None:
        """End a prompt: allocate slots by `layout`, and move the tokens at `index_BHK` (None: all used) to each head's front.

        `_compress_layer` and `_keep_all` call it. kept_BHK: False where a head keeps fewer than K, so that the slot
        is empty; None: each keeps K. Keys, values, positions and state are replaced; those of other tokens are gone.
        """
        if index_BHK is None:
            self.round()  # to the bits of the cache
            self.resize_slots([max(*layout.capacities, self.columns_used)])
            return
        self._cut_graph(index_BHK)  # keys and values with their autograd history
        with torch.no_grad():
            self.kv = self.kv.make_dense(*index_BHK.shape[:2])
            self.kv.fix_centre(self.positions[:, :, : self.columns_used])  # sets what keys of 8 or 4 bits are rounded around
            self.kv = self.kv.move_to_front(index_BHK, kept_BHK, layout)
            C, K = self.kv.width, index_BHK.shape[-1]  # slots, and tokens kept, of each head
            self.positions = collect_entries(self.positions, index_BHK, C, -1)
            self.state = {name: collect_entries(tensor, index_BHK, C, 0) for name, tensor in self.state.items()}
        self.columns_used = self.first_croppable = K  # crop() can take back none of them
        self._round_graph()
        self.in_text_order, self.known_free_slots = False, None
        if kept_BHK is not None:
            self.positions[:, :, :K].masked_fill_(~kept_BHK, -1)
            if "protect" in self.state:  # an empty slot is unmarked, for its next token will write no mark
                self.state["protect"][:, :, :K] &= kept_BHK

    def replace_values(self, values_BHKD: Tensor, kept_BHK: Tensor | None) -> None:
        """Replace kept tokens' values by those of a merging policy. kept_BHK: False in slots that stay empty.

        `_compress_layer` calls it after `allocate`, where a prompt or a block of it ends.
        """
        columns = torch.arange(values_BHKD.shape[2], device=values_BHKD.device).expand(values_BHKD.shape[:3])
        rows, values = self.kv.rows_of(columns), values_BHKD.detach().flatten(0, 2)  # indices into the flattened slots
        if kept_BHK is not None:
            filled = kept_BHK.flatten().nonzero().squeeze(1)
            rows, values = rows[filled], values[filled]
        codec = self.kv.codecs[1]
        assert not isinstance(codec, Latent), "merging is refused where values are a part of their keys"
        self.kv.write_at(rows, self.kv.read_at(rows)[0], codec.encode(values))  # with the keys as they are
        if self.graph is not None:
            self.graph = (self.graph[0], values_BHKD)
            self._round_graph()

    def round(self) -> None:
        """Round the keys and values in use to the cache's bits, where a prompt or a block of it ends and all are kept.

        `allocate` and `_keep_all` call it. Replaces `kv`, `positions` and `state`, if the slots become others.
        """
        self.kv.fix_centre(self.positions[:, :, : self.columns_used])  # sets what keys are rounded around
        rounded = self.kv.close_columns(self.columns_used)
        if rounded is not self.kv:  # in new buffers, of the used columns alone
            self.kv, self.positions = rounded, self.positions[:, :, : self.columns_used]
            self.state = {name: tensor[:, :, : self.columns_used] for name, tensor in self.state.items()}
            self._round_graph()

    # ---- transitions ----

    def begin_prompt(self) -> None:
        """Begin a prompt, or a piece of one, for `read_prompt`: tokens are now appended after the used columns.

        Called before the keys are written. Sets the mode, and storage that can be appended to in full precision. Some used
        columns may be empty.
        """
        if not isinstance(self.mode, Reading):
            if self.mode.fills_free_slots:
                self.kv = self.kv.make_dense(*self.positions.shape[:2])
                self.columns_used, self.may_have_empty = self.taken, True  # taken: without columns of free slots at the end
                self.first_croppable = min(self.first_croppable, self.columns_used)
            self.mode = Reading(croppable=self.mode.croppable)
        self.kv = open_slots(self.kv)

    def start_appending(self) -> None:
        """Set `mode` to Appending where a prompt ends: later tokens go after the used columns, and none is evicted."""
        self.mode = Appending()

    def start_filling(self, steps: int) -> None:
        """Set `mode` to Filling where a prompt ends: tokens are appended for `steps` steps, until all heads are at budget."""
        self.mode = Filling(steps)

    def start_growing(self, next_BH: Tensor, counts: list[int]) -> None:
        """Set `mode` to Growing where a prompt ends: tokens go into each head's slots from `next_BH` on, and none is evicted.

        `_start_keeping` and `_set_mode` call it. counts: slots that each head has taken.
        """
        self._open_slots(Growing(next_BH), counts, None)

    def start_evicting(self, steps: int, counts: list[int], goals: list[int] | None, next_BH: Tensor | None = None) -> None:
        """Set `mode` to Evicting where a prompt ends: tokens go into empty slots, and heads evict once at their budget.

        `_start_evicting` of attention/compress.py and `_set_mode` call it. steps: decode steps until all heads are at their
        budget. counts: tokens of each head. goals: slots of each head at its budget. next_BH: the first empty slot of each
        head, if it is known, which saves launches.
        """
        next_BH = self.empty_slots() if next_BH is None else next_BH
        # also measures the room for coming tokens
        self._open_slots(Evicting(next_BH, steps_until_full=steps), counts, goals)

    def start_moving(self, counts: list[int], goals: list[int] | None) -> None:
        """Set `mode` to Moving, for a budget that changes with the text: tokens go into empty slots, heads evict down to it.

        `_compress_layer` calls it where a prompt ends, `_join_layer` for joined rows, and `pack` after it has moved tokens.
        counts, goals: as in `start_evicting`.
        """
        self.may_have_empty = True
        # packed_BH: tokens of each head now; a head that shrinks keeps its slots until they are given back
        self._open_slots(Moving(self.empty_slots(), packed_BH=self._by_head(counts)), counts, goals)

    def _by_head(self, counts: list[int]) -> Tensor:
        """Return a number of each head, listed in the order b * H + h, as a tensor [B,H]."""
        return torch.tensor(counts, device=self.positions.device).view(self.positions.shape[:2])

    def _open_slots(self, mode: Growing | Evicting | Moving, counts: list[int], goals: list[int] | None) -> None:
        """Set a mode in which every column is a slot, and measure the room for coming tokens; queries see no empty slot.

        `start_growing`, `start_evicting` and `start_moving` call it. counts, goals: as `measure_room` takes them.
        """
        self.columns_used, self.in_text_order, self.mode = self.positions.shape[2], False, mode
        self.measure_room(counts, goals)

    def empty_slots(self) -> Tensor:
        """Return the first empty slot of each head [B,H], or the index after its last slot if none is empty."""
        lowest = self.positions.min(-1)
        return lowest.indices.masked_fill(lowest.values >= 0, self.positions.shape[2])

    # ---- growing ----

    def counts(self) -> list[int]:
        """Count the slots that each head has taken, in the order b * H + h; waits for the device.

        In mode Growing these are all slots before the next token's, some of which padding may have left empty.
        """
        taken = self.mode.free_BH if isinstance(self.mode, Growing) else (self.positions >= 0).sum(-1)
        return taken.flatten().tolist()

    def list_slot_goals(self) -> list[int] | None:
        """Return how many slots each head needs at its budget, to plan buffers; None if decode steps do not evict.

        `make_room`, `give_back_slots` and `_list_goals` ask: `evict_interval` slots more than the budget, for the next tokens.
        """
        if not self.mode.evicts or self.keep_BH1 is None:
            return None
        return [keep + self.evict_interval for keep in self.keep_BH1.flatten().tolist()]

    def measure_room(self, counts: list[int] | None = None, goals: list[int] | None = None) -> None:
        """Update how many tokens can be written before larger buffers are needed.

        `make_room` and `give_back_slots` call it once slots have moved, `_open_slots` where a prompt ends. counts: tokens of
        each head. goals: slots of each head at its budget. Both are computed if they are not given. Sets the mode's `slack`
        (`slack` - `grown` tokens fit), `steps_until_full`, and what `update_short_heads` sets.
        """
        mode = self.mode
        if isinstance(mode, Slotted):
            counts, goals = counts or self.counts(), goals or self.list_slot_goals()
            heads = zip(self.update_short_heads(goals), self.kv.capacities(), counts, strict=True)
            free_counts = [capacity - count for short, capacity, count in heads if short]
            mode.grown = mode.grown if mode.has_short_heads else 0  # tokens since the prompt, counted only if a head is short
            mode.slack = mode.grown + min(free_counts, default=0)
        if isinstance(mode, Evicting) and mode.steps_until_full:
            counts, goals = counts or self.counts(), goals or self.list_slot_goals() or []
            # rows that were dropped may have been those with the most steps to go
            most = max(goal - 1 - count for goal, count in zip(goals, counts, strict=True))
            mode.steps_until_full = min(mode.steps_until_full, most)
        self.update_pace(counts, goals)

    def update_pace(self, counts: list[int] | None = None, goals: list[int] | None = None) -> None:
        """Set in how many steps heads evict (`mode.waits`), if `evict_interval` > 1.

        `measure_room` calls it once slots changed, and `contents.check_cache` as a cache is loaded.
        """
        if isinstance(self.mode, Evicting) and self.evict_interval > 1:
            self.mode.evict_interval = self.evict_interval
            self.mode.waits = list_steps_to_eviction(counts or self.counts(), goals or self.list_slot_goals() or ())

    def update_short_heads(self, goals: list[int] | None = None) -> list[bool]:
        """Tell which heads are short: they have fewer slots than their budget needs.

        `measure_room` calls it after slots were moved, and `contents.check_cache` as a saved cache is loaded. Sets the mode's
        `has_short_heads`, and in mode Evicting `all_heads_short`. goals: slots that each head needs at its budget, in the order
        b * H + h; asked of `list_slot_goals` if not given. It has none where nothing is evicted: all heads count as short.
        """
        capacities, goals = self.kv.capacities(), goals or self.list_slot_goals()
        short = [goals is None or capacity < goals[i] for i, capacity in enumerate(capacities)]
        if isinstance(self.mode, Evicting | Moving):
            self.mode.has_short_heads = any(short)
        if isinstance(self.mode, Evicting):
            self.mode.all_heads_short = all(short)
        return short

    def _bound_columns(self) -> list[int] | None:
        """Return, as a list of one number, the most columns that appended tokens can take; None if no budget bounds them."""
        return [self.columns_used + self.mode.steps_until_full + 1] if self.mode.evicts else None

    def make_room(self) -> None:
        """Move to larger buffers if some head may have no free slot left. Called before each decode step writes its token.

        `_begin_step` of attention/decode.py calls it. While some head is short, `mode.slack` - `mode.grown` tokens still fit.
        """
        mode = self.mode
        if not isinstance(mode, Slotted) or not mode.has_short_heads or mode.grown < mode.slack:
            return
        if isinstance(mode, Moving) and not self.undo_log:  # pack() would invalidate the slots that the log names
            self.pack()
            return
        # waiting_slots: that each head needs between evictions of several tokens
        wanted = self.kv.plan_slots(self.counts(), self.list_slot_goals(), self.waiting_slots)
        self._move_slots([max(old, new) for old, new in zip(self.kv.capacities(), wanted, strict=True)])
        if mode.evicts:
            mode.free_BH = self.empty_slots()
        self.measure_room()

    def give_back_slots(self) -> None:
        """Free empty slots beyond the spare ones that growth.py allows, after tokens were rolled back or rows dropped.

        `trim_slots` calls it, and `contents.check_cache` as a cache is loaded. Slots of dense buffers go only if those at the
        end are empty. In mode Moving, whose budgets follow the text, `pack` moves tokens to fewer slots; if none need go,
        `packed_BH` notes how many tokens each head holds, to which its slots are compared until the next time.
        """
        if not self.is_initialized:
            return
        C = self.positions.shape[2]
        if not self.mode.fills_free_slots:  # tokens are appended
            used = self.columns_used
            enough = capacities([used], self._bound_columns(), self.count_spare(used))[0]  # with spare ones
            if enough < C:
                self.resize_slots([enough])
            return
        # of each head: slots, tokens, and slots needed at its budget; waiting_slots: free ones, if several tokens go at once
        old, counts, goals = self.kv.capacities(), self.counts(), self.list_slot_goals()
        if isinstance(self.mode, Moving) and not self.undo_log:  # whose slots pack() would invalidate
            if sum(old) > self.kv.bound_slots(counts, goals, self.waiting_slots):
                self.pack()
            else:
                self.mode.packed_BH = self._by_head(counts)
            return
        fitting = list(map(min, old, self.kv.plan_slots(counts, goals, self.waiting_slots)))
        # slots that would go: those of each head after as many as fit
        enough_BH1 = torch.tensor(fitting, device=self.positions.device).view(*self.positions.shape[:2], 1)
        gone_BHC = torch.arange(C, device=self.positions.device) >= enough_BH1
        # over: more slots than growth.py allows; they can go only if those at the end are empty
        over = sum(old) > self.kv.bound_slots(counts, goals, self.waiting_slots)
        if over and not bool((gone_BHC & (self.positions >= 0)).any()):
            self._move_slots(fitting)
        self.measure_room()

    def pack(self) -> None:
        """Move each head's tokens, in text order, to new slots: more or fewer, as a budget that changes with the text needs.

        `make_room` and `give_back_slots` call it. Replaces `kv`, `positions` and `state`; slot indices change.
        """
        counts, goals = self.counts(), self.list_slot_goals()
        with torch.inference_mode(False), torch.no_grad():
            (B, H, _), old = self.positions.shape, self.positions
            order, held_BH1 = sort_by_position(old)  # slots in text order, and how many of them hold tokens
            order, filled = order[:, :, : max(counts)], torch.arange(max(counts), device=old.device) < held_BH1
            # plan(): slots of each head, with spare ones; centre: what keys of 8 or 4 bits are rounded around
            kv = slots.empty(self.kv, B, H, plan(counts, goals, self.count_spare), self.kv.centre)
            head, slot = filled.flatten(0, 1).nonzero(as_tuple=True)
            source = order.flatten(0, 1)[head, slot]
            # find_begins(): where each head's slots begin among the flattened slots
            kv.write_at(kv.find_begins()[head] + slot, *self.kv.read_at(self.kv.find_begins()[head] + source))
            self.kv, C = kv, kv.width
            self.positions = fit_columns(gather_entries(old, order).masked_fill(~filled, -1), C, -1)
            self.state = {name: fit_columns(gather_entries(tensor, order), C, 0) for name, tensor in self.state.items()}
        self.columns_used = self.first_croppable = C
        self.known_free_slots = None
        self.start_moving(counts, goals)

    def _move_slots(self, capacities: list[int]) -> None:
        """Move a layer with free slots to buffers of these capacities, as room is made or given back; slot indices stay."""
        self.resize_slots(capacities, self.list_slot_goals())
        self.columns_used = self.positions.shape[2]
        self.first_croppable = min(self.first_croppable, self.columns_used)

    @property
    def waiting_slots(self) -> int:
        """Extra slots of each head if `evict_interval` > 1, for tokens that wait until several are evicted at once."""
        return self.evict_interval if self.evict_interval > 1 else 0

    def count_spare(self, tokens: int) -> int:
        """Return how many spare slots a head with so many tokens gets: `slack`, or the waiting tokens' if these are more."""
        return max(slack(tokens), self.waiting_slots)

    @property
    def taken(self) -> int:
        """Columns in use; in mode Growing, where each column of dense slots is in use, those that hold tokens."""
        mode, used = self.mode, self.columns_used
        return used - (mode.slack - mode.grown) if isinstance(mode, Growing) and self.kv.head_offsets is None else used

    def advance(self) -> None:
        """Make the slot after the new token's the free one in each head, at the end of a decode step that evicts nothing.

        `_end_step` of attention/decode.py calls it. Does nothing where tokens are appended.
        """
        if not self.mode.fills_free_slots:
            return
        self.set_free(self.mode.free_BH + 1)
        if not self.traced:  # `catch_up` counts compiled steps
            self.mode.count(1)

    def _cut_graph(self, index_BHK: Tensor) -> None:
        """Keep in `graph` (keys and values with autograd history) only the entries at `index_BHK`, for `allocate`."""
        if self.graph is not None:
            with torch.enable_grad():
                self.graph = (gather_entries(self.graph[0], index_BHK), gather_entries(self.graph[1], index_BHK))

    def _round_graph(self) -> None:
        """Round `graph` (keys and values with autograd history) for the next block's attention; gradients pass unchanged."""
        if self.graph is not None and not all(codec.exact for codec in self.kv.codecs):
            keys, values = self.kv.numbers(self.columns_used)  # the stored keys and values, as they are after rounding
            with torch.enable_grad():
                self.graph = (_pass_gradient(self.graph[0], keys), _pass_gradient(self.graph[1], values))

    def set_free(self, slot_BH: Tensor) -> None:
        """Set each head's slot for the next token, `mode.free_BH`; in place in a traced step, whose graph reads that tensor."""
        if self.traced:
            self.mode.free_BH.copy_(slot_BH)
        else:
            self.mode.free_BH = slot_BH

    def follow_kernels(self) -> None:
        """End a decode step whose kernel has written the next free slots in place: drop cached indices, count the new token."""
        if not self.traced:
            self.refresh_free_slots()
            self.mode.count(1)

    def refresh_free_slots(self) -> None:
        """Find the free slots anew after kernels have run, if heads still fill up: a kernel leaves a full head's old index.

        `follow_kernels` and `catch_up` call it. Drops cached indices in any case.
        """
        self.known_free_slots = None
        if self.mode.has_short_heads and self.mode.evicts:
            self.mode.free_BH = self.empty_slots()

    def free(self, slot_BH: Tensor) -> None:
        """Evict, in a decode step, the token in one slot of each head; the next token goes into that slot.

        `_evict_over_budget` calls it. Sets that slot's position to -1; its key and value stay until they are overwritten.
        """
        if self.mode.fills_free_slots:
            self.set_free(slot_BH)
        else:  # tokens were appended until now, and the budget is reached
            self.mode = Evicting(slot_BH)
        self.in_text_order = False
        self.positions.view(-1).index_fill_(0, self.free_slots(), -1)

    def drop(self, gone_BHM: Tensor) -> None:
        """For `_evict_over_budget`: evict several tokens of each head at once (option every > 1), in the columns `gone_BHM`.

        Tokens in the last used columns move into the gaps. `columns_used` falls by M, the number of tokens that a head evicts.
        """
        into, out = list_moves(gone_BHM, self.columns_used)  # columns to fill, and columns to move there
        self.move_entries(into, out)
        self.positions.scatter_(2, into, self.positions.gather(2, out))
        for tensor in self.state.values():  # moved as positions are; at, of: `into` and `out`, widened for a tensor of 4 axes
            at, of = (one[..., None].expand(*one.shape, tensor.shape[-1]) if tensor.ndim == 4 else one for one in (into, out))
            tensor.scatter_(2, at, tensor.gather(2, of))
        self.columns_used -= gone_BHM.shape[-1]
        self.positions[:, :, self.columns_used :] = -1
        # crop() can cut none of the columns now in use; heads evict again when evict_interval more tokens have come
        self.first_croppable, self.in_text_order, self.mode.steps_until_full = self.columns_used, False, self.evict_interval - 1

    def move_entries(self, into_BHM: Tensor, out_BHM: Tensor) -> None:
        """Copy keys and values of each head from the columns `out_BHM` to the columns `into_BHM`, for `drop`.

        M: tokens that each head evicts. If steps are logged for crop(), the step's log entry gets what was in these columns.
        """
        if torch.is_grad_enabled():  # autograd may have saved the tensors: change a copy
            self.kv = self.kv.map_rows(torch.clone, *self.positions.shape[:2])
        if self.undo_log:
            both = torch.cat([into_BHM, out_BHM], -1)
            self.undo_log[-1].moved = (both, *self.kv.read_at(self.kv.rows_of(both)))
        self.kv.write_at(self.kv.rows_of(into_BHM), *self.kv.read_at(self.kv.rows_of(out_BHM)))

    @property
    def settled(self) -> bool:
        """True if coming decode steps need no more slots than there are. Only such layers are stacked, to step as one.

        `_find_stack` asks in the first layer of a decode step, `LayerStack.of` of each layer.
        """
        mode = self.mode
        if not isinstance(mode, Filling):
            return mode.fills_free_slots
        # tokens are appended, and the buffers are full just when several are evicted
        return self.evict_interval > 1 and self.columns_used + mode.steps_until_full + 1 == self.positions.shape[2]

    # ---- rollback ----

    def log_undo(self, shared: Tensor | None) -> None:
        """Record in the undo log what the coming decode step will overwrite, for crop(). `_begin_step` calls it.

        shared: the score that all layers share, or None.
        """
        self.undo_log.append(record_step(self, shared))

    def can_crop(self, tokens: int, remembers: bool) -> bool:
        """Tell `editing.can_crop` if the last `tokens` can be taken back: their steps were logged, or they were only appended.

        remembers: the policy's sums contain the attention of these tokens, which only the log can undo.
        """
        mode = self.mode
        croppable_tokens = mode.grown if isinstance(mode, Slotted) else self.columns_used - self.first_croppable
        return len(self.undo_log) >= tokens or (mode.croppable and not remembers and tokens <= croppable_tokens)

    def crop(self, tokens: int) -> Tensor | None:
        """Roll back the last `tokens`, such as rejected drafts, by the undo log, or by cutting what was only appended.

        `editing.crop` calls it for each layer. Returns the score that all layers share, as it was before these steps, if the
        log has it; else None.
        """
        shared = None
        if len(self.undo_log) < tokens:
            # nothing is scored or evicted: the last columns are the last tokens
            mode = self.mode
            if not isinstance(mode, Slotted):
                self.columns_used -= tokens
                self.positions[:, :, self.columns_used :] = -1
                for tensor in self.state.values():  # a token appended there writes no mark of `protect=`, and must find none
                    tensor[:, :, self.columns_used :] = 0
            else:
                mode.free_BH, mode.grown = mode.free_BH - tokens, mode.grown - tokens  # slots were taken one after the other
                remaining = torch.arange(self.columns_used, device=self.positions.device) < mode.free_BH[..., None]
                self.positions.masked_fill_(~remaining, -1)
            self.undo_log.clear()
        else:
            for _ in range(tokens):
                shared = restore_step(self, self.undo_log.pop())
        self.columns_read -= tokens
        return shared


def _pass_gradient(x: Tensor, rounded: Tensor) -> Tensor:
    """Return the numbers of `rounded` with the gradient of `x` (a straight-through estimate), for `_round_graph`.

    If the two hold different numbers of tokens, return `x` as it is.
    """
    return x + (rounded - x).detach() if x.shape == rounded.shape else x
