"""Exceptions thrown inside the library: at the n-th call of one of its functions, before or after it did its work."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import safetensors.torch
from hypothesis import strategies as st

from kvpatch import handle
from kvpatch.attention import attend, blockwise, compress, decode, prefill
from kvpatch.attention.layer_call import Call
from kvpatch.attention.stacked import LayerStack
from kvpatch.backends import head_offsets, torch_backend
from kvpatch.cache import concat, layer, passes
from kvpatch.cache.layer import SlotLayer
from kvpatch.cache.slots import DenseSlots
from kvpatch.cache.state import TextState
from kvpatch.hooks import decoder, files, install, positions
from kvpatch.hooks.run_log import RunLog
from kvpatch.policies.batched import Batched
from kvpatch.policies.policy import Policy
from kvpatch.policies.scopes import Scope
from kvpatch.policies.selection import TwoStage
from kvpatch.storage import kinds, save_load
from tests.helpers.faults import in_destructor


class Fault(Exception):
    """Thrown by a test."""


# where: of each kind of call, the functions that it goes through
PASS = [
    (attend, "_attend_layer"), (prefill, "read_prompt"), (blockwise, "read_in_blocks"), (decode, "run_step"),
    (decode, "_add_statistics"), (decode, "_evict_over_budget"), (decode, "find_victims"), (SlotLayer, "drop"),
    (LayerStack, "__init__"),
    (LayerStack, "_open_step"),
    (LayerStack, "begin"), (LayerStack, "share_free"), (torch_backend, "attend"), (torch_backend, "step"),
    (torch_backend, "observe"),
    (torch_backend, "window_sums"), (Call, "entry"), (Call, "sums"), (Call, "add"),
    (Call, "eviction_context"), (Policy, "eviction_keys"),
    (Scope, "mask"), (TwoStage, "eviction_keys"), (prefill, "end_prompt"), (prefill, "set_limits"),
    (compress, "_compress_layer"), (compress, "select_top"),
    (SlotLayer, "adopt"), (SlotLayer, "append"), (SlotLayer, "write"), (SlotLayer, "write_entry"),
    (SlotLayer, "allocate"), (SlotLayer, "resize_slots"), (DenseSlots, "move_to_front"), (SlotLayer, "begin_prompt"),
    (SlotLayer, "make_room"), (SlotLayer, "free"), (SlotLayer, "log_undo"), (layer, "record_step"),
    (head_offsets.HeadOffsets, "pack_entries"), (passes, "begin"),
    (passes, "end_layer"), (passes, "check_batch"), (passes, "_count_budget"),
    (passes, "end_pass"), (decoder, "_begin_pass"), (positions, "_refuse_too_many"), (RunLog, "begin"),
]  # fmt: skip
ROWS = [(SlotLayer, "map_rows"), (TextState, "catch_up"), (Batched, "change_rows"), (head_offsets.HeadOffsets, "select_heads")]
CROP = [(SlotLayer, "crop"), (SlotLayer, "can_crop"), (layer, "restore_step")]
CLONE = [(copy, "deepcopy"), (TextState, "catch_up")]
JOIN = [
    (concat, "check_compatible"), (concat, "_make_blank"), (concat, "_join_layer"), (concat, "_make_buffers"),
    (concat, "_copy_tokens"), (concat, "_set_mode"), (concat, "_set_steps"),
    (concat, "join_padded"), (SlotLayer, "reset"), (TextState, "reset"),
]  # fmt: skip
SAVE = [
    (kinds, "checksum"), (save_load, "_list_limits"), (save_load, "_describe_history"), (safetensors.torch, "save_file"),
]  # fmt: skip
LOAD = [
    (save_load, "_read_file"), (kinds, "verify_checksum"), (save_load, "compare_tables"), (save_load, "_restore_layer"),
    (files, "BoundAdapter"),
]  # fmt: skip
ENTER = [
    (install, "replace_forward"), (install, "make_forward"), (install.Installation, "_set_attribute"),
    (install.Installation, "_mark_module"), (install, "put_hook"), (install, "wrap_generate"), (install, "wrap_make_masks"),
    (install, "wrap_prepare_cache"), (handle, "PatchState"), (handle, "Installation"),
]  # fmt: skip

HOPS = PASS + ROWS + CROP + CLONE + JOIN + SAVE + LOAD + ENTER


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
        if in_destructor(sys._getframe()):
            return original(*args, **kwargs)
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
