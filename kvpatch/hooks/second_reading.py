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
from ..cache.lossless import LosslessCache
from ..policies.needs.second_reading import Rereading
from . import lossless
from .attention import PassMask
from .state import Changed, PatchState, by_kind, pass_mask


def after_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, state: PatchState) -> Any:
    """End a pass that outlasts its last layer; a prompt may be repeated before. A forward hook of the decoder."""
    cache = cache_of(kwargs)
    if torch.compiler.is_compiling() or not isinstance(cache, EvictingCache):
        return None
    now = cache.now
    if now is None or now.repeat is not None or cache.scratch:
        return None
    if cache.unfinished:
        _end_late(decoder, cache, state)
    return lossless.end_pass(output, now.lender) if isinstance(now.lender, LosslessCache) else None


def _end_late(decoder: nn.Module, cache: EvictingCache, state: PatchState) -> None:
    """End a pass that its last layer on the budget has not ended."""
    now = cache.running
    if now.reread_BN is not None:
        read_again(decoder, cache, state, now.reread_BN)
    else:
        with torch.inference_mode(False), torch.no_grad():
            passes.finish(cache)
    if cache.settings.strict:
        anomaly.check_cache(cache)


def read_again(decoder: nn.Module, cache: EvictingCache, state: PatchState, ids_BN: Tensor) -> None:
    """Run the decoder over what repeats the prompt `ids_BN`, chunk by chunk, and end the prompt in all layers."""
    now, need = cache.running, cache.settings.policy.needs.find(Rereading)
    assert need is not None
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
                    call["position_ids"] = positions.clamp(min=0)
                with cache.states.kept():
                    decoder(**call)
        finally:
            cache.now = now
        with torch.inference_mode(False):
            compress.finish(cache, now)
            passes.finish(cache)


def enter_prepared(call: dict[str, Any], cache: EvictingCache, device: torch.device, state: PatchState) -> Changed:
    """Enter a pass that was begun before the decoder was called: a part of a second reading, or an edit."""
    mask = by_kind(cache.settings.stack, pass_mask(device).as_subclass(PassMask), None, 1)
    set_cache(call, cache, state.cache_name)
    call.update(use_cache=True, attention_mask=mask)
    return (), call
