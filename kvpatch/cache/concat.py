"""Joining caches of several texts, for a loop that reads new prompts while it continues other rows.

Rows of a joined cache are at different positions of their texts. Everything that depends on a text's length is kept per row,
as in a padded batch (positions, budgets, protected sizes), and so is everything that depends on its decode steps. Each head's
tokens are moved into buffers of the size that the end of a prompt would have given it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ..policies.content import sort_by_position
from ..policies.context import Limits
from . import slots
from .compatibility import check_compatible
from .growth import plan
from .layer import SlotLayer
from .lifetimes import Lifetimes, join_padded
from .model_stamp import ModelStamp
from .modes import Moving
from .pickling import Unpicklable
from .slots import Slots, fit_columns
from .state import TextState
from .tensors import HEAD_TENSORS
from .token_ids import TokenIds

Text = TypeVar("Text", bound=TextState)


def join_texts(caches: Sequence[Text], consume: bool) -> Text:
    """Join the rows of several caches into a new one, for `EvictingCache.concatenate`. consume: empty the caches."""
    check_compatible(caches)
    with ExitStack() as stack:
        for cache in caches:
            stack.enter_context(_take_layers(cache) if consume else cache.reading("concatenate()"))
        return _join_caches(caches, consume)


@contextmanager
def _take_layers(cache: TextState) -> Iterator[None]:
    """Guard a block that joins `cache` with others and empties its layers one by one (`consume=True`); then reset `cache`.

    `join_texts` calls it. Until the end, any other use raises an error. After an error the cache is usable again if no layer
    had been emptied.
    """
    cache.begin_change("concatenate(consume=True)")
    cache.unstack_layers()  # stacked layers are views of common tensors
    cache.steps = cache.now = None  # prepared decode steps hold the layers' buffers
    try:
        yield
    except BaseException:
        if all(layer.is_initialized for layer in cache.layers):
            cache.end_change()
        raise
    cache.reset()


def _join_caches(caches: Sequence[Text], consume: bool) -> Text:
    """Return a new cache with the rows of all `caches`. consume: empty each given layer once it was joined."""
    first, seen = caches[0], [cache.lengths_B for cache in caches]
    new = _make_blank(first)
    new.rows.concatenated = True  # rows are at different positions of their texts
    new.seen_B = torch.cat([seen_B.to(seen[0].device) for seen_B in seen])
    new.turns.prompts_read = max(cache.turns.prompts_read for cache in caches)
    sums = [cache.shared_score for cache in caches if cache.shared_score is not None]  # by position
    new.shared_score = join_padded(sums, 0) if sums else None
    new.lifetimes = Lifetimes.join_parts([cache.lifetimes for cache in caches])  # when tokens were evicted
    _set_steps(new, caches)
    new.states.join([cache.states for cache in caches])
    columns = int(new.lengths_B.max())
    edited = any(cache.rows.columns_at_edit for cache in caches)
    new.rows.columns_at_edit = columns if edited else 0  # crop() cannot go back over an edit
    new.model_stamp = ModelStamp.join_parts([cache.model_stamp for cache in caches], [len(cache.lengths_B) for cache in caches])
    new.ids = TokenIds.join_parts([(cache.ids, cache.lengths_B) for cache in caches], columns)
    limits: dict[tuple[int, ...], Limits] = {}
    for index, layer in enumerate(new.layers):
        _join_layer(layer, [cache.layers[index] for cache in caches], limits)
        layer.columns_read = columns
        if consume:
            for cache in caches:
                cache.layers[index].reset()
    new.unstack_layers(due=True)  # stack layers (to step as one) before the next decode step
    return new


def _make_blank(cache: Text) -> Text:
    """For `_join_caches`: return an empty cache with the settings of `cache`. Its layers are copied, then emptied."""
    new = Unpicklable.__copy__(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    new.reset()
    return new


# ---- state of rows beside their slots ----


def _set_steps(new: TextState, caches: Sequence[TextState]) -> None:
    """Set `new.counters` of a joined cache: the decode steps since the prompt, and how far each row is from that number.

    `_join_caches` calls it. A policy may change a softmax temperature step by step, over a span of steps. Only then it keeps
    per row: `steps_behind_B`, how many fewer the row has taken than the farthest, and `temperature_steps_B`, that span.
    """
    policy, steps, spans = new.settings.policy, [], list[Tensor]()
    for cache in caches:
        B, behind_B = len(cache.lengths_B), cache.counters.steps_behind_B
        behind_B = torch.zeros(B, dtype=torch.float64, device="cpu") if behind_B is None else behind_B.cpu()
        steps.append(cache.counters.steps - behind_B)
        # the span of each row: its cache's, unless rows of that cache have spans of their own
        row_spans_B = cache.counters.temperature_steps_B
        common_spans_B = behind_B.new_full((B,), cache.count_temperature_steps())
        spans.append(common_spans_B if row_spans_B is None or cache.plans.new_tokens else row_spans_B.cpu())
    steps_B = torch.cat(steps)
    new.counters.steps = int(steps_B.max())
    if policy.needs.temperature(0, 8) == policy.needs.temperature(8, 8):  # a constant temperature
        return
    if bool((steps_B < new.counters.steps).any()):
        new.counters.steps_behind_B = (new.counters.steps - steps_B).to(new.lengths_B.device)
    span_B = torch.cat(spans)
    if bool((span_B != new.count_temperature_steps()).any()):
        new.counters.temperature_steps_B = span_B.to(new.lengths_B.device)


# ---- one layer ----


def _join_layer(new: SlotLayer, parts: list[SlotLayer], joined_limits: dict[tuple[int, ...], Limits]) -> None:
    """Fill the empty layer `new` with the rows of `parts`, the same layer of each cache, for `_join_caches` and `lay_out_anew`.

    Keys and values stay where they are if the storage allows it (an engine's pages), else they are copied in text order. Also
    sets the mode, which says where the next token goes. joined_limits: limits (protected sizes) of joined layers, by the ids of
    their parts' limits: layers that shared an object share one again, and only such layers are stacked, to step as one.
    """
    first = parts[0]
    # what all rows have in common, then what is per row or head
    new.dtype, new.device, new.is_initialized = first.dtype, first.device, True
    new.sliding, new.geometry = first.sliding, first.geometry
    new.output_rows, new.record_past = first.output_rows, any(part.record_past for part in parts)
    if first.limits is not None:
        limits = [part.limits for part in parts if part.limits is not None]
        key = tuple(map(id, limits))
        joined_limits[key] = new.limits = joined_limits[key] if key in joined_limits else Limits.cat(limits)
    for head_tensor in HEAD_TENSORS:  # with a number for each head, such as its budget
        setattr(new, head_tensor.name, head_tensor.join(parts))
    for name, note in first.need_notes.items():  # what the policy remembers of the layer
        new.need_notes[name] = type(note).cat([part.need_notes[name] for part in parts])
    # keys, values, positions and state; counts: tokens of each head
    counts = [int(n) for part in parts for n in (part.positions[:, :, : part.columns_used] >= 0).sum(-1).flatten().tolist()]
    goals = _list_goals(parts)  # slots of each head at its budget
    joined = first.kv.join_in_place([part.kv for part in parts[1:]], max(goals or (0,)))
    if joined is not None:
        _take_joined(new, parts, joined)
    else:
        _make_buffers(new, parts, counts, goals)
        _copy_tokens(new, parts)
    # the mode says where the next token goes
    if isinstance(first.mode, Moving):  # the budget follows the text
        new.start_moving(counts, goals)
    else:
        _set_mode(new, counts, goals)
    new.in_text_order, new.first_croppable = False, new.columns_used


def lay_out_anew(cache: TextState, layer: SlotLayer, part: SlotLayer) -> None:
    """Replace a layer's slots by new ones without the tokens that an edit of the text removed. Changes `layer` in place.

    part: a copy of the layer in which the positions of these tokens are -1. The others are copied in text order to as many
    slots as the end of a prompt would allocate. `forget`, `drop_last` and `put_in_order` edit texts by it.
    """
    new, before = copy.copy(part), layer.kv.nbytes
    new.reset()
    _join_layer(new, [part], {})
    new.columns_read, new.limits = part.columns_read, part.limits  # layers that share their limits can be stacked
    vars(layer).update(vars(new))  # the same object, for prepared decode steps hold it
    cache.meter.now += layer.kv.nbytes - before  # bytes allocated


def _list_goals(parts: list[SlotLayer]) -> list[int] | None:
    """Return the slots that each head of the joined layer needs at its budget; None if no token is evicted."""
    goals = [part.list_slot_goals() for part in parts]
    return None if any(of_part is None for of_part in goals) else [goal for of_part in goals for goal in of_part or ()]


def _make_buffers(new: SlotLayer, parts: list[SlotLayer], counts: list[int], goals: list[int] | None) -> None:
    """For `_join_layer`: give `new` empty buffers: `kv`, `positions`, and `state` (the policy's tensors per slot).

    They are dense, or ragged (each head has its own number of slots) if dense ones waste too much. counts: tokens of each head.
    goals: slots of each head at its budget; None: nothing is evicted.
    """
    like = parts[0]
    H, B = like.positions.shape[1], len(counts) // like.positions.shape[1]
    centres = [part.kv.centre for part in parts if part.kv.centre is not None]
    centre_BH1D = torch.cat(centres) if centres else None  # what keys of 8 or 4 bits are rounded around
    # dense or ragged, with spare slots for coming tokens; exactly: a ragged layout, too, gets all spare slots
    new.kv = slots.empty(like.kv, B, H, plan(counts, goals, new.count_spare, exactly=new.evict_interval > 1), centre_BH1D)
    C = new.kv.width  # slots of each head, of the longest if ragged
    new.positions = like.positions.new_full((B, H, C), -1)
    for part in parts:
        for name, t in part.state.items():
            if name not in new.state:
                new.state[name] = t.new_zeros(B, H, C, *t.shape[3:])


def _take_joined(new: SlotLayer, parts: list[SlotLayer], joined: Slots) -> None:
    """Fill a joined layer with the rows of `parts` without copying a key or value: `joined` refers to all their memory.

    `_join_layer` calls it for an engine's pages. Each token keeps its slot index, and only positions and state are
    concatenated, padded to the joined width. A part that lacks a statistic gets zeros of it.
    """
    new.kv, C = joined, joined.width  # C: slots of each head
    new.positions = torch.cat([fit_columns(part.positions[:, :, : part.columns_used], C, -1) for part in parts])
    examples = {name: tensor for part in parts for name, tensor in part.state.items()}
    new.state = {
        name: torch.cat([fit_columns(part.statistic(name, like)[:, :, : part.columns_used], C, 0) for part in parts])
        for name, like in examples.items()
    }


def _copy_tokens(new: SlotLayer, parts: list[SlotLayer]) -> None:
    """Copy each head's tokens of the layers `parts`, which are joined, to its first slots in the new buffers, in text order.

    `_join_layer` calls it after `_make_buffers`. Writes to `new.kv`, `new.positions` and `new.state`.
    """
    # heads are numbered over the whole batch; find_begins(): where each one's slots begin among the flattened slots
    first_head, C = 0, new.positions.shape[2]
    for part in parts:
        positions = part.positions[:, :, : part.columns_used].flatten(0, 1)
        order, count_N1 = sort_by_position(positions)  # slots in text order, and how many hold tokens
        head, slot = (torch.arange(order.shape[1], device=order.device) < count_N1).nonzero(as_tuple=True)
        source = order[head, slot]  # the slot that the token comes from
        new.kv.write_at(new.kv.find_begins()[first_head + head] + slot, *part.kv.read_at(part.kv.find_begins()[head] + source))
        new.positions.view(-1, C)[first_head + head, slot] = positions[head, source]
        for name, tensor in part.state.items():
            new.state[name].flatten(0, 1)[first_head + head, slot] = tensor.flatten(0, 1)[head, source]
        first_head += len(positions)


def _set_mode(new: SlotLayer, counts: list[int], goals: list[int] | None) -> None:
    """Set the mode of a layer that was just filled: the next token is appended, goes into a free slot, or makes a head evict.

    `_join_layer` calls it, unless the budget follows the text. counts: tokens of each head. goals: slots of each head at its
    budget; None: nothing is evicted.
    """
    C, longest = new.positions.shape[2], max(counts)
    if goals is not None:
        steps = max(goal - 1 - count for goal, count in zip(goals, counts, strict=True))
        # an eviction of several tokens leaves several slots empty, though all were taken when the parts were joined
        new.may_have_empty = new.kv.head_offsets is not None or steps > 0 or min(counts) + 1 < C or new.evict_interval > 1
        new.start_evicting(steps, counts, goals)
    elif not new.kv.appends:  # slots to which no columns can be appended
        new.may_have_empty = True
        new.start_growing(torch.tensor(counts, device=new.positions.device).view(new.positions.shape[:2]), counts)
    else:
        new.columns_used, new.may_have_empty = longest, min(counts) < longest
        new.start_appending()
