"""The decoder's pre-hook during a replay: matches each row with a recorded text, and lets the pass follow the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..arch.upstream import CACHE, cache_of, set_cache
from ..attention.replay import ReplayPass
from ..cache.cache import EvictingCache
from ..cache.lifetimes import Record, check_same_model
from ..cache.snapshot import Snapshot
from ..errors import KVPatchError
from ..policies.served import refuse
from . import inputs, ownership
from .attention import Courier
from .attentions import refuse_attentions
from .state import Changed, PatchState, mask_by_kind, pass_mask, switch_overrides


def begin_replay(decoder: nn.Module, call: dict[str, Any], state: PatchState, record: Record) -> Changed:
    """Begin a pass in which queries see what they saw when `record` was made; `_enter_decoder` calls it in a replay.

    A record holds texts, and at which position each head evicted each token. Changes `call`, the decoder's arguments: a mask
    that carries the ReplayPass to the layers, and positions if it has none.
    """
    if cache_of(call) is not None:
        raise KVPatchError(
            f"A replay reads whole texts without a cache: leave out {CACHE}, and call generate() outside the block, or "
            "within patched(model, ..., record=True) as patch, where patch.replay(record) stands for kvpatch.replay()."
        )
    refuse("replay", state.list_features())
    inputs.refuse_pass(call, decoder)
    refuse_attentions(call, decoder)
    tokens = inputs.find_tokens(call, decoder)
    if tokens is None or not tokens.shape[1]:
        return None  # the model raises the error
    if call.get("input_ids") is None:
        raise KVPatchError("A replay knows a text by its token ids: give input_ids, not inputs_embeds.")
    # padding mask and position_ids
    B, Q = tokens.shape
    mask = inputs.check_padding_mask(call.get("attention_mask"), B)
    if mask is not None and mask.shape[1] != Q:
        raise KVPatchError(f"attention_mask has {mask.shape[1]} columns, but input_ids have {Q}: a replay takes whole texts.")
    inputs.check_position_ids(call.get("position_ids"), B, Q, state.max_positions is not None)
    inputs.refuse_packed_rows(call)
    # find each row's text in the record, by its tokens without padding
    real_BQ = torch.ones(B, Q, dtype=torch.bool, device="cpu") if mask is None else mask.cpu().bool().expand(B, -1)
    known_NT, rows = record.ids.cpu(), zip(tokens.cpu(), real_BQ, strict=True)
    # the number of the recorded text of each row
    text_B = torch.tensor([_match_row(b, ids[real], known_NT, record) for b, (ids, real) in enumerate(rows)], device="cpu")
    # positions in the text, -1 for padding; gaps: padding between tokens of a row
    positions_BQ = (real_BQ.long().cumsum(-1) - 1).masked_fill(~real_BQ, -1)
    gaps_BQ = real_BQ.flip(-1).long().cumsum(-1).flip(-1).bool() & (real_BQ.long().cumsum(-1) > 0) & ~real_BQ
    places_BQ = positions_BQ.to(tokens.device)
    if "position_ids" in state.decoder_parameters and call.get("position_ids") is None:
        call["position_ids"] = places_BQ.clamp(min=0)
    switch_overrides(decoder, state.overrides, ours=True)  # attributes of the decoder that the patch replaces
    # stands in place of a cache; the last two arguments: there is padding, and none between tokens
    now = ReplayPass(state.settings, record, text_B, places_BQ, not bool(real_BQ.all()), not bool(gaps_BQ.any()))
    state.log.replayed = now.choice.ran_last  # the backends that run, by task, for the report
    # the layers find it on their mask
    decoder_mask = mask_by_kind(state.settings.layer_numbers, Courier.carrying(now, pass_mask(tokens.device)), mask, Q)
    set_cache(call, None, state.cache_name)
    call.update(use_cache=False, attention_mask=decoder_mask)
    return (), call


def _match_row(row: int, ids_Q: Tensor, known_NT: Tensor, record: Record) -> int:
    """Return the number of the recorded text that a replayed row's ids agree with, but for the last; else raise KVPatchError.

    `begin_replay` calls it for each row. row: its number, for errors. known_NT: ids of the N recorded texts, < 0: none. The
    last id may differ, as the recorded cache has not read it.
    """
    n = len(ids_Q)
    width = min(n, known_NT.shape[1])
    same_NT = known_NT[:, :width] == ids_Q[:width]
    agree_N = same_NT.long().cumprod(-1).sum(-1)  # tokens from the beginning
    length_N = (known_NT >= 0).sum(-1)
    # the row as generate() returned it, one token longer than what the cache has read, or all that was read
    ends_N = (agree_N >= n - 1) & (agree_N == length_N)
    for matches_N in (ends_N, agree_N == n, agree_N >= n - 1):
        if matches_N.any():
            return _choose_text(row, n, matches_N.nonzero()[:, 0].tolist(), record)
    best = int(agree_N.argmax()) if width else 0
    agree, length = int(agree_N[best]) if width else 0, int(length_N[best])
    if agree == length:
        raise KVPatchError(
            f"Row {row} has {n} tokens, but its text was recorded up to {length}: cut the row to {length + 1}, or record what "
            "follows as well."
        )
    raise KVPatchError(
        f"Row {row} is no recorded text: token {agree} of it differs from the most similar, text {best}. Give texts as they "
        "were recorded, with attention_mask=0 for padding; join records with Record.join([...])."
    )


def _choose_text(row: int, n: int, matches: list[int], record: Record) -> int:
    """Return the first of the recorded texts that a row of n tokens agrees with; `_match_row` calls it.

    Raises:
        KVPatchError: they first evicted at different tokens, as where a later turn read a first turn's text anew.
    """
    starts = [min(int(record.first_N[text]), n) for text in matches]  # n: no query of the row is without a token
    for text, start in zip(matches, starts, strict=True):
        if start != starts[0]:
            raise KVPatchError(
                f"Row {row} is the beginning of several recorded texts that were read otherwise: text {matches[0]} first "
                f"evicts at token {starts[0]}, text {text} at token {start}. Replay the record of each generate() by itself."
            )
    return matches[0]


@contextmanager
def follow(state: PatchState, model: dict[str, Any], record: Record | Sequence[Record], in_force: bool) -> Iterator[None]:
    """Make passes without a cache follow a record (which keys each query saw) inside a with-block, for `Patch.replay`.

    Sets `state.replayed`. model: class and shapes of this patch's model. in_force: the patch was not removed.
    """
    if not in_force:
        raise KVPatchError(
            "This patch was removed, so that no pass would follow the record: write `with kvpatch.replay(model, record):`."
        )
    joined = record if isinstance(record, Record) else Record.join(record)
    check_same_model(joined.model, model, "this one")
    if state.settings.renumbered:
        raise KVPatchError("A replay attends at original positions: patch with positions='original'.")
    before, state.replayed = state.replayed, joined
    try:
        yield
    finally:
        state.replayed = before


def find_record(state: PatchState, model: dict[str, Any], cache: EvictingCache | None) -> Record:
    """Return the record of which keys each query saw in a cache, by default the cache used last, for `Patch.record`.

    model: its class and shapes, which a replay compares.
    """
    if not state.settings.records_lifetimes:
        raise KVPatchError("Nothing was recorded: write patched(model, ..., record=True).")
    if cache is not None:
        ownership.check_made_here(cache, state)
    last = state.log.snapshot() if cache is None else Snapshot.of(cache)
    if last is None or last.lengths_B is None:
        raise KVPatchError("Nothing was recorded yet: call generate() or the model inside the block first.")
    # deaths: the position at which each token was evicted, by layer; None: a layer that no whole prompt has passed
    if last.lifetimes is None or None in last.lifetimes.deaths:
        raise KVPatchError(
            "These texts are not known from their beginning: the cache was loaded or converted, or is in the middle of a "
            "prompt. Read the text under record=True."
        )
    return Record.of(last.lifetimes, last.lengths_B, model)
