"""The state of one text (or batch of texts): the fields of an EvictingCache, and how they are reset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..backends.dispatch import Choice
from ..errors import KVPatchError
from ..policies.context import Limits
from .counters import StepCounters
from .forward_context import Forward
from .guard import MutationGuard
from .layer import SlotLayer
from .lifetimes import Lifetimes
from .messages import Messages
from .model_stamp import ModelStamp
from .pickling import Unpicklable
from .recurrent import RecurrentStates, WithStates
from .settings import CacheSettings
from .token_ids import TokenIds

_Method = TypeVar("_Method", bound=Callable[..., object])


def writable(method: _Method) -> _Method:
    """Run `method` outside inference mode, as attention.attend does, so that the tensors it allocates stay writable."""
    return torch.inference_mode(False)(torch.no_grad()(method))


@dataclass
class TextPlans:
    """The caller's plans for the text.

    prompt_len: columns of the prompt, if generate() has announced them; a prompt fed in pieces then ends there. new_tokens:
    tokens to generate, if known. static_room: tokens to decode in buffers that reach their final size when the prompt ends.
    may_roll_back: an assistant model drafts with the cache. resent_columns: columns read before, which generate()'s first pass
    may bring again. copy_per_row: the text is a prefix, of which each row of the first pass gets a copy.
    """

    prompt_len: int | None = None
    new_tokens: int | None = None
    static_room: int | None = None
    may_roll_back: bool = False
    resent_columns: int = 0
    copy_per_row: bool = False


@dataclass
class Turns:
    """Prompts read so far.

    begin_B: tokens of each row before the newest prompt, while that is unfinished.
    """

    prompts_read: int = 0
    begin_B: list[int] = field(default_factory=lambda: [0])
    unfinished: bool = False


@dataclass
class Meter:
    """Bytes of keys and values: allocated now, and at most, while prompts were read."""

    now: int = 0
    peak: int = 0

    def count(self, before: int, during: int, after: int) -> None:
        """For `read_prompt`, `_count_move`: update `now` and `peak` by bytes before, while and after a layer reads or moves."""
        others = self.now - before  # bytes of the other layers
        self.peak = max(self.peak, others + during + (after if after != during else 0))  # new buffers beside the old ones
        self.now = others + after


class PassRecord(Protocol):
    """Record of the passes that a patch ran over a cache.

    columns: seen in them. acted: some token was computed after an eviction.
    """

    columns: int
    acted: bool

    def seconds(self) -> dict[str, float]:
        """Return the times of the last generate(), by part."""

    def release(self, cache: Any) -> None:
        """Note that the cache is about to be freed."""


class BoundSteps(Protocol):
    """Decode steps as attention/ has bound them to the layers of a cache, and keeps them from pass to pass.

    running: by layer, the bound step of the pass `now`, once its first layer has run; None in layers that go through `attend`.
    """

    now: Forward | None
    running: list[Any]

    @property
    def stacked(self) -> bool:
        """Tell if layers' tensors are views of stacked ones."""

    def unbind(self) -> None:
        """Release the stacked layers, and the buffers that steps are bound to."""


@dataclass
class RowAlignment:
    """Alignment of the batch rows.

    concatenated: rows are at different positions of their texts (`concatenate`). padded: some prompt had padding.
    by_columns: positions counted that padding. gaps_B: columns of padding after tokens that positions count, per row; None
    if there are none. columns_at_edit: columns read when tokens were last forgotten, 0 if none were.
    """

    concatenated: bool = False
    padded: bool = False
    by_columns: bool = False
    gaps_B: Tensor | None = None
    columns_at_edit: int = 0


class TextState(Unpicklable, MutationGuard, WithStates):
    """All state of a text, so that one patched model can serve several threads and several caches.

    settings: frozen, shared by all caches of a patch. layers: keys, values, positions and scores of the layers on the budget.
    states: of a hybrid's other layers. seen_B: tokens of each row. now: the forward pass in progress. shared_score: [B,H,T], by
    position + 1. steps: bound for decode steps by attention/, which alone looks into them. stack_due: before the next step
    layers are to be stacked (their tensors joined), to take it as one. for_one_pass: without use_cache; each layer is emptied
    after it has run, layer_parts keeps what a report needs of it, and no ids are noted. ids: of the tokens read. rotary: the
    last table for renumbered keys, as (positions, table). shared_limits: protected sizes of layers of one budget. lifetimes: of
    the tokens, if recorded and known from the beginning. messages: of a chat, set before each of its prompts (marks.py).
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, settings: CacheSettings) -> None:
        """Make an empty cache; `Patch.new_cache` and the patched model call this. Users have no CacheSettings to give."""
        if not isinstance(settings, CacheSettings):
            raise KVPatchError(f"EvictingCache({settings!r}): caches are made by a patch. Use Patch.new_cache().")
        each = zip(settings.policies, settings.evicts, settings.latent, strict=True)  # for each layer
        parts = [(policy.needs.statistics if on else (), settings.bits, policy.every, latent) for policy, on, latent in each]
        super().__init__(layers=[SlotLayer(*part) for part in parts])  # transformers' Cache
        self.settings = settings
        self.for_one_pass = False  # True: without use_cache
        self.in_progress, self.n_changes, self.was_read = {}, 0, False  # of MutationGuard
        self._empty()

    def _empty(self) -> None:
        """Make all state that a text has, as before its first token, for `__init__` and `reset`."""
        self.plans, self.turns, self.counters, self.rows = TextPlans(), Turns(), StepCounters(), RowAlignment()
        self.ids, self.states = TokenIds(), RecurrentStates(self.settings.layer_numbers)  # states: of a hybrid's other layers
        self.model_stamp: ModelStamp | None = None  # of the model that reads the text
        self.seen_B: Tensor | None = None  # tokens of each row
        self.now: Forward | None = None  # the pass in progress
        self.shared_score: Tensor | None = None  # of all layers
        self.steps: BoundSteps | None = None  # decode steps prepared for these layers
        self.stack_due = False  # layers are to be stacked before the next step, to take it as one
        self.make_rotary_table: Callable[[int], Any] | None = None  # for renumbered keys
        self.rotary: tuple[int, Any] | None = None  # the last table, and its number of positions
        self.shared_limits: dict[tuple[object, ...], Limits] = {}  # protected sizes
        self.backend_choice = Choice(self.settings.backend)
        self.meter = Meter()  # of bytes allocated
        self.pass_record: PassRecord | None = None  # of the patch's passes over this cache
        self.layer_parts: dict[int, Any] = {}  # of a cache for one pass: what reports need of its layers
        self.lifetimes = Lifetimes(len(self.layers)) if self.settings.records_lifetimes else None  # when tokens were evicted
        self.messages: Messages | None = None  # of a chat's prompt

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # bound: globals go at exit
        """Tell the record of the passes over this cache that it is freed, except as Python exits."""
        record = vars(self).get("pass_record")  # missing if __init__ raised
        if record is not None and not finalizing():
            record.release(self)

    def reset(self) -> None:
        """Empty the cache, even after an interrupted change; `static_room`, `may_roll_back` and `make_rotary_table` stay."""
        self.in_progress = {"change": ["reset()"]}  # marked as being changed, whatever was interrupted
        self.n_changes += 1
        super().reset()  # empties the layers
        room, drafts, make_table = self.plans.static_room, self.plans.may_roll_back, self.make_rotary_table
        self._empty()
        self.plans.static_room, self.plans.may_roll_back, self.make_rotary_table = room, drafts, make_table
        if any(layer.record_past for layer in self.layers):
            self.states.activate_past_recording()
        self.end_change()

    def catch_up(self) -> None:
        """Count the steps that ran under torch.compile, before `begin` or a method uses the cache; waits for the device.

        They have advanced tensors alone: here the numbers, ids and modes that the host keeps follow. `in_progress["stale"]` is
        set meanwhile: if that is interrupted, steps are not counted twice, and the next use raises an error (guard.py).
        """
        counters = self.counters
        if not counters.has_uncounted_steps or self.in_progress.get("stale"):
            return
        self.in_progress["stale"] = ["step under torch.compile"]
        count = int(counters.tensors.columns) - self.layers[0].columns_read  # steps to be counted
        counters.steps += count
        if count > 0:
            self.note_ids(counters.tensors.read_tape(self.columns_read, count), count)
        self.backend_choice.ran_last |= self.backend_choice.may_run  # backends of the steps, for reports
        self.unstack_layers()  # a stack: the layers' tensors joined, so that one step takes all of them (attention/stacked.py)
        for layer in self.layers:
            layer.columns_read += count
            layer.mode.count(count)
            layer.precomputed_state = None  # the policy's state of the next tokens, by their positions
            layer.traced = False
            layer.refresh_free_slots()
        counters.has_uncounted_steps = False
        self.in_progress.pop("stale")

    def note_ids(self, ids_BQ: Tensor | None, Q: int, real_BQ: Tensor | None = None) -> None:
        """For `_note_ids` and `catch_up`: note the ids of Q columns that were read, after those seen; see `TokenIds.write`."""
        B, device = len(self.lengths_B), self.lengths_B.device
        self.ids.skip_columns(B, self.columns_read, device)
        self.ids.write(ids_BQ, B, Q, device, real_BQ)

    @property
    def columns_read(self) -> int:
        """Columns seen, padding included."""
        return self.layers[0].columns_read

    def count_in(self, dtype: torch.dtype) -> None:
        """Turn a budget in bytes into tokens whose keys have this dtype, if no text has been read yet; changes `settings`."""
        if self.seen_B is None:
            self.settings = self.settings.in_dtype(dtype)

    @property
    def lengths_B(self) -> Tensor:
        """`seen_B` of a cache that is not empty."""
        assert self.seen_B is not None
        return self.seen_B

    @property
    def read_B(self) -> Tensor:
        """Tokens of each row's text, without any padding."""
        gaps_B = self.rows.gaps_B
        return self.lengths_B if gaps_B is None else self.lengths_B - gaps_B.to(self.lengths_B.device)

    @property
    def counts_padding(self) -> bool:
        """True if positions of some row count padding; rows that had it may have gone. Waits for the device."""
        return self.rows.by_columns and bool((self.read_B < self.columns_read).any())

    @property
    def current_pass(self) -> Forward:
        """The forward pass in progress."""
        assert self.now is not None, "passes.begin() runs in the decoder's pre-hook"
        return self.now

    def count_temperature_steps(self) -> int:
        """Return the decode steps over which a score's temperature changes: those announced, else the policy's own number."""
        return self.plans.new_tokens or self.settings.policy.needs.span

    def temperature(self, ahead: int) -> float | Tensor:
        """Return the temperature of a score's softmax (Keyformer's), `ahead` decode steps into the pass; [B] if rows differ.

        `_add_statistics` and `_run_kernels` ask in each decode step, stacked layers once for all.
        """
        policy, counters, now = self.settings.policy, self.counters, self.current_pass
        behind_B, span_B = counters.steps_behind_B, None if self.plans.new_tokens else counters.temperature_steps_B
        if now.traced:
            steps, span = counters.tensors.steps + ahead, counters.tensors.temperature_steps if span_B is None else span_B
            return policy.needs.temperature(steps if behind_B is None else steps - behind_B, span)
        step = now.first_step + ahead
        if behind_B is None:  # all rows have taken as many steps
            if span_B is None:  # and their temperature changes over the same span
                return policy.needs.temperature(step, self.plans.new_tokens)
            return policy.needs.temperature(span_B.new_tensor(step), span_B)
        span_B = behind_B.new_tensor(self.count_temperature_steps()) if span_B is None else span_B
        return policy.needs.temperature(step - behind_B, span_B)

    def limits(self, sizes: Sequence[Sequence[int]], device: torch.device) -> Limits:
        """Return, for `set_limits`, the Limits (protected sizes) of these sizes per row; layers of equal sizes share one."""
        key = (tuple(map(tuple, sizes)), device)
        if key not in self.shared_limits:
            self.shared_limits[key] = Limits.of(key[0], device)
        return self.shared_limits[key]

    def unstack_layers(self, due: bool | None = None) -> None:
        """Undo the stacking of layers (their tensors joined, to step as one) and prepared steps, for `crop` and others.

        due: True: stack them again before the next decode step; None: do so if they were stacked, or were going to be.
        """
        due = (self.stacked or self.stack_due) if due is None else due
        if self.steps is not None:
            self.steps.unbind()
        self.stack_due = due

    @property
    def stacked(self) -> bool:
        """Tell if layers' tensors are views of stacked ones."""
        return self.steps is not None and self.steps.stacked
