"""End of a pass of the decoder, where layers without a budget ran last, and the second reading of a prompt.

For policies that need a second reading, the decoder runs again where the prompt has ended; a hybrid's states stay as the
prompt left them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..arch.upstream import cache_of, set_cache
from ..attention import anomaly, compress
from ..cache import passes
from ..cache.cache import EvictingCache
from ..cache.forward_context import Forward
from ..cache.lossless import LosslessCache
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from ..policies.needs.second_reading import Rereading
from . import lossless
from .attention import PassMask
from .state import Changed, PatchState, mask_by_kind, pass_mask


def after_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, state: PatchState) -> Any:
    """End a pass after each forward of the decoder (a forward hook), if its last attention layer could not end it.

    That is so for hybrids, and for prompts that the policy reads twice (`unfinished` then). After a pass over a lossless cache,
    return an output that has this cache in place of the budgeted one; else None, which leaves the output as it is.
    """
    cache = cache_of(kwargs)  # the pre-hook has put it there
    if torch.compiler.is_compiling() or not isinstance(cache, EvictingCache):
        return None
    now = cache.now  # the pass that ran; with `repeat` it was a part of the second reading, which ends elsewhere
    if now is None or now.repeat is not None or cache.for_one_pass:
        return None
    if cache.unfinished:  # no layer has ended the pass
        _end_late(decoder, cache, state)
    return lossless.end_pass(output, now.lender) if isinstance(now.lender, LosslessCache) else None


def _end_late(decoder: nn.Module, cache: EvictingCache, state: PatchState) -> None:
    """End a pass for `after_decoder`: count its tokens. If the policy reads the prompt twice, first reread it, then evict."""
    now = cache.current_pass
    if now.reread_ids_BN is not None:
        read_again(decoder, cache, state, now.reread_ids_BN)
    else:
        with torch.inference_mode(False), torch.no_grad():
            passes.end_pass(cache)
    if cache.settings.strict:
        anomaly.check_cache(cache)


def read_again(decoder: nn.Module, cache: EvictingCache, state: PatchState, ids_BN: Tensor) -> None:
    """Run the decoder over texts that repeat the prompt `ids_BN` (as KVzip asks), chunk by chunk, then evict in all layers.

    `_end_late` calls it where the prompt has ended, `compress_past` for a cache to compress. Changes the cache; the repeated
    tokens do not stay in it, nor in a hybrid's states.
    """
    # the pass that ends the prompt (of no tokens, for `compress_past`), and the policy's chunk size and instruction
    now, need = cache.current_pass, cache.settings.policy.needs.find(Rereading)
    assert need is not None
    # of each row, without padding: (start, stop, tokens) of each chunk; its tokens are an instruction and prompt[start:stop]
    rows = [[token for token in row if token >= 0] for row in ids_BN.tolist()]
    texts = [list(need.cut_pieces(row)) for row in rows]
    with torch.no_grad():
        try:
            for chunk in range(max(map(len, texts))):
                pieces = [text[chunk] if chunk < len(text) else (0, 0, []) for text in texts]
                with torch.inference_mode(False):
                    tokens, positions = passes.begin_repeat(cache, now, pieces, ids_BN.device)
                call: dict[str, Any] = {"input_ids": tokens, state.cache_name: cache, "use_cache": True}
                if "position_ids" in state.decoder_parameters:
                    offset_B1 = 0 if now.position_offset_B1 is None else now.position_offset_B1  # see `note_places`
                    call["position_ids"] = (positions + offset_B1).clamp(min=0)
                with cache.states.kept():  # a hybrid's recurrent states stay as the prompt left them
                    decoder(**call)
        finally:
            cache.now = now
        with torch.inference_mode(False):
            compress.finish(cache, now)  # evicts
            passes.end_pass(cache)


def check_second_reading(settings: CacheSettings, seen: int, Q: int, limit: int) -> None:
    """Raise KVPatchError before a prompt of Q tokens if the text that will repeat it needs more positions than there are.

    `check_positions` calls it before a pass, `compress_past` through `_check_past`. seen: tokens up to the prompt's end. limit:
    the model's number of positions.
    """
    need = settings.policy.needs.find(Rereading)
    assert need is not None
    more = need.longest(Q)
    if seen + more > limit:
        raise KVPatchError(
            f"Policy {settings.policy.name!r} reads {more} tokens a second time after {seen}, but this model has "
            f"{limit} positions: give chunk= fewer tokens, or shorten the prompt."
        )


def note_places(now: Forward, position_ids: Tensor | None, columns: int) -> None:
    """Set `now.position_offset_B1`: how far the model's position of each row's last token is from that counted without padding.

    Padding in front of a row without position_ids moves its tokens, as the caller's position_ids may; the text that repeats
    a prompt must be moved alike. `place_tokens` calls it before a prompt that is read a second time. columns: read before.
    """
    counted_BQ = now.positions_BQ
    if position_ids is None:
        given_BQ = torch.arange(columns, columns + counted_BQ.shape[1], device=counted_BQ.device).expand_as(counted_BQ)
    else:  # the last of several dimensions, which agree on text
        given_BQ = (position_ids if position_ids.ndim == 2 else position_ids[-1]).to(counted_BQ.device).expand_as(counted_BQ)
    last_B1 = counted_BQ.argmax(-1, keepdim=True)  # the column of each row's last token; padding has position -1
    now.position_offset_B1 = given_BQ.gather(1, last_B1) - counted_BQ.gather(1, last_B1)


def enter_prepared(call: dict[str, Any], cache: EvictingCache, device: torch.device, state: PatchState) -> Changed:
    """Put the cache, and the mask that a pass through it takes, into `call`, the decoder's arguments; return no others.

    `_enter_decoder` calls it where kvpatch itself runs the decoder, to read a prompt a second time or to edit the text: whoever
    does so has begun the pass in the cache already (`now.prepared`).
    """
    mask = mask_by_kind(cache.settings.layer_numbers, pass_mask(device).as_subclass(PassMask), None, 1)
    set_cache(call, cache, state.cache_name)
    call.update(use_cache=True, attention_mask=mask)
    return (), call
