"""A made-up prompt and steps after it, which compile the kernels of a policy for a model before the first request."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import KVPatchError
from ..policies.budgets import check_count
from .run_log import RunLog
from .state import PatchState
from .target import Target

TOKENS = 512  # of a prompt, if the budget is not larger
STEPS = 2  # tokens decoded after it


def warm_up(target: Target, state: PatchState, tokens: int | None, batch_size: int) -> None:
    """Read made-up prompts of `batch_size` rows of `tokens` tokens and decode after them, so that kernels are compiled.

    `Patch.warmup` calls it. Caches are dropped afterwards, and the patch's log of passes stays as it is.

    Raises:
        KVPatchError: the budget would keep the whole prompt, so that nothing is scored or evicted, or an argument is no count.
    """
    check_count("batch_size", batch_size, "rows")
    if tokens is not None:
        check_count("tokens", tokens, "tokens")
    log, state.log = state.log, RunLog(state.settings)
    try:
        with torch.no_grad():
            length = _choose_length(state, tokens)
            for padding in (0, length // 2) if batch_size > 1 else (0,):
                _read_prompt(target, state, length, batch_size, padding)
    finally:
        state.log = log


def _choose_length(state: PatchState, tokens: int | None) -> int:
    """Return the length of `warm_up`'s made-up prompt, which should be above the budgets of all layers, so that each evicts.

    It is `tokens`; if None, TOKENS or, if more, twice the tokens that a layer keeps, but no more than the model has positions.

    Raises:
        KVPatchError: `tokens` is within a layer's budget.
    """
    rules = state.settings.budget.rules
    length = TOKENS if tokens is None else tokens
    kept = max((rule.least(length) for rule in rules if rule.evicts), default=0)  # tokens left, in the layer with most
    if tokens is None:
        length = max(length, 2 * kept)
        return length if state.max_positions is None else min(length, state.max_positions - STEPS)
    if kept >= length:
        raise KVPatchError(f"tokens={tokens} is within the budget, which keeps {kept} of them: give a longer prompt's length.")
    return length


def _read_prompt(target: Target, state: PatchState, length: int, batch_size: int, padding: int) -> None:
    """Read a made-up prompt into a new cache, its first row padded by `padding` columns, and decode STEPS tokens.

    `warm_up` calls it: the model runs as for a request, so that kernels are compiled. The cache is dropped. length: columns of
    the prompt. batch_size: its rows.
    """
    device, cache = target.devices()[0], state.new_cache()
    mask = torch.ones(batch_size, length + STEPS, dtype=torch.long, device=device)
    mask[0, :padding] = 0
    ids = torch.arange(length + STEPS, device=device).expand(batch_size, -1) % 2  # tokens that every vocabulary has
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    # a pass over the prompt, then passes of one token
    for begin, end in ((0, length), *((length + step, length + step + 1) for step in range(STEPS))):
        call = dict[str, Any]()
        if "position_ids" in state.decoder_parameters:
            call["position_ids"] = positions[:, begin:end]
        call[state.cache_name] = cache
        target.decoder(input_ids=ids[:, begin:end], attention_mask=mask[:, :end], use_cache=True, **call)
