"""A prompt (or a piece of one): attended as a whole, observed, and at its end cut down to the budget."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from .backends import torch_backend as backend
from .backends.torch_backend import Keys, Rows
from .call import Call
from .ending import end_prompt, limit, newest
from .policies.moment import accumulator


def attend(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Output [B,H,G,Q,D] of the pass's prompt columns."""
    slots, now = call.slots, call.now
    rows_BQ = call.positions_BQ[:, : now.prompt]
    slots.make_dense()
    past = slots.used
    if slots.free_BH is not None:  # a new prompt is appended; its end makes slots again
        slots.free_BH, slots.holes = None, True
    with torch.no_grad():
        entry = call.entry(k_BHQD, v_BHQD, rows_BQ, now.protect_BQ)
        whole = past == 0 and now.ends_prompt and now.final
        (slots.adopt if whole else slots.append)(k_BHQD, v_BHQD, rows_BQ, entry)
    slots.holes |= now.padded
    slots.seen += now.prompt
    slots.sliding = call.geometry.sliding
    keys = call.keys(past)
    if torch.is_grad_enabled() and k_BHQD.requires_grad:  # the cache's own copies are detached
        old = slots.graph or (keys.k_BHTD[:, :, :past], keys.v_BHTD[:, :, :past])
        slots.graph = (torch.cat([old[0], k_BHQD], 2), torch.cat([old[1], v_BHQD], 2))
        keys.k_BHTD, keys.v_BHTD = slots.graph
    q_BHGQD, keys = call.renumber(q_BHGQD, keys, rows_BQ)
    if now.ends_prompt and call.score is not None and not now.keeps_all:
        limit(call)
    if call.score is None or call.policy.rows != "all":
        out = backend.prompt(q_BHGQD, keys, rows_BQ, call.geometry)
    else:
        out = _observed_prompt(call, q_BHGQD, keys, rows_BQ)
    with torch.no_grad():
        if call.score is not None and call.score.tail:
            _observe_tail(call, q_BHGQD, keys, rows_BQ)
        if now.ends_prompt:
            end_prompt(call, past)
    return out


def _observed_prompt(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> Tensor:
    """Attention, and the statistics of all its rows added to the state."""
    assert call.score is not None
    B, H, G, _, _ = q_BHGQD.shape
    T, dtype = keys.k_BHTD.shape[2], accumulator(q_BHGQD.dtype)
    sums = {name: torch.zeros(B * H, T, dtype=dtype, device=q_BHGQD.device) for name in call.policy.statistics}
    tau = call.score.temperature(0, call.cache.new_tokens)

    def observe(rows: Rows) -> None:
        for name, increment in call.sums(rows, rows_BQ, tau).items():
            sums[name][rows.n0 : rows.n1, rows.lo : rows.hi] += increment

    fused = not call.now.repeatable
    out = backend.prompt(q_BHGQD, keys, rows_BQ, call.geometry, observe, count="count" in sums, fused=fused)
    with torch.no_grad():
        call.add({name: total.view(B, H, T) for name, total in sums.items()})
    return out


def _observe_tail(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> None:
    """The prompt's last rows: kept until the prompt ends, then their mean attention becomes the state "tail"."""
    assert call.score is not None
    slots, rows_BW = call.slots, rows_BQ
    if slots.tail_rows is not None:
        q_BHGQD = torch.cat([slots.tail_rows[0], q_BHGQD], 3)
        rows_BW = torch.cat([slots.tail_rows[1], rows_BQ], 1)
    width = min(call.score.tail, rows_BW.shape[1])
    # the newest rows of each text, wherever its padding lies
    index_BW = rows_BW.topk(width, dim=1).indices.sort(1).values
    rows_BW = rows_BW.gather(1, index_BW)
    b = torch.arange(len(rows_BW), device=rows_BW.device)[:, None]
    q_BHGWD = rearrange(q_BHGQD.detach(), "b h g q d -> b q h g d")[b, index_BW]
    q_BHGWD = rearrange(q_BHGWD, "b w h g d -> b h g w d")
    if not call.now.ends_prompt:
        slots.tail_rows = (q_BHGWD, rows_BW)
        return
    slots.tail_rows = None
    assert slots.limits is not None
    p_BHGWT = backend.tail(q_BHGWD, keys, rows_BW, call.geometry)
    tail = slots.limits.tail
    counts = (rows_BW > newest(call)[:, 0] - tail[:, 0])[:, None, None, :, None]
    slots.statistic("tail")[:, :, : slots.used] = (p_BHGWT * counts).sum(3).mean(2) / tail.clamp(min=1)
