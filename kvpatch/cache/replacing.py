"""Other tokens in place of a span of a cache's text: what they are checked for, and the room that is made for them.

A span may be empty, so that they are inserted. The pass that reads them is hooks/editing.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..policies.served import refuse
from .checks import read_whole
from .concat import lay_out_anew
from .editing import Span, check_state, mark_gone, read_span
from .marks import mark_protected
from .state import TextState


def check_replaced(
    cache: TextState, span: Span, ids: object, reread: int, positions_fixed: str | None
) -> tuple[Tensor, Tensor, int]:
    """For `replace_span`: check the arguments of `Patch.replace`, before its first change.

    positions_fixed: the reason that the model can be told no positions, or None.

    Returns:
        The tokens [B,Q] to be read in place of a span and of the `reread` tokens after it, their positions [Q], and how many
        new positions must be opened at the span's end for them.

    Raises:
        KVPatchError: an argument or the cache is none that `Patch.replace` can take; nothing has changed.
    """
    check_state(cache, "replace()")
    refuse("replace", cache.settings.list_features(positions_fixed=positions_fixed))  # raises if settings exclude it
    (start, stop), reread = read_span(span, empty=True), read_whole(reread)
    ids_BN = _read_ids(ids, len(cache.lengths_B)).to(cache.lengths_B.device)
    opened = max(ids_BN.shape[1] - (stop - start), 0)  # tokens more than the span has positions
    _check_room(cache, ids_BN.shape[1], stop - start)
    _check_rows(cache, opened)
    _check_reread(reread)
    _check_place(cache, start, stop)
    mark_gone(cache, [(start, max(stop + reread, start + 1))], None, "replace()")
    # positions: the new tokens from the span's start on, then the tokens that are read again, moved up by `opened`
    new_N, again_R = start + torch.arange(ids_BN.shape[1], device="cpu"), stop + torch.arange(reread, device="cpu")
    places_Q = torch.cat([new_N, again_R + opened]).to(ids_BN.device)
    if not reread:
        _check_protected(cache, ids_BN, places_Q, start, stop)
        return ids_BN, places_Q, opened
    ids_BT = cache.ids.ids_BT
    again_BR = None if ids_BT is None else ids_BT.gather(1, cache.ids.find_columns(again_R)).to(ids_BN.device)
    if again_BR is None or bool((again_BR < 0).any()):
        raise KVPatchError(
            f"reread={reread}: the cache does not know the ids of these tokens: leave reread out, or give a longer span, and "
            "these tokens at the end of ids."
        )
    ids_BQ = torch.cat([ids_BN, again_BR], 1)
    _check_protected(cache, ids_BQ, places_Q, start, stop + reread)
    return ids_BQ, places_Q, opened


def _check_protected(cache: TextState, ids_BQ: Tensor, places_Q: Tensor, start: int, stop: int) -> None:
    """Raise KVPatchError if heads that stay full after an edit would evict new tokens that `protect=` marks.

    `check_replaced` calls it. Of a full head tokens before the edit and new ones go, but neither later ones nor sinks and
    marked ones (`EditEnd`). start, stop: positions between which all tokens are read anew.
    """
    settings, places_BQ = cache.settings, places_Q.expand(len(ids_BQ), -1)
    marks_BQ = mark_protected(cache, places_BQ, ids_BQ, cache.columns_read, within=start)
    if marks_BQ is None or settings.policy.schedule == "prompt":  # then nothing is evicted
        return
    for index, (layer, rule) in enumerate(zip(cache.layers, settings.budget.rules, strict=True)):
        if not settings.evicts[index] or rule.moves:
            continue
        at_BHC = layer.positions
        kept_BHC = (at_BHC < layer.own_limits.first) | layer.state.get("protect", torch.zeros_like(at_BHC)).bool()
        kept_BHC = (kept_BHC & (at_BHC >= 0) & (at_BHC < start)) | (at_BHC >= stop)
        room_BH = layer.own_budget_BH1[..., 0] + settings.policies[index].every - 1 - kept_BHC.sum(-1)
        need_B1 = marks_BQ.to(room_BH.device).sum(1, keepdim=True)
        if bool((need_B1 > room_BH).any()):
            row, head = (need_B1 > room_BH).nonzero()[0].tolist()
            raise KVPatchError(
                f"replace(): protect= marks {int(need_B1[row])} of the new tokens, and head {head} of layer {index} has room "
                f"for {max(int(room_BH[row, head]), 0)}, since later tokens fill it: forget() some of these, raise k, or read "
                "the new tokens at the end of the text."
            )


def _check_room(cache: TextState, count: int, room: int) -> None:
    """Raise KVPatchError if replace()'s `count` tokens need more positions than the span's `room`, and none can be opened."""
    if count <= room:
        return
    if not cache.settings.renumbered:
        raise KVPatchError(
            f"replace() was given {count} tokens for a span of {room}, whose positions they take: give {room} or fewer, or a "
            "longer span. With patched(..., positions='renumbered') what follows moves up."
            if room
            else "replace() of an empty span inserts, and what follows has its positions: patch with positions='renumbered', "
            "or give a span that was forgotten."
        )
    refuse("insert", cache.settings.list_features())  # raises if settings exclude insertion


def _check_place(cache: TextState, start: int, stop: int) -> None:
    """For `check_replaced`: raise KVPatchError if replace() would insert at the end of a row's text."""
    for row, length in enumerate(cache.lengths_B.tolist()):
        if start == stop == length:
            raise KVPatchError(
                f"replace() at {stop}: row {row} has read {length} tokens, and nothing follows there. Read on instead: "
                "model(ids, past_key_values=cache)."
            )


def _check_rows(cache: TextState, opened: int) -> None:
    """Raise KVPatchError for caches in which replace() would use wrong positions, or a window has dropped tokens it needs.

    `check_replaced` calls it. opened: positions that the edit adds.
    """
    if cache.ids.offset:  # positions after images differ from the count of tokens
        raise KVPatchError("replace() in a text with images, after which positions count otherwise: read the text anew.")
    if not cache.turns.prompts_read:
        raise KVPatchError("replace() before a prompt has ended: read on first.")
    if (cache.rows.concatenated and len(cache.lengths_B) > 1) or cache.counts_padding:
        raise KVPatchError(
            "replace() in a batch whose rows are at different columns of their texts: take a row with cache.select_rows(0), "
            "replace, and join them with concatenate()."
        )
    for layer in cache.layers:
        if layer.sliding is not None and cache.columns_read + opened > layer.sliding:
            raise KVPatchError(
                f"replace(): layers of this model see a window of {layer.sliding} tokens, and the tokens in front of the span "
                f"may be gone there, for the text has {cache.columns_read + opened}. Read the text anew."
            )


def _read_ids(ids: object, B: int) -> Tensor:
    """For `check_replaced`: return the new tokens' ids of each row, [B,N]; raise KVPatchError if `ids` cannot be such."""
    wanted = f"give token ids, int64 [N] or [{B}, N] or a list of them."
    try:
        tensor = torch.as_tensor(ids, device=None if isinstance(ids, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise KVPatchError(f"replace() was given a {type(ids).__name__} as ids: {wanted}") from error
    if not tensor.numel():
        raise KVPatchError("replace() was given no token: to take the span out, write cache.forget([span]).")
    if (
        tensor.dtype not in (torch.int64, torch.int32)
        or tensor.ndim not in (1, 2)
        or (tensor.ndim == 2 and len(tensor) not in (1, B))
    ):
        raise KVPatchError(f"replace() was given ids of {tensor.dtype} and shape {list(tensor.shape)}: {wanted}")
    return tensor.long().expand(B, -1)


def _check_reread(reread: object) -> None:
    """Raise KVPatchError unless `reread` is a number of tokens."""
    if type(reread) is not int or reread < 0:
        raise KVPatchError(f"reread={reread!r}: give the number of tokens after the span to read again, 0 or more.")


def open_positions(cache: TextState, at: int, count: int) -> None:
    """Make room for an edit of a renumbered text: add `count` to positions from `at` on, in all rows; open id columns."""
    with cache.changing("replace()"):
        cache.unstack_layers()  # layers get buffers of their own again
        seen = cache.columns_read
        for layer in cache.layers:
            layer.positions = layer.positions + count * (layer.positions >= at)
            layer.columns_read, layer.in_text_order = seen + count, False
        cache.ids.skip_columns(len(cache.lengths_B), seen, cache.lengths_B.device)  # columns whose ids were not noted
        cache.ids.open_columns(at, count)
        if cache.shared_score is not None:  # a score that all layers share, by position + 1
            before, after = cache.shared_score[:, :, : at + 1], cache.shared_score[:, :, at + 1 :]
            cache.shared_score = torch.cat([before, before.new_zeros(*before.shape[:2], count), after], 2)
        cache.seen_B = cache.lengths_B + count
        cache.rows.columns_at_edit = cache.columns_read  # crop() cannot go back over an edit
        cache.counters.tensors_or_none = None  # the next pass makes it anew


def put_in_order(cache: TextState) -> None:
    """Put each head's slots in text order after tokens were read into the middle of it: scores are pooled over neighbours."""
    for layer in cache.layers:
        lay_out_anew(cache, layer, layer)
