"""One layer's slots: keys, values, the original position of what lies in each, and the score state beside it.

Keys carry their position inside (rotary, learned) or beside them (ALiBi, through the positions tensor), so their order in
memory is free. After the prompt a layer that evicts holds budget + 1 slots: a decode step writes the new token into the one
free slot, and names the slot that is free next. Nothing else moves. A layer that does not evict while decoding appends
columns and grows geometrically.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .errors import KVPatchError
from .journal import JOURNAL, Undo, record, restore
from .policies.moment import Limits, accumulator
from .ragged import Extents

if TYPE_CHECKING:
    from .backends.protocol import Geometry

SLACK = 32  # free slots at most of a head that does not evict, when its stretch of a ragged layer is made or outgrown


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [B,H,C,D], of which the first `used` columns count.

    Where heads hold different numbers of tokens the layer is ragged: keys and values are rows [R,D] in which `extents` gives
    each head a stretch of its own (ragged.py), and everything below stays [B,H,C], C the longest stretch.

    positions [B,H,C] int64, -1 where a slot is empty. state: tensors [B,H,C] or [B,H,C,G] beside the keys. free_BH: the
    slot of each head that the next token goes to, or None while tokens are appended at column `used`. holes: some of the
    used slots may be empty while a query attends (padding, rows with different budgets). filling: steps until every row
    has reached its budget. contiguous: columns lie in text order without gaps. floor: columns that cannot be cropped,
    since an eviction chose them or some rows' padding lies there.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, statistics: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.statistics = statistics
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.positions: Tensor = torch.empty(0, dtype=torch.long)
        self.state: dict[str, Tensor] = {}
        self.free_BH: Tensor | None = None
        self.used = self.seen = self.filling = 0
        self.holes = False
        self.evicting = False
        self.keep_BH1: Tensor | None = None  # tokens that each head may hold while decoding
        self.limits: Limits | None = None
        # queries [B,H,G,W,D] and positions [B,W] of the last rows of a prompt that is not whole yet
        self.tail_rows: tuple[Tensor, Tensor] | None = None
        # entries of coming tokens, and the number of columns seen at the first of them
        self.ahead: tuple[int, dict[str, Tensor]] | None = None
        # computed from the shape and from free_BH, and kept with what they were computed from
        self.heads_at: tuple[tuple[int, ...], Tensor] | None = None
        self.free_at: tuple[Tensor, Tensor] | None = None
        self.geometry: Geometry | None = None
        self.output_rows: Tensor | None = None  # of a projection whose weight had to be worked out
        self.mass_BH: Tensor | None = None  # share of the prompt's attention that what was kept of it got
        self.traced = False  # the pass is a traced step (compiled.py)
        self.extents: Extents | None = None
        self.slack = self.grown = 0  # of a ragged layer that does not evict: free slots when it was made, and taken since
        # keys and values of the used columns with their graph, while a pass computes gradients
        self.graph: tuple[Tensor, Tensor] | None = None
        self.contiguous = True
        self.floor = 0
        # keys as `trim` shows them, and the buffers that they are the beginning of: keys, values, positions, state
        self.trimmed: tuple[Tensor, tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]] | None = None
        self.sliding: int | None = None
        self.journal: deque[Undo] = deque(maxlen=JOURNAL)

    # ---- what transformers asks of a layer ----

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(B, H, 0, D)
        self.values = value_states.new_empty(B, H, 0, value_states.shape[-1])
        self.positions = torch.empty(B, H, 0, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise KVPatchError(
            "This EvictingCache was handed to a model that is not patched (or no longer is): use it inside the "
            "`with kvpatch.patched(...)` block it was made in."
        )

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def batch_size(self) -> int:
        return self.positions.shape[0] if self.is_initialized else -1

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every tensor whose first axis is the batch."""
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        if self.extents is None:
            self.keys, self.values = change(self.keys), change(self.values)
        else:
            heads_BH = torch.arange(self.positions.shape[:2].numel(), device=self.device).view(self.positions.shape[:2])
            self.extents, rows = self.extents.select(change(heads_BH).reshape(-1))
            self.keys, self.values = self.keys[rows], self.values[rows]
        self.positions = change(self.positions)
        self.state = {name: change(tensor) for name, tensor in self.state.items()}
        if self.extents is not None and self.extents.width < self.positions.shape[2]:  # the longest row has gone
            C = self.used = self.extents.width
            self.floor = min(self.floor, C)
            self.positions = self.positions[:, :, :C].contiguous()
            self.state = {name: tensor[:, :, :C].contiguous() for name, tensor in self.state.items()}
        self.free_BH = None if self.free_BH is None else change(self.free_BH)
        if self.tail_rows is not None:
            self.tail_rows = (change(self.tail_rows[0]), change(self.tail_rows[1]))
        self.keep_BH1 = None if self.keep_BH1 is None else change(self.keep_BH1)
        self.mass_BH = None if self.mass_BH is None else change(self.mass_BH)
        self.limits = None if self.limits is None else self.limits.map_rows(change)
        self.journal.clear()
        self.ahead = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_rows(lambda tensor: tensor[indices, ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    # ---- writing ----

    def reserve(self, columns: int) -> None:
        """Make room for `columns` and for some more."""
        assert self.keys is not None and self.values is not None
        if columns > self.keys.shape[2]:
            self._resize(columns + columns // 16 + 8)

    def _resize(self, columns: int, index: Tensor | None = None) -> None:
        """New buffers of `columns` slots with the used ones, or those at `index` [B,H,K], at their front."""
        assert self.keys is not None and self.values is not None

        def move(tensor: Tensor, empty: int) -> Tensor:
            B, H, _, *rest = tensor.shape
            new = tensor.new_empty(B, H, columns, *rest)
            kept = tensor[:, :, : self.used] if index is None else _taken(tensor, index)
            new[:, :, : kept.shape[2]] = kept
            new[:, :, kept.shape[2] :] = empty
            return new

        with torch.no_grad():
            self.keys, self.values = move(self.keys, 0), move(self.values, 0)
            self.positions = move(self.positions, -1)
            self.state = {name: move(tensor, 0) for name, tensor in self.state.items()}

    def adopt(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor, entry: dict[str, Tensor]) -> None:
        """Take a whole prompt's keys and values as they are, without a copy, until `settle` makes buffers of its own."""
        self.dtype, self.device, self.is_initialized = k_BHQD.dtype, k_BHQD.device, True
        self.keys, self.values = k_BHQD.detach(), v_BHQD.detach()
        self.used = k_BHQD.shape[2]
        self.positions = positions_BQ[:, None].expand(*k_BHQD.shape[:3]).contiguous()
        self.state = dict(entry)
        self._zero_statistics(0)

    def append(self, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor, entry: dict[str, Tensor]) -> None:
        """Write columns behind the used ones."""
        if not self.is_initialized:
            self.lazy_initialization(k_BHQD, v_BHQD)
        start, stop = self.used, self.used + k_BHQD.shape[2]
        self.reserve(stop)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, start:stop] = k_BHQD.detach()
        self.values[:, :, start:stop] = v_BHQD.detach()
        self.positions[:, :, start:stop] = positions_BQ[:, None]
        self.used = stop
        for name, tensor in entry.items():
            self.statistic(name, tensor)[:, :, start:stop] = tensor
        self._zero_statistics(start)

    def statistic(self, name: str, like: Tensor | None = None) -> Tensor:
        """The state tensor `name`, made (zero) where it is not there yet, of one number per slot or shaped as `like`."""
        assert self.keys is not None
        if name not in self.state:
            dtype, rest = (accumulator(self.keys.dtype), ()) if like is None else (like.dtype, like.shape[3:])
            self.state[name] = torch.zeros(*self.positions.shape, *rest, dtype=dtype, device=self.positions.device)
        return self.state[name]

    def trim(self) -> None:
        """Show no spare columns, to whoever looks at a cache that holds everything. `untrim` takes them into use again."""
        if not self.is_initialized or self.extents is not None or self.free_BH is not None or self.journal:
            return  # what is recorded stands in columns of its own
        T = self.used
        if self.keys is None or self.values is None or T == self.keys.shape[2]:
            return
        full = self.keys, self.values, self.positions, self.state
        self.keys, self.values, self.positions = self.keys[:, :, :T], self.values[:, :, :T], self.positions[:, :, :T]
        self.state = {name: tensor[:, :, :T] for name, tensor in self.state.items()}
        self.trimmed = (self.keys, full)

    def untrim(self) -> None:
        """Buffers with their spare columns, if `trim` has cut them and nothing has replaced them since."""
        if self.trimmed is not None and self.trimmed[0] is self.keys:
            self.keys, self.values, self.positions, self.state = self.trimmed[1]
        self.trimmed = None

    def untrimmed(self) -> SlotLayer:
        """This layer with its spare columns, as it is allocated; itself where none are hidden."""
        if self.trimmed is None:
            return self
        whole = copy.copy(self)
        whole.untrim()
        return whole

    def _zero_statistics(self, start: int) -> None:
        for name in self.statistics:
            self.statistic(name)[:, :, start : self.used] = 0

    def write(self, k_BH1D: Tensor, v_BH1D: Tensor, positions_B1: Tensor, entry: dict[str, Tensor]) -> None:
        """Write one token per row: into the free slot of each head, in place, or behind the used columns."""
        if self.free_BH is None:
            self.append(k_BH1D, v_BH1D, positions_B1, entry)
            return
        self.write_kv(k_BH1D, v_BH1D)
        self.write_entry(entry)
        B, H, _ = self.positions.shape
        slot = self.free_slots()
        self.positions.view(-1).index_copy_(0, slot, positions_B1.expand(B, H).reshape(-1))
        for name in self.statistics:
            self.state[name].view(-1).index_fill_(0, slot, 0)

    def write_kv(self, k_BH1D: Tensor, v_BH1D: Tensor) -> None:
        """The new token's key and value into the free slot of each head: one token per head is written."""
        assert self.keys is not None and self.values is not None
        slot, N = self.free_rows(), k_BH1D.shape[0] * k_BH1D.shape[1]
        for buffer, new in ((self.keys, k_BH1D), (self.values, v_BH1D)):
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, slot, new.detach().reshape(N, -1))

    def write_entry(self, entry: dict[str, Tensor]) -> None:
        """What the score notes about it."""
        for name, tensor in entry.items():
            rows = self.state[name].flatten(0, 2)
            rows.index_copy_(0, self.free_slots(), tensor.reshape(-1, *rows.shape[1:]))

    def free_slots(self) -> Tensor:
        """free_BH as indices [B*H] into the flattened slots, computed once."""
        assert self.free_BH is not None
        if self.traced:
            return self.free_BH.reshape(-1) + self._heads()
        if self.free_at is None or self.free_at[0] is not self.free_BH:
            self.free_at = (self.free_BH, self.free_BH.reshape(-1) + self._heads())
        return self.free_at[1]

    def free_rows(self) -> Tensor:
        """free_BH as indices [B*H] into the rows of keys and values."""
        if self.extents is None:
            return self.free_slots()
        assert self.free_BH is not None
        return self.extents.begin_N + self.free_BH.reshape(-1)

    def _heads(self) -> Tensor:
        """Where each head's slots begin, flattened [B*H]."""
        shape = tuple(self.positions.shape)
        if self.traced:
            return torch.arange(0, shape[0] * shape[1] * shape[2], shape[2], device=self.positions.device)
        if self.heads_at is None or self.heads_at[0] != shape:
            B, H, C = shape
            self.heads_at = (shape, torch.arange(0, B * H * C, C, device=self.positions.device))
        return self.heads_at[1]

    def view(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of the used slots; keys and values of a ragged layer are rows [R,D]."""
        assert self.keys is not None and self.values is not None
        T = self.used
        if self.extents is not None or T == self.positions.shape[2]:
            return self.keys, self.values, self.positions
        return self.keys[:, :, :T], self.values[:, :, :T], self.positions[:, :, :T]

    def state_view(self) -> dict[str, Tensor]:
        """The state of the used slots."""
        if self.used == self.positions.shape[2]:
            return self.state
        return {name: tensor[:, :, : self.used] for name, tensor in self.state.items()}

    # ---- evicting ----

    def settle(self, index_BHK: Tensor | None, kept_BHK: Tensor | None, columns: int) -> None:
        """End of a prompt: own buffers of at least `columns` slots, with the entries at `index` (None: all that are used)."""
        if index_BHK is None:
            self._resize(max(columns, self.used))
            return
        self._cut_graph(index_BHK)
        self._resize(max(columns, index_BHK.shape[-1]), index_BHK)
        self.used = self.floor = index_BHK.shape[-1]
        self.contiguous = False
        if kept_BHK is not None:
            self.positions[:, :, : self.used].masked_fill_(~kept_BHK, -1)

    def settle_ragged(self, index_BHK: Tensor, kept_BHK: Tensor, capacities: list[int], filled: list[int]) -> None:
        """End of a prompt whose heads keep different numbers of tokens: a stretch of `capacities` slots for each."""
        assert self.keys is not None and self.values is not None
        with torch.no_grad():
            extents = Extents(capacities, filled, self.keys.device)
            self.keys, self.values = (extents.pack(t, index_BHK, kept_BHK) for t in (self.keys, self.values))
            K, C = index_BHK.shape[-1], extents.width
            self.positions = _padded(self.positions.gather(2, index_BHK).masked_fill(~kept_BHK, -1), C, -1)
            self.state = {name: _padded(_taken(tensor, index_BHK), C, 0) for name, tensor in self.state.items()}
        self.extents, self.used, self.floor = extents, C, K
        self.contiguous, self.holes = False, True
        self.free_BH = kept_BHK.sum(-1)

    def make_dense(self) -> None:
        """Padded slots again, for a prompt that goes on behind them."""
        if self.extents is None:
            if self.free_BH is not None and not self.evicting:  # opened
                self.used, self.free_BH = self.taken, None
            return
        B, H, C = self.positions.shape
        self.keys, self.values = (self.extents.unpack(t, B, H, C) for t in (self.keys, self.values) if t is not None)
        self.extents, self.slack, self.grown = None, 0, 0
        self.free_BH, self.used, self.holes = None, C, True

    def make_room(self) -> None:
        """Room for more tokens of each head, where a layer of slots that does not evict has none left."""
        if self.free_BH is None or self.evicting or self.grown < self.slack:
            return
        assert self.keys is not None and self.values is not None
        extents = self.extents
        more = slack(self.positions.shape[-1])
        if extents is None:
            self._resize(self.used + more)
            self.slack, self.used = self.slack + more, self.positions.shape[2]
            return
        self.extents, self.keys = extents.grow(self.keys, more)
        _, self.values = extents.grow(self.values, more)
        self.slack += more
        C = self.used = self.extents.width
        self.positions = _padded(self.positions, C, -1)
        self.state = {name: _padded(tensor, C, 0) for name, tensor in self.state.items()}

    def open(self) -> None:
        """Make slots of the free columns of a layer that does not evict: what is empty is masked, and no shape changes."""
        C = self.positions.shape[2]
        self.free_BH = torch.full(self.positions.shape[:2], self.used, device=self.positions.device)
        self.slack, self.grown, self.used, self.holes = C - self.used, 0, C, True
        self.contiguous = False

    @property
    def taken(self) -> int:
        """Columns in use."""
        opened = self.free_BH is not None and not self.evicting and self.extents is None
        return self.used - self.slack + self.grown if opened else self.used

    def advance(self) -> None:
        """A token was written and none goes: each head's next slot is the one behind it."""
        assert self.free_BH is not None
        self.set_free(self.free_BH + 1)
        if not self.traced:
            self.grown += 1

    def _cut_graph(self, index_BHK: Tensor) -> None:
        if self.graph is not None:
            with torch.enable_grad():
                self.graph = (_taken(self.graph[0], index_BHK), _taken(self.graph[1], index_BHK))

    def set_free(self, slot_BH: Tensor) -> None:
        """The next token goes there; in place in a traced step, for graphs know tensors by their memory."""
        if self.traced:
            assert self.free_BH is not None
            self.free_BH.copy_(slot_BH)
        else:
            self.free_BH = slot_BH

    def forget_places(self) -> None:
        """A kernel has named the next slots in place: what was computed from the ones before is void."""
        self.contiguous = False
        if not self.traced:
            self.free_at = None
            self.filling = max(self.filling - 1, 0)

    def free(self, slot_BH: Tensor) -> None:
        """Empty the slot of each head; the next token is written there."""
        self.set_free(slot_BH)
        self.contiguous = False
        self.positions.view(-1).index_fill_(0, self.free_slots(), -1)

    # ---- rolling back ----

    def note(self, shared: Tensor | None) -> None:
        """Write down what the coming step will overwrite; `shared` is the score that layers share."""
        self.journal.append(record(self, shared))

    def can_crop(self, tokens: int, remembers: bool) -> bool:
        """remembers: what these tokens attended to is in the scores of others."""
        appended = self.used - self.floor if self.free_BH is None else self.grown
        return len(self.journal) >= tokens or (not self.evicting and not remembers and tokens <= appended)

    def crop(self, tokens: int) -> Tensor | None:
        """Undo the last `tokens` (a count) and return the shared score that stood before them, if any."""
        shared = None
        if len(self.journal) < tokens:
            # nothing is scored or evicted: the last columns are the last tokens
            if self.free_BH is None:
                self.used -= tokens
                self.positions[:, :, self.used :] = -1
            else:
                self.free_BH, self.grown = self.free_BH - tokens, self.grown - tokens
                taken = torch.arange(self.used, device=self.positions.device) < self.free_BH[..., None]
                self.positions.masked_fill_(~taken, -1)
            self.journal.clear()
        else:
            for _ in range(tokens):
                shared = restore(self, self.journal.pop())
        self.seen -= tokens
        return shared


def slack(tokens: int) -> int:
    """Free slots for a head of so many tokens: a sixteenth, so that moving costs little and so does what stands empty."""
    return min(SLACK, max(8, tokens // 16))


def _taken(tensor: Tensor, index_BHK: Tensor) -> Tensor:
    """[B,H,T,...] -> [B,H,K,...]: the entries of each head at `index`."""
    b, h = (torch.arange(n, device=tensor.device) for n in index_BHK.shape[:2])
    return tensor[b[:, None, None], h[None, :, None], index_BHK]


def _padded(tensor: Tensor, columns: int, empty: int) -> Tensor:
    """[B,H,K,...] -> [B,H,columns,...], filled up with `empty`."""
    B, H, K, *rest = tensor.shape
    new = tensor.new_full((B, H, columns, *rest), empty)
    new[:, :, :K] = tensor
    return new
