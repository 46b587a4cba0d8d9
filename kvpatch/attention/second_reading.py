"""Second reading: rows that repeat a prompt attend to it and are observed; their own keys and values are dropped."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..backends import torch_backend
from ..backends.protocol import Keys
from ..backends.torch_backend import Rows
from ..cache.slots import gathered
from . import prefill
from .layer_call import Call


def attend(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Return the output [B,H,G,Q,D] of rows whose keys and values are not kept. The layer's slots stay as they are."""
    now, held = call.now, call.keys(call.slots.used)
    padded = now.padding is not None
    places = call.positions_BQ[:, None].expand(*k_BHQD.shape[:3])
    keys = replace(
        held,
        k_BHTD=torch.cat([held.k_BHTD, k_BHQD], 2),
        v_BHTD=torch.cat([held.v_BHTD, v_BHQD], 2),
        positions_BHT=torch.cat([held.positions_BHT, places], 2),
        holes=held.holes or padded,
        ordered=held.ordered and not padded,
    )
    found = prefill.attend_to(call, q_BHGQD, keys, call.rows_BQ)
    if call.evicts:
        with torch.no_grad():
            _observe(call, q_BHGQD, held, k_BHQD, places)
    return found.out


def _observe(call: Call, q_BHGQD: Tensor, held: Keys, k_BHQD: Tensor, places_BHQ: Tensor) -> None:
    """Raise the scores of the chunk's tokens to the greatest probability that a row gives them."""
    repeat, slots = call.now.repeat, call.slots
    assert repeat is not None
    start, stop = (call.now.copy(of, k_BHQD.device)[:, None, None] for of in (repeat.start_B, repeat.stop_B))
    position = held.positions_BHT
    inside = (position >= start) & (position < stop)
    wanted = inside | ((position >= 0) & (position < start.clamp(max=call.policy.scope.sinks)))
    longest = max(b - a for a, b in zip(repeat.start_B, repeat.stop_B, strict=True))
    count = min(longest + min(call.policy.scope.sinks, max(repeat.start_B)), position.shape[2])
    index = (~wanted).byte().argsort(dim=-1, stable=True)[..., :count]
    shown = position.gather(-1, index).masked_fill(~wanted.gather(-1, index), -1)
    k = torch.cat([gathered(held.k_BHTD, index), k_BHQD], 2)
    # of a first prompt without padding rows are alike, and all of these are wanted; a later one may find its sinks evicted
    holes = held.holes or call.now.padding is not None or call.cache.turns.count > 1
    keys = Keys(k, k, torch.cat([shown, places_BHQ], 2), holes, count, False)
    most = slots.state["repeated"].new_zeros(k.shape[0] * k.shape[1], k.shape[2])

    def take(rows: Rows) -> None:
        block = most[rows.n0 : rows.n1, rows.lo : rows.hi]
        torch.maximum(block, rows.p_NGRM.amax((1, 2)), out=block)

    Q = k_BHQD.shape[2]
    torch_backend.observe(q_BHGQD.detach(), keys, call.rows_BQ, call.geometry, None, take, ends=range(count + 1, count + Q + 1))
    call.cache.choice.record("statistics", "torch", "kernels read a prompt's rows once, this score reads it twice")
    most = most.view(*k.shape[:3])[..., :count].masked_fill(~inside.gather(-1, index), 0.0)
    slots.state["repeated"].scatter_reduce_(-1, index, most, "amax")
