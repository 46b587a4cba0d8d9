"""Exceptions thrown inside the library: at the n-th call of one of its functions, before or after it did its work."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from hypothesis import strategies as st

from kvpatch import patching
from kvpatch.attention import attend as attention
from kvpatch.attention import blockwise as blocks
from kvpatch.attention import compress as ending
from kvpatch.attention import decode
from kvpatch.attention import prefill as prompt
from kvpatch.attention.layer_call import Call
from kvpatch.attention.stacked import Deck
from kvpatch.backends import head_offsets as ragged
from kvpatch.backends import torch_backend
from kvpatch.cache import concat as joining
from kvpatch.cache import layer as slots
from kvpatch.cache import passes
from kvpatch.cache.layer import SlotLayer
from kvpatch.cache.state import DeviceCounters, TextState
from kvpatch.hooks import decoder as hooks
from kvpatch.hooks.state import PatchState
from kvpatch.policies.context import Limits
from kvpatch.policies.policy import Policy
from kvpatch.policies.scopes import Scope
from kvpatch.policies.selection import TwoStage
from kvpatch.storage import save_load as storage


class Fault(Exception):
    """Thrown by a test."""


# where: of each kind of call, the functions that it goes through
PASS = [
    (attention, "_attend"), (prompt, "attend"), (blocks, "attend"), (decode, "attend"), (decode, "_observe"),
    (decode, "_evict"), (decode, "victim"), (Deck, "__init__"), (Deck, "open"), (Deck, "attend"), (Deck, "_observe"),
    (Deck, "_close"), (Deck, "_free"), (torch_backend, "attend"), (torch_backend, "step"), (torch_backend, "observe"),
    (torch_backend, "window_sums"), (Call, "entry"), (Call, "sums"), (Call, "add"),
    (Call, "eviction_context"), (Policy, "eviction_keys"),
    (Scope, "mask"), (TwoStage, "eviction_keys"), (prompt, "end_prompt"), (prompt, "limit"), (ending, "_settle"),
    (ending, "top"),
    (SlotLayer, "adopt"), (SlotLayer, "append"), (SlotLayer, "write"), (SlotLayer, "write_kv"), (SlotLayer, "write_entry"),
    (SlotLayer, "settle"), (SlotLayer, "_resize"), (SlotLayer, "settle_ragged"), (SlotLayer, "make_dense"),
    (SlotLayer, "make_room"), (SlotLayer, "free"), (SlotLayer, "note"), (slots, "record"), (ragged.HeadOffsets, "pack"),
    (DeviceCounters, "advance"), (passes, "begin"), (passes, "end"), (passes, "check_batch"), (passes, "_count_budget"),
    (passes, "_finish"), (hooks, "_begin"), (hooks, "_check_positions"), (PatchState, "count"),
]  # fmt: skip
ROWS = [(SlotLayer, "map_rows"), (TextState, "catch_up"), (Limits, "map_rows"), (ragged.HeadOffsets, "select")]
CROP = [(SlotLayer, "crop"), (SlotLayer, "can_crop"), (slots, "restore")]
CLONE = [(copy, "deepcopy"), (TextState, "catch_up")]
JOIN = [
    (joining, "check"), (joining, "_blank"), (joining, "_join_layer"), (joining, "_lay_out"), (joining, "_fill"),
    (joining, "_open"), (joining, "_set_steps"), (joining, "_shared"), (SlotLayer, "reset"), (TextState, "reset"),
]  # fmt: skip
SAVE = [(storage, "_checksum"), (storage, "_rows"), (storage, "_history"), (safetensors.torch, "save_file")]
LOAD = [(storage, "_read"), (storage, "_checksum"), (storage, "_compare"), (storage, "_fill"), (patching, "BoundAdapter")]
ENTER = [
    (patching, "replace_forward"), (patching, "attention_forward"), (patching.Patch, "_set"), (patching.Patch, "_claim"),
    (patching, "put_hook"), (patching, "wrap_generate"), (patching, "masks_for_generate"),
    (patching, "wrap_prepare_cache"), (patching, "PatchState"),
]  # fmt: skip


@dataclass(frozen=True)
class Throw:
    """where: an index into a table of hops, which is as long as it is."""

    where: int
    nth: int
    after: bool
    interrupt: bool


throws = st.builds(Throw, st.integers(0, 199), st.integers(0, 4), st.booleans(), st.booleans())
perhaps = st.one_of(st.none(), st.none(), st.none(), throws)


def name_of(hop: tuple[Any, str]) -> str:
    return f"{hop[0].__name__.removeprefix('kvpatch.')}.{hop[1]}"


@contextmanager
def thrown(hop: tuple[Any, str], throw: Throw) -> Iterator[list[str]]:
    """Inside, the hop raises at its n-th call; yields a list that has its name once it did."""
    owner, name = hop
    original, calls, fired = vars(owner)[name], 0, []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != throw.nth + 1:
            return original(*args, **kwargs)
        if throw.after:
            original(*args, **kwargs)
        fired.append(name_of(hop))
        raise KeyboardInterrupt if throw.interrupt else Fault

    setattr(owner, name, faulty)
    try:
        yield fired
    finally:
        setattr(owner, name, original)
