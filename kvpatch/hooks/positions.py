"""Positions of a pass's tokens: checked before the pass, given where the cache decides them, noted where the caller does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..policies.served import refuse
from . import inputs
from .second_reading import check_second_reading, note_places
from .state import PatchState


def check_positions(call: dict[str, Any], cache: EvictingCache, tokens: Tensor, mask: Tensor | None, state: PatchState) -> None:
    """Check, for `_begin_pass`, a pass's position_ids, and that the model has positions for all its tokens.

    Changes `call` only for rows of concatenated (joined) caches, which get position_ids, since they are at different positions
    of their texts.
    """
    B, Q = tokens.shape[:2]
    settings, limit = cache.settings, state.max_positions
    inputs.check_position_ids(call.get("position_ids"), B, Q, limit is not None)
    # under policy "full" a pass with a cache may have them: the unpatched model, too, reads them as one text
    if cache.for_one_pass or not state.settings.transparent:
        inputs.refuse_packed_rows(call)
    if cache.rows.concatenated and not settings.renumbered:
        inputs.give_position_ids(call, cache, Q, mask, state)
    if not settings.renumbered:
        _refuse_too_many(cache, Q, call.get("position_ids"), limit)
    if settings.acts and settings.policy.needs.refusal("other positions") and (Q > 1 or not cache.get_seq_length()):
        _refuse_other_positions(cache, tokens, mask, call.get("position_ids"), state)
    if settings.rereads and limit is not None and Q > 1:
        check_second_reading(settings, cache.get_seq_length() + Q, Q, limit)


def place_tokens(call: dict[str, Any], cache: EvictingCache, tokens: Tensor, columns: int, state: PatchState) -> None:
    """Set the position_ids of a pass that has begun, where the cache decides them, and note in the cache what positions count.

    `_begin_pass` calls it. If the caller gives no position_ids for a padded batch, positions count padding too, as in the
    unpatched model (`rows.by_columns`). columns: how many the cache had read before the pass. `renumbered`: keys are cached
    unrotated and rotated later, by their rank among the keys held.
    """
    renumbered, takes = cache.settings.renumbered, "position_ids" in state.decoder_parameters
    # a model that derives positions from the padding mask, which the patch withholds from it
    if state.adapter.positions_from_mask and call.get("position_ids") is None:
        call["position_ids"] = cache.current_pass.positions_BQ
    if renumbered and state.max_positions is not None:
        give_zeros(call, tokens)
    if renumbered or not takes:
        return
    if cache.current_pass.reread_ids_BN is not None:  # a second reading of the prompt must have positions like these
        note_places(cache.current_pass, call.get("position_ids"), columns)
    if cache.rows.padded:
        cache.rows.by_columns |= call.get("position_ids") is None


def give_zeros(call: dict[str, Any], tokens: Tensor) -> None:
    """Pass position 0 for every token: keys are rotated later, and a text may be longer than the decoder's table."""
    call["position_ids"] = torch.zeros(1, tokens.shape[1], dtype=torch.long, device=tokens.device)


def _refuse_other_positions(
    cache: EvictingCache, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None, state: PatchState
) -> None:
    """Raise KVPatchError, for `check_positions`, if a prompt's tokens have other positions than the cache counts for them.

    Only for policies whose scores need the cache's own: 0, 1, ... for the tokens of a row, without padding.
    """
    if "position_ids" not in state.decoder_parameters:
        return
    (B, Q), columns, device = tokens.shape[:2], cache.get_seq_length(), tokens.device
    real_BQ = torch.ones(B, Q, dtype=torch.bool, device=device) if mask is None else mask[:, -Q:].to(device).bool()
    before_B1 = torch.zeros(B, 1, device=device) if cache.seen_B is None else cache.next_positions().to(device)
    given_BQ = torch.arange(columns, columns + Q, device=device) if position_ids is None else position_ids.to(device)
    given_BQ = given_BQ[-1] if given_BQ.ndim == 3 else given_BQ  # the last of several dimensions, which agree on text
    if bool(((given_BQ != before_B1 + real_BQ.cumsum(-1) - 1) & real_BQ).any()):
        refuse("other positions", cache.settings.list_features())


def _refuse_too_many(cache: EvictingCache, Q: int, position_ids: Tensor | None, limit: int | None) -> None:
    """Raise KVPatchError, for `check_positions`, if Q new tokens need more positions than the model has (limit; None: any)."""
    if limit is None or cache.get_seq_length() + Q <= limit:
        return
    last = cache.get_seq_length() + Q if position_ids is None else int(position_ids.max()) + 1
    if last > limit:
        raise KVPatchError(
            f"The text needs {last} positions, but this model has {limit}. Evicting tokens does not give new positions: "
            "shorten the prompt or generate fewer tokens."
        )
