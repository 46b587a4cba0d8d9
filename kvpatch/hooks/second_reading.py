"""The second reading of a prompt, for scores that ask for it: the decoder runs again where the prompt has ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import compress
from ..cache import passes
from ..cache.cache import EvictingCache
from ..policies.repeated import Repeated
from .attention import PassMask
from .state import PatchState, pass_mask


def after_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, state: PatchState) -> None:
    """Repeat a prompt that has just been read, then compress it. A forward hook of the decoder."""
    cache = kwargs.get("past_key_values")
    if torch.compiler.is_compiling() or not isinstance(cache, EvictingCache):
        return
    now = cache.now
    if now is not None and now.reread_BN is not None and now.repeat is None and cache.unfinished:
        read_again(decoder, cache, state, now.reread_BN)


def read_again(decoder: nn.Module, cache: EvictingCache, state: PatchState, ids_BN: Tensor) -> None:
    """Run the decoder over what repeats the prompt `ids_BN`, chunk by chunk, and end the prompt in all layers."""
    now, score = cache.running, cache.settings.policy.score
    assert isinstance(score, Repeated)
    rows = [[token for token in row if token >= 0] for row in ids_BN.tolist()]
    texts = [list(score.pieces(row)) for row in rows]
    with torch.no_grad():
        try:
            for chunk in range(max(map(len, texts))):
                pieces = [text[chunk] if chunk < len(text) else (0, 0, []) for text in texts]
                with torch.inference_mode(False):
                    tokens, positions = passes.begin_repeat(cache, now, pieces, ids_BN.device)
                call: dict[str, Any] = {"input_ids": tokens, "past_key_values": cache, "use_cache": True}
                if "position_ids" in state.decoder_parameters:
                    call["position_ids"] = positions.clamp(min=0)
                decoder(**call)
        finally:
            cache.now = now
        with torch.inference_mode(False):
            compress.finish(cache, now)
            passes.finish(cache)


def begin_repeat(call: dict[str, Any], cache: EvictingCache, device: torch.device) -> Any:
    """Begin a pass of a second reading: nothing of the cache's own counts it."""
    call.update(past_key_values=cache, use_cache=True, attention_mask=pass_mask(device).as_subclass(PassMask))
    return (), call
