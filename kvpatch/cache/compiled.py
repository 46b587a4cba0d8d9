"""Decode steps under torch.compile: the usual code, with everything that changes from step to step held in tensors.

A Python number read by a traced step becomes a constant of the graph, and the next step would compile again. So a traced
step advances the tensors of the cache's DeviceCounters instead of the counters, names free slots in place, and reads no
tensor's value. The counters catch up when untraced code next uses the cache. Only a step of one token over slots can be
traced: prompts, rollback and a score that layers share run outside the graph. The decoder's pre-hook decides which passes are
traced (`Forward.traced`), since torch.compile may stop tracing any function and run it as it stands, in the middle of a pass.

An interrupt inside a graph is invisible to the next pass: a graph runs no Python code, and it writes its tensors in an order
of its own, so that no tensor could record it. generate() marks its cache as unfinished when an exception leaves it. After
interrupting a step of a forward that was compiled alone, use a new cache or call reset().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .forward_context import Forward
from .modes import Moving, Slotted
from .state import TextState

NO_ROOM = (
    "A compiled decode step found no free slot: give the cache room for as many tokens as you generate, "
    "patch.new_cache(room=...)."
)
ONE_GRAPH = (
    "kvpatch: only a decode step over a cache of its final size makes one graph. Run the prompt uncompiled, and give room for "
    "what is generated: patch.new_cache(room=...), or generate() with a compile_config."
)
NO_POSITIONS = "The text needs more positions than this model has; evicting tokens does not give new ones: generate fewer."


def can_trace(cache: TextState, B: int, Q: int) -> bool:
    """Tell if torch.compile may trace a pass of B rows and Q columns: a decode step whose tensors keep shape and memory.

    `_begin_step` of hooks/decoder.py asks before a step that is traced or captured, `StepGraph` before replays. Changes
    nothing.
    """
    if cache.settings.untraced is not None:  # the reason that no step can be traced under these settings
        return False
    # a prompt is not read to its end, an operation did not finish, or no pass has made the counters that are tensors
    if Q != 1 or cache.turns.unfinished or cache.unfinished or cache.counters.tensors_or_none is None or cache.seen_B is None:
        return False
    if cache.seen_B.shape[0] != B or any(layer.record_past for layer in cache.layers):
        return False
    if any(isinstance(layer.mode, Moving) for layer in cache.layers):  # a head may evict any number of tokens
        return False
    if cache.settings.renumbered:  # a key's position is its rank among the keys held
        if cache.rotary is None:
            return False
        if cache.rotary[1] is not None and any(layer.mode.steps_until_full or not layer.mode.evicts for layer in cache.layers):
            return False  # the rotary table covers only the ranks so far
    if cache.plans.static_room is None and any(layer.mode.has_short_heads and layer.mode.evicts for layer in cache.layers):
        return False  # buffers will move to larger ones, without room= for all coming tokens
    modes = [layer.mode for layer in cache.layers]
    # the next token goes into a free slot of each head, which eviction or spare slots (slack) provide
    return all(isinstance(mode, Slotted) and (mode.evicts or mode.slack > 0) for mode in modes)


def begin_step(cache: TextState, max_positions: int | None, real_BT: Tensor | None, ids_B1: Tensor | None = None) -> None:
    """Begin a decode step that torch.compile traces, as passes.begin() begins other passes; its checks run on the device.

    `_begin_step` of hooks/decoder.py calls this before the first layer. Sets `cache.now` (the pass in progress), marks each
    layer as `traced`, and writes the new tokens' ids `ids_B1` to a ring buffer (the tape), from which the cache takes them
    later. max_positions: of the model, or None. real_BT: the attention mask.
    """
    if real_BT is not None:
        torch._assert_async(real_BT[:, -1:].bool().all(), "attention_mask marks a generated token as padding.")
    if max_positions is not None:
        torch._assert_async((cache.lengths_B < max_positions).all(), NO_POSITIONS)
    if any(layer.mode.has_short_heads for layer in cache.layers):  # up to `limit` columns there is room
        torch._assert_async(cache.counters.tensors.columns < cache.counters.tensors.limit, NO_ROOM)
    cache.counters.tensors.write_tape(ids_B1)
    # positions of the new tokens: none of them belongs to a prompt, and none ends one
    cache.now = Forward(cache.lengths_B[:, None], 0, False, traced=True)
    for layer in cache.layers:
        layer.traced = True
    cache.now.rotary_table = None if cache.rotary is None else cache.rotary[1]  # the last one made


def end_step(cache: TextState) -> None:
    """End a compiled step after the last layer: add 1 to counters that are tensors. `catch_up` updates the others later.

    `end_pass` calls it, inside the traced code, for a pass that `begin_step` began.
    """
    cache.lengths_B.add_(1)
    cache.counters.tensors.columns.add_(1)
    cache.counters.tensors.steps.add_(1)
    cache.now = None  # else its tensors would be outputs of the graph
    cache.counters.has_uncounted_steps = True


def mark_static(cache: TextState) -> None:
    """Tell torch.compile that the cache's tensors keep their addresses: CUDA graphs need not copy them.

    `end_pass` calls it after a prompt, if the cache has room= for all coming tokens.
    """
    for holder in list_holders(cache):
        for value in holder.values():
            if isinstance(value, Tensor):
                torch._dynamo.mark_static_address(value)


def list_holders(cache: TextState) -> list[dict[str, Any]]:
    """Return the attributes, by name, of every object that holds tensors of a compiled step, for CUDA graphs (`StepGraph`)."""
    found: list[dict[str, Any]] = [vars(cache.counters.tensors), vars(cache), vars(cache.counters), vars(cache.rows)]
    for layer in cache.layers:
        offsets = layer.kv.head_offsets
        blocks = None if offsets is None else offsets.blocks()  # cut now: a traced step cannot
        kv = layer.kv
        # need_notes: what the policy remembers of the layer
        parts = (layer, layer.mode, kv, kv.codecs[0], offsets, blocks, layer.limits, layer.geometry, *layer.need_notes.values())
        found += [vars(part) for part in parts if part is not None]
        found.append(layer.state)
    return list({id(holder): holder for holder in found}.values())
