"""Marks of a prompt's columns: what the user's `protect=` and `quota=` say of each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..policies.quotas import MESSAGES, encode_spans, number_columns
from ..policies.scopes import AllBut, protect_tensor
from .messages import Messages
from .state import TextState


def mark_protected(
    cache: TextState, positions_BQ: Tensor, input_ids: Tensor | None, seen: int, within: int | None = None
) -> Tensor | None:
    """Mark the columns of a pass that the user's `protect=` keeps from eviction, bool [B,Q]; for `_read_pass` and `begin_edit`.

    seen: columns before these. within: for an edit of a text that was read, the position of its first column; else None.

    Raises:
        KVPatchError: `protect=` is a mask of another shape than the prompt, or "system" where the prompt came without messages.
    """
    scope = cache.settings.policy.scope
    protect = scope.protect
    if protect is None or not cache.settings.acts:
        return None
    B, Q = positions_BQ.shape
    # the system message's tokens, by the messages that the chat has rendered
    if scope.keeps_system:
        messages = _find_messages(cache, "protect='system' keeps the system message", "give a boolean mask, or token ids")
        first = seen if within is None else within
        marks = torch.zeros(first + Q, dtype=torch.bool, device="cpu") if messages is None else messages.mark_system(first + Q)
        return marks[first:].to(positions_BQ.device) & (positions_BQ >= 0)
    protected = protect_tensor(protect).to(positions_BQ.device)
    # token ids: every token that has one of these (AllBut: none of these)
    if protected.dtype != torch.bool:
        assert input_ids is not None, "refused in _read_pass"
        return torch.isin(input_ids.to(protected.device), protected, invert=isinstance(protect, AllBut)) & (positions_BQ >= 0)
    if seen and seen >= protected.shape[-1]:
        return positions_BQ.new_zeros(B, Q, dtype=torch.bool)  # a later prompt, perhaps of other rows
    # a mask of the first prompt, whose rows may each stand for several rows of the batch, as in beam search
    protected = protected.expand(B, -1) if protected.ndim == 1 else protected.repeat_interleave(max(B // len(protected), 1), 0)
    total = cache.plans.prompt_len or Q
    if len(protected) != B or (seen == 0 and protected.shape[1] != total):
        raise KVPatchError(
            f"protect= is a mask of shape {list(protected.shape)}, but the prompt is [{B}, {total}]: give one of its shape, "
            "or token ids."
        )
    part = protected[:, seen : seen + Q]
    pad = part.new_zeros(B, Q - part.shape[1])
    return torch.cat([part, pad], 1) & (positions_BQ >= 0)


def mark_spans(cache: TextState, positions_BQ: Tensor, seen: int) -> Tensor | None:
    """Return, for `_read_pass` and `begin_edit`, the span that each column is in, encoded as int64 [B,Q]; 0: in none.

    The option `quota=` names spans of a prompt that keep at least their share of the budget (policies/quotas.py). seen: columns
    before these. Without `quota=` the result is None.

    Raises:
        KVPatchError: a span ends after the prompt, span numbers have another shape than the prompt, or quota="messages" is
            given where the prompt came without messages.
    """
    quota = cache.settings.policy.scope.quota
    if quota is None or not cache.settings.acts:
        return None
    (B, Q), device = positions_BQ.shape, positions_BQ.device
    by_message = isinstance(quota, str) and quota == MESSAGES
    messages = _find_messages(cache, "quota='messages' has a span for each message", "give spans") if by_message else None
    if messages is None and (by_message or cache.turns.prompts_read or (seen and not cache.turns.unfinished)):
        return positions_BQ.new_zeros(B, Q)  # a later prompt, which has no spans
    # columns that have spans: the text's up to this pass, if each message is a span, else the prompt's
    columns = seen + Q if messages is not None else cache.plans.prompt_len or Q
    real = torch.ones(B, columns, dtype=torch.bool, device=device)
    if seen and messages is None:  # a prompt in pieces is padded on the left
        real[:, :seen] = torch.arange(seen, device=device) >= seen - cache.lengths_B.to(device)[:, None]
    width = min(Q, columns - seen)
    real[:, seen : seen + width] = positions_BQ[:, :width] >= 0
    if messages is not None:
        numbers = messages.number_messages(columns).to(device).expand(B, -1)
    else:
        numbers = number_columns(quota, B, columns, device)
    span = encode_spans(numbers, real)[:, seen : seen + Q]
    return torch.cat([span, span.new_zeros(B, Q - span.shape[1])], 1)


def _find_messages(cache: TextState, what: str, instead: str) -> Messages | None:
    """Return the messages of a chat's prompt, to mark `what`; None for a later prompt that came without messages.

    Raises KVPatchError if the first prompt has none. what, instead: for the error: the option that needs messages, and what the
    user can give in place of it.
    """
    if cache.messages is None and not cache.turns.prompts_read:
        raise KVPatchError(
            f"{what} of a chat, and these tokens came without messages: use patch.chat(tokenizer, system='...'), or {instead}."
        )
    return cache.messages
