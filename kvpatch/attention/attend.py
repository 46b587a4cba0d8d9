"""The core that every architecture shares: write, attend, observe, evict.

An attention module calls `attend`; a prompt goes through prefill.py, a generated token through decode.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from ..arch.bound import BoundAdapter
from ..cache import passes
from ..cache.state import TextState
from . import anomaly, blockwise, bound_step, decode, prefill, reading, second_reading
from .layer_call import Call
from .replay import ReplayPass
from .stacked import LayerStack
from .steps import find_steps


def attend(
    cache: TextState | ReplayPass,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bound_adapter: BoundAdapter,
    reads: bool = False,
) -> Tensor:
    """Attend in one layer: write new tokens to the cache, and evict what the policy chooses.

    The patched forward of each attention module calls it once per pass, except in layers that have a bound step (short decode
    step). q [B,H*G,Q,D], k and v [B,H,Q,D] with positions applied -> [B,Q,H*G*D]. The first columns may belong to a prompt:
    they attend together. Each later column is a decode step. Autocast is off here, so that scores, norms and statistics stay
    float32; q, k and v arrive in autocast's dtype. bound_adapter: the attention module, with what is known of its architecture.
    reads: the module computes no keys, and attends to those of an earlier layer, `layer` (reading.py).
    """
    run = reading.attend_to_shared_keys if reads else _attend_writing
    if is_autocasting(q.device.type):
        bound_adapter.autocast = True  # the adapter's products with weights then cast as the model's do
        with torch.autocast(q.device.type, enabled=False):
            return run(cache, layer, q, k, v, bound_adapter)
    return run(cache, layer, q, k, v, bound_adapter)


def is_autocasting(device: str) -> bool:
    """Tell if torch.autocast is on for a type of device ("cuda", "cpu")."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _attend_writing(
    cache: TextState | ReplayPass, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter
) -> Tensor:
    """Attend in a layer that computes keys: write them to the cache, and evict. `attend` calls it with autocast off.

    Inference mode is off while a cache is written. `cache` is a ReplayPass if recorded texts are read again in one pass, for
    training; then nothing is written.
    """
    if isinstance(cache, ReplayPass):
        return cache.attend(layer, q, k, v, bound_adapter)
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        # what the cache allocates must stay writable outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            return _attend_layer(cache, layer, q, k, v, bound_adapter)
    return _attend_layer(cache, layer, q, k, v, bound_adapter)


def _attend_layer(cache: TextState, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
    """Run a pass in one layer: attend, store new keys and values, evict, and count the layer as done; return [B,Q,H*G*D].

    `_attend_writing` calls it in each layer that writes keys. In a decode step the first layer also makes bound steps (objects
    that save Python time) for later layers (bound_step.py). A cache `for_one_pass` is then dropped, as the user asked for none.
    `unfinished`: the pass goes on after its last layer, until a hook ends it. `stack`: layers that score and evict together.
    """
    call = _bind_call(cache, layer, q, k, bound_adapter)
    slots = call.slots
    dtype = slots.dtype if slots.is_initialized else v.dtype  # autocast may mix dtypes: a cache keeps its first one
    if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if cache.settings.strict:
        anomaly.check_inputs(call, q, k, v)
    B, heads, Q, D = q.shape
    if Q == 1 and not call.now.prompt_columns:
        q_BHGD = q.view(B, heads // call.group, call.group, D)
        stack = _find_stack(call, q_BHGD)
        out = decode.run_step(call, q_BHGD, k, v, 0, stack)
        out_BQE = out.reshape(B, 1, -1)
        if layer == 0:
            bound_step.bind_steps(call, q_BHGD, stack)
    else:
        out = _attend_columns(call, q.view(B, heads // call.group, call.group, Q, D), k, v)
        out_BQE = rearrange(out, "b h g q d -> b q (h g d)")
    if cache.settings.strict:
        anomaly.check_outcome(call, out.view(B, heads // call.group, call.group, Q, -1))
    slots.graph = None  # drop keys and values with their autograd graph, which only this pass needs
    passes.end_layer(cache, layer)  # after the last layer it ends the pass
    if cache.settings.strict and layer == len(cache.layers) - 1 and not (cache.for_one_pass or cache.unfinished):
        anomaly.check_cache(cache)
    return out_BQE


def _attend_columns(call: Call, q_BHGQD: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a pass of a prompt or several tokens in one layer; return [B,H,G,Q,D]. `_attend_layer` calls it.

    The first P columns, a prompt's, attend at once. Each later column is a decode step (tokens that assisted decoding
    verifies).
    """
    P, Q = call.now.prompt_columns, k.shape[2]
    repeat = call.now.repeat  # unless None, these columns repeat a part of the prompt, for scores by a second reading
    read: Callable[..., Tensor] = blockwise.read_in_blocks if call.now.blocks else prefill.read_prompt
    read = read if repeat is None else functools.partial(second_reading.reread_chunk, repeat)
    outs = [read(call, q_BHGQD[:, :, :, :P], k[:, :, :P], v[:, :, :P])] if P else []
    for t in range(P, Q):
        column = slice(t, t + 1)
        outs.append(decode.run_step(call, q_BHGQD[:, :, :, t], k[:, :, column], v[:, :, column], t)[:, :, :, None])
    return torch.cat(outs, 3) if len(outs) > 1 else outs[0]


def _bind_call(cache: TextState, layer: int, q: Tensor, k: Tensor, bound_adapter: BoundAdapter) -> Call:
    """Return a Call, the object that stands for one layer in one forward pass. `_attend_layer` begins each layer with this.

    To save Python time, a decode step takes the layer's Call of the last step and sets it to this pass by `begin`. A prompt,
    and a step that torch.compile traces, get a new Call. `find_steps(cache).calls` keeps it for later steps unless the step is
    traced, the cache is `for_one_pass`, or the pass reads a part of the prompt again (`repeat`).
    """
    now = cache.current_pass
    call = None if now.prompt_columns or now.traced else find_steps(cache).calls.get(layer)
    if call is not None and call.bound_adapter.attn is bound_adapter.attn and call.device == q.device:
        call.bound_adapter.autocast = bound_adapter.autocast
        call.begin(now)
        return call
    call = Call(cache, now, layer, bound_adapter, group=q.shape[1] // k.shape[1], device=q.device)
    if not now.traced and not cache.for_one_pass and now.repeat is None:
        find_steps(cache).calls[layer] = call
    return call


def _find_stack(call: Call, q_BHGD: Tensor) -> LayerStack | None:
    """Return the stack by which a decode step's layers score and evict together, or None if each layer does so alone.

    Each layer asks in each decode step. A stack joins the layers' positions and scores in one tensor. It is
    built at the first layer, once no layer will need more slots (`settled`), and kept as `steps.stack`. It is dropped when
    batch rows are reordered (`stack_due` then asks for a new one), and here where each layer is looked at by itself:
    `records_undo` for rollback, strict=True, `records_lifetimes` for replays, or `settings.read`, layers whose keys later
    layers use.
    """
    cache = call.cache
    if call.now.traced:  # torch.compile compiles the step
        return None
    steps = find_steps(cache)
    if call.now.records_undo or cache.settings.strict or cache.settings.records_lifetimes or cache.settings.read:
        steps.stack = None
        return None
    # only between passes: within one, earlier layers have evicted already
    known = len(steps.calls) == len(cache.layers)  # not in the first step of a cache from a file
    if call.layer == 0 and call.slots.settled and known and (cache.stack_due or steps.stack is not None):
        name = decode.choose_backend(call, q_BHGD)
        if cache.stack_due or steps.stack is None or steps.stack.backend != name:  # gradients change the backend
            cache.stack_due = False
            alike = all(one.group == call.group for one in steps.calls.values())
            steps.stack = LayerStack.of(cache, call, name) if alike else None
    return steps.stack
