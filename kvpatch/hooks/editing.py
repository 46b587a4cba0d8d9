"""Replacing a span of a cache's text: one pass of the decoder, which reads into the middle of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..cache import passes, replacing
from ..cache.cache import EvictingCache
from ..cache.forward_context import Edit
from ..errors import KVPatchError
from ..policies.served import refuse
from . import decoder, inputs, ownership
from .state import PatchState, switch_overrides


def replace_span(
    reader: nn.Module, state: PatchState, cache: Any, span: tuple[int, int], ids: Any, reread: int = 0, in_force: bool = True
) -> None:
    """Replace the tokens of a span (start, stop) of a cache's text by `ids`. All checks come before the cache changes.

    `Patch.replace` calls it, and a serving engine that keeps conversations. Evicts the old tokens, moves later ones and reads
    the new ones. reader: the decoder. reread: tokens after the span to read again. in_force: the patch was not removed.
    """
    if not in_force:
        raise KVPatchError("This patch was removed, so that no pass would read the new tokens: replace() inside its block.")
    refuse("replace", state.list_features())
    ownership.check_made_here(cache, state)
    # the tokens to read, their positions, and how many positions they need beyond the span's
    tokens_BQ, places_Q, opened = replacing.check_replaced(cache, span, ids, reread, state.why_positions_fixed)
    call: dict[str, Any] = {"input_ids": tokens_BQ, "use_cache": True, state.cache_name: cache}
    inputs.find_tokens(call, reader)
    ownership.note_reader(cache, reader, state)
    start, stop, reread = (int(number) for number in (*span, reread))
    if stop + reread > start:  # evict the old tokens, and those after them that are read again
        cache.forget([(start, stop + reread)])
    if opened:  # move the positions of later tokens up
        replacing.open_positions(cache, stop, opened)
    _read_edit(reader, state, cache, call, Edit(start, int(places_Q[-1]) + 1, opened), places_Q)


def _read_edit(
    reader: nn.Module, state: PatchState, cache: EvictingCache, call: dict[str, Any], edit: Edit, places_Q: Any
) -> None:
    """Run the decoder (`reader`) over the tokens that replace a span, at positions `places_Q`; then sort slots by position.

    `replace_span` calls it once the replaced tokens are gone. call: the decoder's arguments, which are updated. edit: positions
    at which the new tokens begin and end, and how many positions were inserted for them.
    """
    tokens_BQ, before = call["input_ids"], cache.now  # no pass is running: None
    with torch.no_grad():
        with torch.inference_mode(False):
            table = decoder.table_maker(reader, state, tokens_BQ.device)
            now = passes.begin_edit(cache, edit, tokens_BQ, places_Q, table)
        if "position_ids" in state.decoder_parameters:
            unplaced = state.settings.renumbered and state.max_positions is not None  # keys are rotated later
            call["position_ids"] = torch.zeros_like(now.positions_BQ) if unplaced else now.positions_BQ
        switch_overrides(reader, state.overrides, ours=True)  # attributes of the decoder that the patch replaces
        try:
            reader(**call)
        finally:
            cache.now = before
        with torch.inference_mode(False), cache.changing("replace()"):
            replacing.put_in_order(cache)
