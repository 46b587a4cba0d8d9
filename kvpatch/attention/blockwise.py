"""Block-wise eviction: a prompt read `block` tokens at a time inside one forward pass [RoCo 5.3, EasyKV].

For each block, a layer attends over what it holds, adds the block's rows to its scores, and evicts back to its budget. Block
j of a layer depends only on blocks up to j of the layer below, so a layer can run all of its blocks before the next layer
starts. Blocks count each row's own tokens: a left-padded row is cut where it would be cut alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import prefill
from .layer_call import Call


def read_in_blocks(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Return the output [B,H,G,Q,D] of a prompt under `block=`: the layer reads and compresses one block after the other.

    `_attend_columns` calls this in place of `read_prompt`, which runs here once per block and changes the layer. Blocks are
    counted in real tokens. So each row's tokens are first moved before its padding, in the order `packing_BQ`, and the output
    is moved back.
    """
    now = call.now
    if now.packing_BQ is not None:
        order_BQ = now.packing_BQ.to(q_BHGQD.device)
        row_B1 = torch.arange(len(order_BQ), device=order_BQ.device)[:, None]
        q_BHGQD = q_BHGQD.movedim(3, 1)[row_B1, order_BQ].movedim(1, 3)
        k_BHQD, v_BHQD = (kv.movedim(2, 1)[row_B1, order_BQ].movedim(1, 2) for kv in (k_BHQD, v_BHQD))
    outs, start = [], 0
    for block in now.blocks:
        columns = slice(start, start + block.prompt_columns)
        block_call = Call(call.cache, block, call.layer, call.bound_adapter, call.group, q_BHGQD.device)
        outs.append(prefill.read_prompt(block_call, q_BHGQD[:, :, :, columns], k_BHQD[:, :, columns], v_BHQD[:, :, columns]))
        start += block.prompt_columns
    out = torch.cat(outs, 3)
    if now.packing_BQ is not None:
        # crop() may remove none of these columns: the last ones may be padding
        call.slots.first_croppable = call.slots.columns_used
        out = out.movedim(3, 1)[row_B1, order_BQ.argsort(dim=1)].movedim(1, 3)
    return out
