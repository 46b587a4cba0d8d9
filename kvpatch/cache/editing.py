"""Editing the text of a cache: spans that are taken out, wherever a policy has kept them, and last tokens that are taken back.

A layer's tokens are laid out anew without them, as joining lays out rows (concat.py): storages, statistics and modes need no
code here. Nothing is written in place, so that a cache that shares tensors, such as a prefix, keeps its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..policies.budgets import as_python
from ..policies.served import refuse
from . import checks
from .concat import lay_out_anew
from .layer import SlotLayer
from .rollback import UNDO_STEPS
from .state import TextState, Turns

Span = tuple[int, int]


def forget(cache: TextState, spans: Sequence[Span], row: int | None) -> None:
    """Take spans of the text out of all layers of a cache. `EvictingCache.forget`, which describes the arguments, calls this.

    Also notes these tokens as evicted for replays, and that crop() cannot go back over the edit.
    """
    check_state(cache, "forget()")
    refuse("forget", cache.settings.list_features())  # raises if a combination of settings excludes it
    gone_BT = mark_gone(cache, spans, row, "forget()")
    # a position that is not below the row's number of tokens counts padding, too
    if cache.rows.gaps_B is not None and bool((cache.layers[0].positions.amax((1, 2)) >= cache.read_B).any()):
        raise KVPatchError(
            "forget() in a text with padding between its tokens, whose positions count the padding: read the text without it."
        )
    with cache.changing("forget()"):
        cache.unstack_layers()  # layers have separate buffers again, which are replaced
        for index, layer in enumerate(cache.layers):
            _take_out(cache, layer, gone_BT.to(layer.device))  # copies the other tokens to new buffers
            if cache.lifetimes is not None:
                cache.lifetimes.note_evictions(index, layer.positions, cache.lengths_B.to(layer.device)[:, None, None])
        cache.rows.columns_at_edit = cache.columns_read
        cache.counters.tensors_or_none = None  # the next pass makes it anew


def refuse_reading(*args: object, **kwargs: object) -> NoReturn:
    """Stand in for `cache.replace`, `cache.insert` and `patch.insert`: name the call that reads tokens into a text."""
    raise KVPatchError(
        "The patch reads other tokens into a text: write patch.replace(cache, (start, stop), ids); (at, at) inserts."
    )


def check_state(cache: TextState, what: str) -> None:
    """Raise KVPatchError for a cache whose text cannot be edited now. what: the call, for errors.

    `forget` and `check_replaced` call it before an edit. Compiled steps are counted first (`catch_up`).
    """
    checks.check_filled(cache.seen_B is not None)
    cache.refuse_unfinished()
    cache.catch_up()
    if cache.turns.unfinished:
        raise KVPatchError(f"{what} in the middle of a prompt: read it to its end, then edit.")
    if cache.plans.static_room is not None:
        raise KVPatchError(
            f"{what} moves buffers, and this cache was made with room={cache.plans.static_room} (or by a generate() that "
            "compiles) for buffers that never change: make it without room."
        )
    if any(layer.storage is not None for layer in cache.layers):
        raise KVPatchError(f"{what} of a cache in an engine's pages: end the request, and send the edited text.")


def mark_gone(cache: TextState, spans: Sequence[Span], row: int | None, what: str) -> Tensor:
    """Check spans, and mark their positions in each row's text: bool [B,T] on the CPU.

    `forget` and `check_replaced` call it. Raises KVPatchError if a span is malformed, overlaps another or ends after the text.
    row: the batch row that the spans are of; None for all. what: the call, for errors.
    """
    lengths, row, given = cache.read_B.tolist(), checks.read_whole(row), as_python(spans)
    if row is not None and (type(row) is not int or not 0 <= row < len(lengths)):
        raise KVPatchError(f"row={row!r}: the cache has the rows 0 to {len(lengths) - 1}; give one of these, or None for all.")
    rows = list(range(len(lengths))) if row is None else [row]
    gone_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.bool, device="cpu")
    earlier_spans: list[Span] = []
    if not isinstance(given, Iterable):
        raise KVPatchError(f"{what} was given {given!r}: give a list of (start, stop), such as [(12, 80)].")
    for span in given:
        start, stop = read_span(span)
        for index in rows:
            if stop > lengths[index]:
                raise KVPatchError(
                    f"{what} was given the span ({start}, {stop}), and row {index} has read {lengths[index]} tokens: spans end "
                    f"there or before{'' if row is not None or len(lengths) == 1 else '; give row= where rows differ'}."
                )
        for earlier in earlier_spans:
            if start < earlier[1] and earlier[0] < stop:
                raise KVPatchError(f"The spans {earlier} and ({start}, {stop}) overlap: join them into one.")
        earlier_spans.append((start, stop))
        gone_BT[rows, start:stop] = True
    if not earlier_spans:
        raise KVPatchError(f"{what} was given no span: give a list of (start, stop), such as [(12, 80)].")
    return gone_BT


def read_span(span: object, empty: bool = False) -> Span:
    """Return the span of forget() or replace() as (start, stop), or raise KVPatchError. empty: it may have no tokens."""
    wanted = "give (start, stop), positions of the text with stop left out, such as (12, 80)."
    given = as_python(span)
    ends = [checks.read_whole(end) for end in given] if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(ends) != 2 or not all(type(end) is int for end in ends):
        raise KVPatchError(f"{span!r} is not a span: {wanted}")
    start, stop = ends
    if start < 0:
        raise KVPatchError(f"The span {(start, stop)} begins before the text: {wanted}")
    if not start < stop + empty:
        raise KVPatchError(f"The span {(start, stop)} has no tokens: {wanted}")
    return start, stop


def _take_out(cache: TextState, layer: SlotLayer, gone_BT: Tensor) -> None:
    """Take the tokens whose positions an edit marks in `gone_BT` out of a layer; copies of the others go to new buffers.

    `forget` and `drop_last` call it for each layer. A layer that holds none of these tokens stays as it is.
    """
    positions = layer.positions[:, :, : layer.columns_used]
    clamped_BHT = positions.clamp(0, gone_BT.shape[1] - 1)
    gone_BHT = gone_BT[:, None].expand(-1, positions.shape[1], -1).gather(2, clamped_BHT) & (positions >= 0)
    if not bool(gone_BHT.any()):
        return
    # a copy of the layer in which the slots of these tokens are empty, to take the others from
    part = copy.copy(layer)
    part.positions = layer.positions.clone()
    part.positions[:, :, : layer.columns_used].masked_fill_(gone_BHT, -1)
    lay_out_anew(cache, layer, part)


# ---- the last tokens ----


def crop(cache: TextState, tokens_to_remove: int) -> None:
    """Roll back the last tokens of all layers, counters and ids, for `EvictingCache.crop`, which says what the argument means.

    A cache of an assistant model (`plans.may_roll_back`) that cannot do it is emptied instead.
    """
    cache.refuse_unfinished()
    cache.catch_up()
    count = checks.count_removed(tokens_to_remove, cache.columns_read)
    if count == 0:
        return
    if cache.columns_read - count < cache.rows.columns_at_edit:
        raise KVPatchError(
            f"Cannot roll back {count} tokens: the text was edited after {cache.rows.columns_at_edit}. Take back "
            f"{cache.columns_read - cache.rows.columns_at_edit} at most, or go on from a clone() made before the edit."
        )
    if cache.rows.padded or cache.rows.concatenated:  # else each row has as many tokens as columns
        _refuse_padding(cache, count)
    settings = cache.settings
    if not can_crop(cache, count):
        if cache.plans.may_roll_back:
            cache.reset()
            return
        refuse("roll-back", settings.list_features(crop=count))  # raises if settings exclude it; else steps were not recorded
        raise KVPatchError(f"Cannot roll back {count} tokens: {_explain_missing_record(cache)}")
    with cache.changing("crop()"):
        cache.unstack_layers(due=False)  # layers have separate buffers again
        shared_scores = [layer.crop(count) for layer in cache.layers]
        cache.states.crop(count)
        cache.shared_score = cache.shared_score if shared_scores[0] is None else shared_scores[0]
        cache.seen_B = cache.lengths_B - count
        if cache.lifetimes is not None:
            cache.lifetimes.crop(cache.seen_B)  # when tokens were evicted
        cache.counters.steps = max(cache.counters.steps - count, 0)
        cache.counters.tensors_or_none = None  # the next pass makes it anew
        cache.ids.crop(cache.columns_read)
        if not cache.columns_read:
            cache.turns = Turns()  # the next prompt is a text's first
        trim_slots(cache)


def _explain_missing_record(cache: TextState) -> str:
    """Return, for the error of `crop`, why the last tokens' steps are not on record, and what to do."""
    if cache.turns.unfinished:
        return "their prompt has not ended: read on to its end, or reset() the cache and read another text."
    if not all(layer.record_past for layer in cache.layers):
        return (
            "what they evicted was not recorded. Call cache.activate_past_recording() before generating them, or cache.clone() "
            "before and use the copy."
        )
    logged = min(len(layer.undo_log) for layer in cache.layers)
    return (
        f"what they evicted was not recorded. The record has the last {logged} steps (it never has more than {UNDO_STEPS}): "
        f"take back at most {logged}, ask for fewer drafts at a time (prompt_lookup_num_tokens), or call cache.clone() before "
        "and use the copy."
    )


def _refuse_padding(cache: TextState, count: int) -> None:
    """For `crop`: raise KVPatchError if some row has fewer than `count` tokens: its padding does not roll back."""
    fewest, row = cache.lengths_B.min(0)
    if count > int(fewest):
        raise KVPatchError(
            f"Cannot roll back {count} tokens: row {int(row)} has {int(fewest)}. Take back at most {int(fewest)}, or empty the "
            "cache with reset()."
        )


def drop_last(cache: TextState, count: int) -> None:
    """Drop the newest `count` tokens of a prompt that has just ended. `LosslessCache.crop` calls this for rejected drafts.

    Tokens that these have evicted do not come back.
    """
    n_left = cache.columns_read - count
    with cache.changing("crop()"):
        gone_BT = torch.arange(cache.columns_read, device="cpu")[None] >= n_left
        for layer in cache.layers:
            _take_out(cache, layer, gone_BT.to(layer.device))
            layer.columns_read = n_left
        cache.seen_B = cache.lengths_B - count
        cache.counters.tensors_or_none = None  # the next pass makes it anew
        cache.ids.crop(n_left)


def can_crop(cache: TextState, count: int) -> bool:
    """Tell `crop` if it can take back the last `count` tokens exactly: their steps were logged, or have changed no other token.

    A policy `remembers` if its sums of attention include that of later tokens, and `revises` if later tokens of a prompt change
    what is stored with earlier ones. Until a prompt ends, what a policy `reads` of it cannot be taken back.
    """
    settings, n_read = cache.settings, cache.columns_read
    inside = cache.counters.steps < count < n_read  # the crop ends inside a prompt, whose first tokens stay
    pairs = zip(settings.evicts, settings.policies, strict=True)
    remembers = [
        evicts and (policy.remembers or (inside and policy.revises) or (cache.turns.unfinished and policy.reads))
        for evicts, policy in pairs
    ]
    croppable = all(layer.can_crop(count, remembered) for layer, remembered in zip(cache.layers, remembers, strict=True))
    return croppable and n_read - count >= cache.rows.columns_at_edit and cache.states.can_crop(count, n_read)


def trim_slots(cache: TextState) -> None:
    """Free the slots that dropped rows or cropped tokens have left empty; with room=, count them as free for coming tokens."""
    for layer in cache.layers:
        if cache.plans.static_room is None:
            layer.give_back_slots()
        else:
            layer.measure_room()  # its buffers never change
