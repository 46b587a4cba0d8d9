"""A prompt (or a piece of one): attended as a whole, observed, and at its end cut down to the budget."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from .backends import torch_backend as backend
from .backends.torch_backend import Keys, Rows
from .call import Call
from .policies.scores import Limits, accumulator
from .policies.selection import top


def attend(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Output [B,H,G,Q,D] of the pass's prompt columns."""
    slots, now = call.slots, call.now
    rows_BQ = call.positions_BQ[:, : now.prompt]
    past = slots.used
    if slots.free_BH is not None:  # a new prompt is appended; its end makes slots again
        slots.free_BH, slots.holes = None, True
    with torch.no_grad():
        entry = call.entry(k_BHQD, rows_BQ, now.protect_BQ)
        whole = past == 0 and now.ends_prompt
        (slots.adopt if whole else slots.append)(k_BHQD, v_BHQD, rows_BQ, entry)
    slots.holes |= now.padded
    slots.seen += now.prompt
    slots.sliding = call.geometry.sliding
    keys = call.keys(past)
    if torch.is_grad_enabled() and k_BHQD.requires_grad:  # the cache's own copies are detached
        keys.k_BHTD = torch.cat([keys.k_BHTD[:, :, :past], k_BHQD], 2)
        keys.v_BHTD = torch.cat([keys.v_BHTD[:, :, :past], v_BHQD], 2)
    if now.ends_prompt and call.score is not None:
        _limit(call)
    if call.score is None or call.policy.rows != "all":
        out = backend.prompt(q_BHGQD, keys, rows_BQ, call.geometry)
    else:
        out = _observed_prompt(call, q_BHGQD, keys, rows_BQ)
    with torch.no_grad():
        if call.score is not None and call.score.tail:
            _observe_tail(call, q_BHGQD, keys, rows_BQ)
        if now.ends_prompt:
            _end_prompt(call, past)
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

    out = backend.prompt(q_BHGQD, keys, rows_BQ, call.geometry, observe, count="count" in sums)
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
    counts = (rows_BW > _newest(call)[:, 0] - tail[:, 0])[:, None, None, :, None]
    slots.statistic("tail")[:, :, : slots.used] = (p_BHGWT * counts).sum(3).mean(2) / tail.clamp(min=1)


def _end_prompt(call: Call, past: int) -> None:
    """Keep each row's budget, in buffers of their final size."""
    slots, cache = call.slots, call.cache
    if call.score is None:
        slots.settle(None, None, slots.used + (cache.new_tokens or slots.used // 4 + 16))
        return
    budgets, held_B = _budgets(call), call.now.n_B
    if past:
        held_B = (slots.positions[:, 0, : slots.used] >= 0).sum(-1).tolist()
    room = [b - n for b, n in zip(budgets, held_B, strict=True)]
    slots.evicting = call.policy.schedule != "prompt"
    index = kept = None
    if slots.holes or min(room) < 0:
        empty = slots.positions[:, :, : slots.used] < 0
        order = call.policy.order(call.moment(_newest(call), -1), empty)
        index, kept = top(order, [min(b, n) for b, n in zip(budgets, held_B, strict=True)])
    slots.holes = kept is not None
    slots.filling = max(0, *room) if slots.evicting else 0
    held = min(max(budgets), max(held_B))
    if not slots.evicting:
        slots.settle(index, kept, held + (cache.new_tokens or held // 4 + 16))
        slots.state.pop("tail", None)
    elif slots.holes or not slots.filling:
        slots.settle(index, kept, max(budgets) + 1)
        slots.used = max(budgets) + 1
        slots.free_BH = slots.positions.argmin(-1)
    else:
        slots.settle(index, kept, min(max(budgets) + 1, held + held // 4 + 16))


def _limit(call: Call) -> None:
    """Protected sizes of each row, clamped inside its budget."""
    assert call.score is not None
    cache, slots, now = call.cache, call.slots, call.now
    B, device = len(now.n_B), slots.positions.device
    budgets = tuple(cache.budget.tokens(call.layer, n) for n in now.n_B)
    own: list[list[int]] = [[] for _ in range(B)]
    if "protect" in slots.state:
        marked = slots.positions[:, 0, : slots.used].masked_fill(~slots.state["protect"][:, 0, : slots.used], -1)
        own = [sorted(p for p in row if p >= 0) for row in marked.tolist()]
    keep_prompt = call.policy.schedule == "decode"
    sizes = tuple(
        call.policy.scope.limits(b, n, mine, call.score, keep_prompt)
        for b, n, mine in zip(budgets, now.n_B, own, strict=True)
    )
    if (sizes, device) not in cache.limits_of:  # layers of one budget and device share them
        cache.limits_of[sizes, device] = Limits.of(sizes, device)
    slots.limits = cache.limits_of[sizes, device]
    slots.budget_B11 = torch.tensor(_budgets(call), device=device)[:, None, None]


def _budgets(call: Call) -> list[int]:
    """Tokens that each row may hold: its budget, and its prompt where only generated tokens count."""
    keep = call.policy.schedule == "decode"
    return [call.cache.budget.tokens(call.layer, n) + (n if keep else 0) for n in call.now.n_B]


def _newest(call: Call) -> Tensor:
    """Position of the newest token of each row, [B,1,1]."""
    return torch.tensor(call.now.n_B, device=call.slots.positions.device)[:, None, None] - 1
