"""Layers without keys of their own, which use the keys of a layer before them (Gemma 3n and 4).

A query of such a layer sees what its source's query of the same token saw: the whole prompt, then what the source held before
it evicted at this token. Its attention adds nothing to the source's scores, and it holds nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from ..arch.bound import BoundAdapter
from ..backends import torch_backend
from ..backends.protocol import Keys
from ..cache.state import TextState
from . import prefill
from .layer_call import Call
from .replay import ReplayPass


def attend_to_shared_keys(
    cache: TextState | ReplayPass, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter
) -> Tensor:
    """Attend in a layer without keys of its own, over the keys that queries of its source, an earlier `layer`, saw.

    `attend` calls it for each such layer of a pass; the cache does not change. q [B,H*G,Q,D] -> [B,Q,H*G*D]; q may be of the
    last columns of the pass alone, from `first` on. k and v [B,H,N,D] are of all its new tokens; the source has written them.
    `shared_keys`: by `share_keys`, the keys of the prompt's P columns, then those of each later column.
    """
    if isinstance(cache, ReplayPass):
        return _attend_replay(cache, layer, q, k, v, bound_adapter)
    now, slots = cache.current_pass, cache.layers[layer]
    call = Call(cache, now, layer, bound_adapter, group=q.shape[1] // k.shape[1], device=slots.device)
    call.geometry, call.evicts = bound_adapter.geometry(slots.device), False
    q_BHGQD = rearrange(q.to(slots.device, slots.dtype), "b (h g) q d -> b h g q d", g=call.group)
    shown, P, first = list(now.shared_keys[layer]), now.prompt_columns, now.positions_BQ.shape[1] - q.shape[2]
    outs = []
    if P:
        keys = shown.pop(0)
        if first < P:
            outs.append(_attend_prompt(call, q_BHGQD[:, :, :, : P - first], keys, first))
    for t in range(max(P, first), now.positions_BQ.shape[1]):
        newest_B11 = call.positions_BQ[:, t : t + 1, None]
        out, _ = torch_backend.step(q_BHGQD[:, :, :, t - first], shown[t - P], newest_B11, call.geometry, False)
        outs.append(out[:, :, :, None])
    return rearrange(torch.cat(outs, 3), "b h g q d -> b q (h g d)").to(q.device)


def _attend_prompt(call: Call, q_BHGQD: Tensor, keys: Keys, first: int) -> Tensor:
    """Return the output [B,H,G,Q,D] of a prompt's columns from `first` on, over the `keys` that another layer's queries saw.

    `attend_to_shared_keys` calls it. first: above 0 if the model runs its layers without keys on the last columns alone; the
    first query then sees `first` more keys than `columns_before`.
    """
    rows_BQ = call.rows_BQ[:, first : call.now.prompt_columns]
    if not first:
        return prefill.attend_to(call, q_BHGQD, keys, rows_BQ).out
    return torch_backend.attend(q_BHGQD, replace(keys, columns_before=keys.columns_before + first), rows_BQ, call.geometry)[0]


def _attend_replay(cache: ReplayPass, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
    """Attend in a replay (recorded texts read again, for training), in a layer without keys, for `attend_to_shared_keys`.

    Queries of the first columns, which the model left out, are padded with zeros, and their output is cut off.
    """
    missing = k.shape[2] - q.shape[2]
    out = cache.attend(layer, torch.nn.functional.pad(q, (0, 0, missing, 0)), k, v, bound_adapter)
    return out[:, missing:]
