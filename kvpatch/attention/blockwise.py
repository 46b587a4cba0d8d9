"""Block-wise eviction: a prompt read `block` tokens at a time inside one forward pass [RoCo 5.3, EasyKV].

A layer encodes a block against what it holds, adds the block's rows to its scores, evicts back to its budget and goes on with
the next block; block j of a layer needs blocks up to j of the layer below alone, so that a layer can run all of its blocks
before the next one starts. Blocks count each row's own tokens: a left-padded row is cut as it would be alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import prefill
from .layer_call import Call


def attend(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """As prefill.attend, block after block."""
    now = call.now
    if now.packing_BQ is not None:
        order = now.packing_BQ.to(q_BHGQD.device)
        b = torch.arange(len(order), device=order.device)[:, None]
        # [B,Q,...] with the row's own tokens first
        q_BHGQD = q_BHGQD.movedim(3, 1)[b, order].movedim(1, 3)
        k_BHQD, v_BHQD = (t.movedim(2, 1)[b, order].movedim(1, 2) for t in (k_BHQD, v_BHQD))
    outs, start = [], 0
    for one in now.blocks:
        columns = slice(start, start + one.prompt)
        part = Call(call.cache, one, call.layer, call.bound_adapter, call.group, q_BHGQD.device)
        outs.append(prefill.attend(part, q_BHGQD[:, :, :, columns], k_BHQD[:, :, columns], v_BHQD[:, :, columns]))
        start += one.prompt
    out = torch.cat(outs, 3)
    if now.packing_BQ is not None:
        call.slots.floor = call.slots.used  # a row's last columns need not be its last tokens
        out = out.movedim(3, 1)[b, order.argsort(dim=1)].movedim(1, 3)
    return out
