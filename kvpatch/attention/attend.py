"""The one core that every architecture shares: write, attend, observe, evict.

`attend` is what an attention module calls; a prompt goes through prefill.py, a generated token through decode.py.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..arch.bound import BoundAdapter
from ..cache import passes
from ..cache.state import TextState
from . import anomaly, blockwise, decode, prefill
from .layer_call import Call
from .stacked import Deck


def attend(cache: TextState, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
    """Attention of new tokens through the cache; evicts what the policy says.

    q [B,H*G,Q,D], k and v [B,H,Q,D] with positions applied -> [B,Q,H*G*D]. The leading columns that belong to the
    prompt are attended as one; the others one after another, each as a decode step. Autocast is off in all of it: scores,
    norms and statistics are float32 whatever it would make of them, and q, k and v have its dtype already.
    """
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        bound_adapter.autocast = True
        with torch.autocast(device, enabled=False):
            return _writable(cache, layer, q, k, v, bound_adapter)
    return _writable(cache, layer, q, k, v, bound_adapter)


def _writable(cache: TextState, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        # what the cache allocates must stay writable where this mode is off again
        with torch.inference_mode(False), torch.no_grad():
            return _attend(cache, layer, q, k, v, bound_adapter)
    return _attend(cache, layer, q, k, v, bound_adapter)


def _attend(cache: TextState, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
    assert cache.now is not None, "passes.begin() runs in the decoder's pre-hook"
    call = Call(cache, cache.now, layer, bound_adapter, group=q.shape[1] // k.shape[1], device=q.device)
    slots = call.slots
    dtype = slots.dtype if slots.is_initialized else v.dtype  # autocast may mix dtypes: the cache's is decided once
    if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if cache.settings.strict:
        anomaly.check_inputs(call, q, k, v)
    q_BHGQD, P, Q = q.unflatten(1, (-1, call.group)), call.now.prompt, q.shape[2]
    read = blockwise.attend if call.now.blocks else prefill.attend
    if P == Q:
        out = read(call, q_BHGQD, k, v)
    elif Q == 1 and not call.now.traced and (deck := _deck(call, q_BHGQD[:, :, :, 0])) is not None:
        out = deck.attend(call, q_BHGQD[:, :, :, 0], k, v)[:, :, :, None]
    elif Q == 1:
        out = decode.attend(call, q_BHGQD[:, :, :, 0], k, v, 0)[:, :, :, None]
    else:
        outs = [read(call, q_BHGQD[:, :, :, :P], k[:, :, :P], v[:, :, :P])] if P else []
        for t in range(P, Q):
            at = slice(t, t + 1)
            outs.append(decode.attend(call, q_BHGQD[:, :, :, t], k[:, :, at], v[:, :, at], t)[:, :, :, None])
        out = torch.cat(outs, 3)
    if cache.settings.strict:
        anomaly.check_outcome(call, out)
    if P and call.now.ends_prompt:
        decode.foresee(call, q_BHGQD[:, :, :, 0])
    slots.graph = None
    passes.end(cache, layer)
    if cache.settings.strict and layer == len(cache.layers) - 1 and not cache.scratch:
        anomaly.check_cache(cache)
    return rearrange(out, "b h g q d -> b q (h g d)")


def _deck(call: Call, q_BHGD: Tensor) -> Deck | None:
    """The cache's Deck for this pass: made when every slot is in use, given up when rows are moved or steps recorded."""
    cache = call.cache
    if call.now.recording or cache.settings.strict:
        cache.stack = None
        return None
    # only between passes: within one, the layers before this one have evicted already
    if cache.stack_due and call.layer == 0 and call.slots.mode.slotted:
        cache.stack_due = False
        cache.stack = Deck.of(cache, call.group) if decode.backend_of(call, q_BHGD) == "torch" else None
    return cache.stack
