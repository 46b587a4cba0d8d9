"""Local attention: a prompt's queries against the keys of their own chunk, without a causal mask, for scores that ask."""

from __future__ import annotations

import torch
from einops import einsum
from torch import Tensor

from ..backends import torch_backend
from ..cache.modes import Reading
from ..policies.context import accumulator
from ..policies.queries import Local
from .layer_call import Call


def note(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, positions_BQ: Tensor, past: int) -> None:
    """Write the attention that each token gets in its chunk to the state "local".

    Chunks are counted behind the sinks. One that the prompt does not end waits for the rest of its tokens.
    """
    mode, size, sinks = call.slots.mode, call.score.local, call.policy.scope.sinks
    assert isinstance(mode, Reading)
    columns_BQ = (past + torch.arange(positions_BQ.shape[1], device=positions_BQ.device)).expand_as(positions_BQ)
    rows = Local(q_BHGQD.detach(), k_BHQD.detach(), positions_BQ, columns_BQ)
    rows = rows if mode.local is None else mode.local.joined(rows)
    (B, H, G, C, _), positions_BC = rows.q_BHGCD.shape, rows.positions_BC
    order_BC, padding_B1 = positions_BC.argsort(1), (positions_BC < 0).sum(1, keepdim=True)
    first_B1 = order_BC.gather(1, padding_B1.clamp(max=C - 1))
    first_B1 = positions_BC.gather(1, first_B1)  # those that follow are the next positions
    end_B1 = first_B1 + C - padding_B1
    whole_B1 = sinks + (end_B1 - sinks).clamp(min=0) // size * size  # the chunks before are complete
    stop_B1 = end_B1 if call.now.ends_prompt else whole_B1
    begin_B1 = sinks + (first_B1.clamp(min=sinks) - sinks) // size * size
    together = max(1, torch_backend.DEVICE_BLOCK // (B * H * G * size**2)) if positions_BC.is_cuda else 1
    state = call.slots.statistic("local")
    for chunk in range(0, C // size + 2, together):
        place_BM = begin_B1 + torch.arange(chunk * size, (chunk + together) * size, device=positions_BC.device)
        real_BM = (place_BM >= first_B1.clamp(min=sinks)) & (place_BM < stop_B1)
        at_BM = order_BC.gather(1, (padding_B1 + place_BM - first_B1).clamp(0, C - 1))
        found_BHM = _attended(rows, at_BM, real_BM, size)
        index = rows.columns_BC.gather(1, at_BM)[:, None].expand_as(found_BHM)
        state.scatter_add_(2, index, found_BHM.to(state.dtype))
    mode.local = None if call.now.ends_prompt else rows.newest(size - 1, whole_B1)


def _attended(rows: Local, at_BM: Tensor, real_BM: Tensor, size: int) -> Tensor:
    """Return the attention that tokens at columns `at_BM` get from all of their chunk, averaged over the group, [B,H,M]."""
    q, k = rows.taken(at_BM)
    wide = accumulator(q.dtype)
    q_BHGNRD, k_BHNMD = q.to(wide).unflatten(3, (-1, size)), k.to(wide).unflatten(2, (-1, size))
    real_BNM = real_BM.unflatten(1, (-1, size))
    x = einsum(q_BHGNRD, k_BHNMD, "b h g n r d, b h n m d -> b h g n r m")
    p = x.masked_fill(~real_BNM[:, None, None, :, None], torch.finfo(wide).min).softmax(-1)
    total = (p * real_BNM[:, None, None, :, :, None]).sum(4).mean(2)
    return (total * real_BNM[:, None]).flatten(2)
