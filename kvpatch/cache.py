"""The cache that forgets: slots per KV head, the original position of what lies in each, and the score state beside it.

Keys carry their position inside (rotary, learned) or beside them (ALiBi, through the positions tensor), so their order in
memory is free. After the prompt a layer that evicts holds budget + 1 slots: a decode step writes the new token into the one
free slot, and names the slot that is free next. Nothing else moves. A layer that does not evict while decoding appends
columns and grows geometrically.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .errors import KVPatchError
from .policies import Policy
from .policies.budgets import Budget
from .policies.scopes import protect_tensor
from .policies.scores import Limits, accumulator

JOURNAL = 256  # decode steps that can be rolled back while recording: longer than any draft


@dataclass
class Undo:
    """What one decode step overwrote."""

    used: int
    filling: int
    free_BH: Tensor | None
    slot: tuple[Tensor, Tensor] | None
    positions: Tensor
    state: dict[str, Tensor]
    shared: Tensor | None


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [B,H,C,D], of which the first `used` columns count.

    positions [B,H,C] int64, -1 where a slot is empty. state: tensors [B,H,C] or [B,H,C,G] beside the keys. free_BH: the
    slot of each head that the next token goes to, or None while tokens are appended at column `used`. holes: some of the
    used slots may be empty while a query attends (padding, rows with different budgets). filling: steps until every row
    has reached its budget. contiguous: columns lie in text order without gaps. floor: columns that cannot be cropped,
    since an eviction chose them.
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
        self.budget_B11: Tensor | None = None
        self.limits: Limits | None = None
        # queries [B,H,G,W,D] and positions [B,W] of the last rows of a prompt that is not whole yet
        self.tail_rows: tuple[Tensor, Tensor] | None = None
        self.heads_at: tuple[tuple[int, int, int], Tensor] | None = None  # where each head's slots begin, flattened
        self.contiguous = True
        self.floor = 0
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
        self.keys, self.values, self.positions = change(self.keys), change(self.values), change(self.positions)
        self.state = {name: change(tensor) for name, tensor in self.state.items()}
        self.free_BH = None if self.free_BH is None else change(self.free_BH)
        if self.tail_rows is not None:
            self.tail_rows = (change(self.tail_rows[0]), change(self.tail_rows[1]))
        self.budget_B11 = None if self.budget_B11 is None else change(self.budget_B11)
        self.limits = None if self.limits is None else self.limits.map_rows(change)
        self.journal.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_rows(lambda tensor: tensor[indices, ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    # ---- writing ----

    def reserve(self, columns: int, exactly: bool = False) -> None:
        """Make room for `columns`, and for some more unless `exactly`."""
        assert self.keys is not None and self.values is not None
        if columns > self.keys.shape[2]:
            self._resize(columns if exactly else columns + columns // 4 + 64)

    def _resize(self, columns: int, index: Tensor | None = None) -> None:
        """New buffers of `columns` slots with the used ones, or those at `index` [B,H,K], at their front."""

        def move(tensor: Tensor, empty: int) -> Tensor:
            B, H, _, *rest = tensor.shape
            new = tensor.new_empty(B, H, columns, *rest)
            if index is None:
                kept = tensor[:, :, : self.used]
            else:
                b = torch.arange(B, device=tensor.device)[:, None, None]
                h = torch.arange(H, device=tensor.device)[None, :, None]
                kept = tensor[b, h, index]
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

    def _zero_statistics(self, start: int) -> None:
        for name in self.statistics:
            self.statistic(name)[:, :, start : self.used] = 0

    def write(self, k_BH1D: Tensor, v_BH1D: Tensor, positions_B1: Tensor, entry: dict[str, Tensor]) -> None:
        """Write one token per row: into the free slot of each head, in place, or behind the used columns."""
        if self.free_BH is None:
            self.append(k_BH1D, v_BH1D, positions_B1, entry)
            return
        assert self.keys is not None and self.values is not None
        B, H, C = self.positions.shape
        slot = self.flat(self.free_BH)
        self.keys.view(B * H * C, -1).index_copy_(0, slot, k_BH1D.detach().reshape(B * H, -1))
        self.values.view(B * H * C, -1).index_copy_(0, slot, v_BH1D.detach().reshape(B * H, -1))
        self.positions.view(-1).index_copy_(0, slot, positions_B1.expand(B, H).reshape(-1))
        for name, tensor in entry.items():
            self.state[name].view(B * H * C, -1).index_copy_(0, slot, tensor.reshape(B * H, -1))
        for name in self.statistics:
            self.state[name].view(-1).index_fill_(0, slot, 0)

    def flat(self, slot_BH: Tensor) -> Tensor:
        """Slots [B,H] as indices into the flattened [B*H*C]."""
        B, H, C = self.positions.shape
        if self.heads_at is None or self.heads_at[0] != (B, H, C):
            self.heads_at = ((B, H, C), torch.arange(0, B * H * C, C, device=slot_BH.device))
        return slot_BH.reshape(-1) + self.heads_at[1]

    # ---- evicting ----

    def settle(self, index_BHK: Tensor | None, kept_B1K: Tensor | None, columns: int) -> None:
        """End of a prompt: own buffers of at least `columns` slots, with the entries at `index` (None: all that are used)."""
        if index_BHK is None:
            self._resize(max(columns, self.used))
            return
        self._resize(max(columns, index_BHK.shape[-1]), index_BHK)
        self.used = self.floor = index_BHK.shape[-1]
        self.contiguous = False
        if kept_B1K is not None:
            self.positions[:, :, : self.used].masked_fill_(~kept_B1K, -1)

    def free(self, slot_BH: Tensor) -> None:
        """Empty the slot of each head; the next token is written there."""
        self.positions.view(-1).index_fill_(0, self.flat(slot_BH), -1)
        self.free_BH, self.contiguous = slot_BH, False

    # ---- rolling back ----

    def note(self, shared: Tensor | None) -> None:
        """Write down what the coming step will overwrite."""
        slot = None
        if self.free_BH is not None:
            B, H, C = self.positions.shape
            at = self.flat(self.free_BH)
            slot = (self.keys.view(B * H * C, -1)[at], self.values.view(B * H * C, -1)[at])  # type: ignore[union-attr]
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        shared = None if shared is None else shared.clone()
        self.journal.append(Undo(self.used, self.filling, self.free_BH, slot, self.positions.clone(), state, shared))

    def can_crop(self, tokens: int) -> bool:
        return len(self.journal) >= tokens or (not self.evicting and tokens <= self.used - self.floor)

    def crop(self, tokens: int) -> Tensor | None:
        """Undo the last `tokens` (a count) and return the shared score that stood before them, if any."""
        shared = None
        if len(self.journal) < tokens:
            # nothing is scored or evicted: the last columns are the last tokens
            self.used -= tokens
            self.journal.clear()
        else:
            for _ in range(tokens):
                shared = self._undo(self.journal.pop())
        self.seen -= tokens
        return shared

    def _undo(self, undo: Undo) -> Tensor | None:
        C = undo.positions.shape[-1]
        self.used, self.filling, self.free_BH = undo.used, undo.filling, undo.free_BH
        self.positions[:, :, :C], self.positions[:, :, C:] = undo.positions, -1
        for name, tensor in undo.state.items():
            self.state[name][:, :, :C] = tensor
        if undo.slot is not None and undo.free_BH is not None:
            at = self.flat(undo.free_BH)
            for buffer, old in zip((self.keys, self.values), undo.slot, strict=True):
                buffer.view(-1, old.shape[-1]).index_copy_(0, at, old)  # type: ignore[union-attr]
        return undo.shared


@dataclass
class Forward:
    """What one forward pass brings; the same for all layers.

    positions_BQ: -1 for padding. prompt: how many of its columns still belong to the prompt. ends_prompt: whether the
    prompt is whole with them. n_B: tokens of each row so far, known where a prompt ends. recording: decode steps of this
    pass are journalled. first_step: decode steps since the prompt before this pass.
    recent: the protected windows' lower ends, computed once for all layers.
    """

    positions_BQ: Tensor
    prompt: int
    ends_prompt: bool
    n_B: list[int]
    padded: bool
    protect_BQ: Tensor | None
    recording: bool
    first_step: int
    recent: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class EvictingCache(Cache):
    """A transformers cache that keeps `budget` tokens per KV head. Made by the patched model, or by `Patch.new_cache()`.

    Holds all state of a text, so that one patched model can serve several threads and several caches.
    """

    def __init__(self, policy: Policy, budget: Budget, *, seed: int = 0) -> None:
        n_layers = len(budget.per_layer)
        acting = [policy.score is not None and budget.evicts(layer) for layer in range(n_layers)]
        super().__init__(layers=[SlotLayer(policy.statistics if on else ()) for on in acting])
        self.policy, self.budget, self.seed = policy, budget, seed
        self.acting = acting
        self.prompt_len: int | None = None
        self.new_tokens: int | None = None
        self.now: Forward | None = None
        self.seen_B: Tensor | None = None
        self.shared: Tensor | None = None
        self.steps = 0
        self.unfinished = False
        self.limits_of: dict[tuple[object, ...], Limits] = {}

    # ---- the public contract ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens SEEN (columns, padding included): positions go on as if nothing were missing."""
        return self.layers[layer_idx].seen

    def positions(self, layer: int) -> Tensor:
        """Original positions held, int64 [B, Hkv, T], in no order; -1 where a slot is empty."""
        one = self.layers[layer]
        return one.positions[:, :, : one.used].clone()

    def held(self, layer: int) -> Tensor:
        """How many tokens each KV head holds, int64 [B, Hkv]."""
        return (self.positions(layer) >= 0).sum(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values really allocated, all layers and rows."""
        return sum(t.numel() * t.element_size() for la in self.layers if la.is_initialized for t in (la.keys, la.values))

    def clone(self) -> EvictingCache:
        """An independent copy, for several questions after one context."""
        return copy.deepcopy(self)

    # ---- one forward pass ----

    def begin(self, B: int, Q: int, mask_BT: Tensor | None, input_ids: Tensor | None, device: torch.device) -> None:
        """Called before the decoder runs: positions of the new tokens, and which of them are prompt.

        Raises:
            KVPatchError: a mask of the wrong length, a row of nothing but padding, padding among generated tokens, an
                earlier pass that did not finish, another batch size.
        """
        self._check(B, Q, mask_BT)
        seen = self.get_seq_length()
        before = torch.zeros(B, dtype=torch.long, device=device) if self.seen_B is None else self.seen_B
        prompt = self._prompt_columns(seen, Q)
        real = None if mask_BT is None else mask_BT[:, -Q:].to(device).bool()
        # reading the mask waits for the device: only while there is a prompt
        padded = real is not None and prompt > 0 and not bool(real.all())
        if real is not None and padded:
            count = real.long().cumsum(-1)
            positions = (before[:, None] + count - 1).masked_fill(~real, -1)
            after, whole = before + count[:, -1], before + count[:, prompt - 1]
        else:
            if real is not None and prompt == 0:
                self._refuse_padding(real)
            positions = before[:, None] + torch.arange(Q, device=device)
            after, whole = before + Q, before + prompt
        ends = prompt > 0 and seen + prompt >= (self.prompt_len or 0)
        n_B = whole.tolist() if ends else []
        if ends and padded and real is not None:
            self._check_rows(n_B, real[:, prompt - 1])
        protect = self._protect(positions, input_ids, seen) if prompt else None
        # all is well: from here on the cache changes
        self.seen_B, self.unfinished = after, True
        if ends:
            self.steps = 0
            self.limits_of.clear()
        journalled = any(layer.record_past for layer in self.layers)
        if not journalled:
            for layer in self.layers:
                layer.journal.clear()
        recording = journalled or Q - prompt > 1
        self.now = Forward(positions, prompt, ends, n_B, padded, protect, recording, self.steps)
        self.steps += Q - prompt

    def _check_rows(self, n_B: list[int], last_B: Tensor) -> None:
        if min(n_B) == 0:
            raise KVPatchError(
                f"Row {n_B.index(0)} of the batch is all padding (its attention_mask is zero): drop it from the batch."
            )
        if self.prompt_len is not None and not bool(last_B.all()):
            raise KVPatchError(
                f"Row {int((~last_B).nonzero()[0])} is padded on the right: generate() continues behind the last column, "
                "so pad on the left (tokenizer.padding_side = 'left')."
            )

    def _check(self, B: int, Q: int, mask_BT: Tensor | None) -> None:
        if self.unfinished:
            raise KVPatchError(
                "An earlier forward pass through this cache did not finish, so it is incomplete (or another thread is "
                "using it): start again with a new cache, one per thread."
            )
        if self.seen_B is not None and len(self.seen_B) != B:
            raise KVPatchError(f"The cache holds {len(self.seen_B)} rows, but the input has {B}.")
        if mask_BT is not None and mask_BT.shape[-1] not in (self.get_seq_length() + Q, Q):
            raise KVPatchError(
                f"attention_mask has {mask_BT.shape[-1]} columns, but {self.get_seq_length()} tokens were seen and {Q} "
                f"are new: it needs {self.get_seq_length() + Q}."
            )

    def _prompt_columns(self, seen: int, Q: int) -> int:
        """Columns of this pass that belong to a prompt (policies.md, Budgets: prompts fed in pieces)."""
        if self.prompt_len is not None:
            return min(max(self.prompt_len - seen, 0), Q)
        return Q if seen == 0 or Q > 1 else 0

    @staticmethod
    def _refuse_padding(real_BQ: Tensor) -> None:
        message = "attention_mask marks a generated token as padding; pad prompts on the left, before their first token."
        if real_BQ.device.type == "cpu":
            if not bool(real_BQ.all()):
                raise KVPatchError(message)
        else:  # asserted on the device, without waiting for it
            torch._assert_async(real_BQ.all(), message)

    def _protect(self, positions_BQ: Tensor, input_ids: Tensor | None, seen: int) -> Tensor | None:
        """bool [B,Q]: columns that the user's `protect=` marks."""
        if self.policy.scope.protect is None or not any(self.acting):
            return None
        wanted = protect_tensor(self.policy.scope.protect).to(positions_BQ.device)
        B, Q = positions_BQ.shape
        if wanted.dtype != torch.bool:
            if input_ids is None:
                raise KVPatchError("protect= by token ids needs input_ids; with inputs_embeds give a boolean mask.")
            return torch.isin(input_ids.to(wanted.device), wanted) & (positions_BQ >= 0)
        wanted = wanted.expand(B, -1) if wanted.ndim == 1 else wanted.repeat_interleave(max(B // len(wanted), 1), 0)
        total = self.prompt_len or Q
        if seen == 0 and wanted.shape != (B, total):
            raise KVPatchError(f"protect= is a mask of shape {list(wanted.shape)}, but the prompt is [{B}, {total}].")
        chunk = wanted[:, seen : seen + Q]
        pad = chunk.new_zeros(B, Q - chunk.shape[1])
        return torch.cat([chunk, pad], 1) & (positions_BQ >= 0)

    def end(self, layer: int) -> None:
        """The last layer has run: the pass is whole."""
        if layer == len(self.layers) - 1:
            self.unfinished = False

    def absorb(self, past: Cache, mask_BT: Tensor | None = None) -> None:
        """Take over the keys and values of an unpatched prompt; the next prompt end evicts.

        Raises:
            KVPatchError: the policy scores by attention that `past` does not hold, or `past` has dropped tokens.
        """
        if any(self.acting) and self.policy.rows != "none":
            raise KVPatchError(
                f"A {type(past).__name__} cannot be taken over under policy {self.policy.name!r}: it scores tokens by the "
                "attention of the prompt's rows, which that cache does not hold. Run the prompt inside the block."
            )
        if self.policy.scope.protect is not None:
            raise KVPatchError("protect= marks prompt tokens as they are read: run the prompt inside the block.")
        seen = past.get_seq_length()
        for index, (mine, other) in enumerate(zip(self.layers, past.layers, strict=True)):
            keys, values = getattr(other, "keys", None), getattr(other, "values", None)
            if not isinstance(keys, Tensor) or keys.shape[2] != seen:
                raise KVPatchError(f"Layer {index} of the {type(past).__name__} no longer holds every token it has seen.")
            B, H, _, _ = keys.shape
            real = torch.ones(B, seen, dtype=torch.bool, device=keys.device)
            if mask_BT is not None:
                real = mask_BT[:, :seen].to(keys.device).bool()
            positions = (real.long().cumsum(-1) - 1).masked_fill(~real, -1)
            entry = {}
            if self.acting[index] and self.policy.score is not None:
                entry = self.policy.score.entry(keys, positions, 1, index, self.seed)
            mine.append(keys, values, positions, entry)
            mine.seen, mine.holes = seen, not bool(real.all())
            self.seen_B = positions.amax(-1) + 1

    # ---- batch and roll-back ----

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.seen_B = None if self.seen_B is None else change(self.seen_B)
        self.shared = None if self.shared is None else change(self.shared)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_rows(lambda tensor: tensor[indices, ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        super().reset()
        self.seen_B = self.shared = self.now = self.prompt_len = self.new_tokens = None
        self.steps, self.unfinished = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the last tokens exactly: keys, values, positions, scores and free slots.

        Args:
            tokens_to_remove: minus the number of tokens, as transformers has it; a positive number is the length to
                crop to, as it was before 5.15.

        Raises:
            KVPatchError: the steps were not recorded (call `activate_past_recording()` before them).
        """
        tokens = int(tokens_to_remove)
        count = -tokens if tokens <= 0 else max(self.get_seq_length() - tokens, 0)
        if count == 0:
            return
        if not all(layer.can_crop(count) for layer in self.layers):
            raise KVPatchError(
                f"Cannot roll back {count} tokens: what they evicted was not recorded. Call "
                "cache.activate_past_recording() before generating them, or cache.clone() before and use the copy."
            )
        shared = [layer.crop(count) for layer in self.layers]
        self.shared = self.shared if shared[0] is None else shared[0]
        assert self.seen_B is not None
        self.seen_B = self.seen_B - count
        self.steps = max(self.steps - count, 0)
