"""A decode step: one token per row goes into the free slot, attends, is observed, and one token is evicted."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import torch_backend as backend
from .backends.torch_backend import Keys, Rows
from .call import Call
from .policies.selection import victim


def attend(call: Call, q_BHGD: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, t: int) -> Tensor:
    """Output [B,H,G,D] of the token at column `t` of the pass."""
    slots, now, score = call.slots, call.now, call.score
    positions_B1 = call.positions_BQ if call.positions_BQ.shape[1] == 1 else call.positions_BQ[:, t : t + 1]
    newest_B11 = positions_B1[:, None]
    with torch.no_grad():
        slots.make_room()
        if now.recording:
            slots.note(call.cache.shared)
        slots.write(k_BH1D, v_BH1D, positions_B1, call.step_entry(k_BH1D, v_BH1D, positions_B1))
    slots.seen += 1
    q_BHG1D, keys = call.renumber(q_BHGD[:, :, :, None], call.keys(slots.used), positions_B1)
    q_BHGD = q_BHG1D[:, :, :, 0]
    evicting = score is not None and slots.evicting
    wanted = (evicting and call.policy.rows != "none") or (score is not None and call.policy.remembers)
    out, p_BHGT = backend.step(q_BHGD, keys, newest_B11, call.geometry, wanted)
    with torch.no_grad():
        if wanted and p_BHGT is not None:
            _observe(call, p_BHGT, keys, newest_B11, t)
        if evicting:
            _evict(call, newest_B11, t)
    if not evicting and slots.extents is not None:
        slots.advance()
    return out


def _observe(call: Call, p_BHGT: Tensor, keys: Keys, newest_B11: Tensor, t: int) -> None:
    """Add the new row's probabilities to the state."""
    score, policy = call.score, call.policy
    assert score is not None
    B, H, _, T = p_BHGT.shape
    if score.tail:
        call.slots.statistic("tail")[:, :, :T] = p_BHGT.mean(2)
    if not policy.statistics:
        return
    seen = _visible_count(call, keys, newest_B11) if "count" in policy.statistics else None
    rows = Rows(0, B * H, 0, 1, 0, T, p_BHGT.flatten(0, 1).unsqueeze(2), seen)
    tau = score.temperature(call.now.first_step + t - call.now.prompt + 1, call.cache.new_tokens)
    sums = call.sums(rows, newest_B11[:, 0], tau)
    call.add({name: total.view(B, H, T) for name, total in sums.items()})


def _visible_count(call: Call, keys: Keys, newest_B11: Tensor) -> Tensor:
    """Keys that the new token attends to, [N,1]."""
    visible = keys.positions_BHT >= 0
    if call.geometry.sliding is not None:
        visible = visible & (newest_B11 - keys.positions_BHT < call.geometry.sliding)
    return visible.sum(-1).reshape(-1, 1)


def _evict(call: Call, newest_B11: Tensor, t: int) -> None:
    """Name the slot of each head that the next token goes to."""
    slots = call.slots
    if slots.filling and not slots.holes:
        slots.filling -= 1
        return
    moment = call.moment(newest_B11, t)
    positions = moment.positions_BHS
    empty = positions < 0 if slots.holes else None
    lowest = victim(call.policy.order(moment, None), empty)
    if not slots.holes:
        slots.free(lowest)
        return
    # rows with room left evict nothing; any empty slot is as good as another
    assert slots.keep_BH1 is not None
    over = (positions >= 0).sum(-1) > slots.keep_BH1[..., 0]
    at = lowest[..., None]
    slots.positions.scatter_(2, at, torch.where(over[..., None], -1, slots.positions.gather(2, at)))
    slots.free_BH = slots.positions.argmin(-1)
    slots.filling = max(slots.filling - 1, 0)
