"""Compression at the end of a prompt or block: protected sizes, each head's kept tokens, and buffers for what follows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..cache.growth import Layout, plan, slack
from ..policies.parallel import WHOLE
from ..policies.selection import top
from . import anomaly
from .layer_call import Call


def end_prompt(call: Call, past: int) -> None:
    """Keep each head's budget, in buffers with room for the tokens that follow."""
    slots, cache, now = call.slots, call.cache, call.now
    if not call.evicts:
        if now.final:
            slots.allocate(None, None, Layout([slots.used + _more(call, slots.used)]))
            if cache.request.room is not None:
                slots.holes = True
                slots.start_growing(slots.positions.new_full(slots.positions.shape[:2], slots.used))
            else:
                slots.start_appending()
        else:
            slots.round()
        return
    B, H, _ = slots.positions.shape
    budget_B = _budgets(call)
    if past or slots.holes:
        held_BH = (slots.positions[:, :, : slots.used] >= 0).sum(-1)
    else:
        held_BH = torch.tensor(now.n_B, device=slots.positions.device)[:, None].expand(B, H)
    fixed_BH = _fixed(call, held_BH)
    everyone = WHOLE
    if call.policy.over_heads is not None:  # heads share their layer's budget, also with heads on other processes
        everyone = cache.settings.parallel
        held_BH, fixed_BH = everyone.heads(held_BH), everyone.heads(fixed_BH)
        H = held_BH.shape[1]
    keep_BH = fixed_BH + torch.tensor(budget_B, device=held_BH.device)[:, None]
    over_B = held_BH.sum(-1) > keep_BH.sum(-1)  # heads that do not share hold equally many
    over_B &= not now.keeps_all
    count_BH, order = held_BH if call.policy.over_heads else torch.minimum(held_BH, keep_BH), None
    if now.keeps_all:
        count_BH, order = held_BH, slots.positions[:, :, : slots.used]
    elif bool(over_B.any()):
        empty = slots.positions[:, :, : slots.used] < 0
        context = call.eviction_context(newest(call), -1)
        context.watch = functools.partial(anomaly.check_value if call.settings.strict else _watch, call)
        if call.policy.over_heads is not None:
            assert slots.limits is not None
            context.keep_BH1 = None  # heads share by score alone
            shared_BH = call.policy.over_heads.counts(
                call.policy.eviction_keys(context, empty),
                empty,
                fixed_BH,
                budget_B,
                slots.limits.nominal.flatten().tolist(),
                everyone,
            )
            count_BH = torch.where(over_B[:, None], shared_BH, held_BH)
        context.keep_BH1 = everyone.own(count_BH)[..., None]
        order = call.policy.eviction_keys(context, empty)
        _note_mass(call, order, everyone.own(count_BH))
    elif slots.holes:
        order = slots.positions[:, :, : slots.used]
    if call.policy.over_heads is not None:  # while decoding, each head keeps what it has; only the rest is divided
        extra_B1 = (keep_BH - count_BH).sum(-1, keepdim=True).clamp(min=0)
        keep_BH = count_BH + extra_B1 // H + (torch.arange(H, device=held_BH.device) < extra_B1 % H)
    _compress(call, order, everyone.own(count_BH), everyone.own(keep_BH), everyone.size > 1 and not _alike(count_BH, keep_BH))


def _alike(count_BH: Tensor, keep_BH: Tensor) -> bool:
    """Tell if all heads keep equally many tokens, and may hold equally many more."""
    return bool((count_BH == count_BH[:1, :1]).all()) and bool((keep_BH == keep_BH[:1, :1]).all())


def _compress(call: Call, order: Tensor | None, count_BH: Tensor, keep_BH: Tensor, uneven: bool) -> None:
    """Move the kept tokens into buffers for what follows.

    count: tokens that each head keeps, the first ones of `order`; None: all. uneven: heads may hold different numbers,
    perhaps only because of heads on other processes. This process then runs the eviction at every step as they do, because
    a score may need all processes to take part.
    """
    slots, now = call.slots, call.now
    counts, keeps = count_BH.flatten().tolist(), keep_BH.flatten().tolist()
    room = [k - n for k, n in zip(keeps, counts, strict=True)]
    evicts = now.final and call.policy.schedule != "prompt"
    unequal = evicts and (uneven or min(room) != max(room))  # some heads evict while others are below budget
    if order is None and unequal:
        order = slots.positions[:, :, : slots.used]
    index, kept = (None, None) if order is None else top(order, count_BH, counts)
    if kept is None and unequal and index is not None:
        kept = torch.ones_like(index, dtype=torch.bool)
    slots.holes, held = kept is not None, max(counts)
    if not now.final:  # the next block is appended
        slots.allocate(index, kept, Layout([held + now.reserve]))
        return
    slots.keep_BH1 = keep_BH[..., None]
    filling = max(*room, 0)
    roomy = call.cache.request.room is not None
    if not evicts:
        slots.state.pop("observed", None)
    goals = [k + 1 for k in keeps] if evicts else None
    slots.allocate(index, kept, plan(counts, goals, lambda tokens: _more(call, tokens), exactly=roomy))
    if evicts and (slots.holes or not filling or roomy):
        slots.holes |= filling > 0
        slots.start_evicting(filling)
    elif evicts:
        slots.start_filling(filling)
    elif kept is not None and not slots.kv.appends:
        slots.start_growing(kept.sum(-1))
    elif roomy:
        slots.holes = True
        slots.start_growing(slots.positions.new_full(count_BH.shape, held))
    else:
        slots.start_appending()


def _more(call: Call, tokens: int) -> int:
    """Return how many coming tokens a head gets room for: all if steps are to be compiled, else the usual slack."""
    room, coming = call.cache.request.room, call.cache.request.new_tokens
    if room is not None:
        return room
    return slack(tokens) if coming is None else min(slack(tokens), coming)


def _fixed(call: Call, held_BH: Tensor) -> Tensor:
    """Count each head's tokens that are kept outside the budget."""
    if call.policy.schedule == "decode":
        return torch.tensor(call.now.n_B, device=held_BH.device)[:, None].expand_as(held_BH)
    if call.now.fixed_B is None:
        return torch.zeros_like(held_BH)
    positions = call.slots.positions[:, :, : call.slots.used]
    before_B = torch.tensor(call.now.fixed_B, device=held_BH.device)
    return ((positions >= 0) & (positions < before_B[:, None, None])).sum(-1)


def _note_mass(call: Call, order: Tensor, count_BH: Tensor) -> None:
    """Note the share of the observed attention that the kept tokens received."""
    slots = call.slots
    name = "sum" if "sum" in slots.state else "observed"
    if name not in slots.state:
        return
    seen = slots.state[name][:, :, : slots.used].masked_fill(slots.positions[:, :, : slots.used] < 0, 0.0)
    index = order.argsort(-1, descending=True)
    kept = torch.arange(order.shape[-1], device=order.device) < count_BH[..., None]
    total = seen.sum(-1)
    if name == "sum":  # each row gave a total of one; tokens evicted by earlier blocks took their share along
        total = torch.full_like(total, call.group) * (newest(call)[..., 0] + 1)
    slots.mass_BH = (seen.gather(-1, index) * kept).sum(-1) / total.clamp_min(torch.finfo(seen.dtype).tiny)


def limit(call: Call) -> None:
    """Set the protected sizes of each row, clamped to its budget."""
    cache, slots, now = call.cache, call.slots, call.now
    B, device = len(now.n_B), slots.positions.device
    own: list[list[int]] = [[] for _ in range(B)]
    if "protect" in slots.state:
        marked = slots.positions[:, 0, : slots.used].masked_fill(~slots.state["protect"][:, 0, : slots.used], -1)
        own = [sorted(p for p in row if p >= 0) for row in marked.tolist()]
    fixed_B = now.n_B if call.policy.schedule == "decode" else now.fixed_B or [0] * B
    sizes = tuple(
        call.policy.scope.limits(b, n, mine, call.score, fixed, rows)
        for b, n, mine, fixed, rows in zip(_budgets(call), now.n_B, own, fixed_B, now.rows_B, strict=True)
    )
    slots.limits = cache.limits(sizes, device)
    _say_cuts(call)


def _say_cuts(call: Call) -> None:
    """Warn of sizes that were cut to fit the smallest budget of a row that evicts."""
    settings, stays = call.settings, call.policy.schedule == "prompt"
    rows = [(b, n) for b, n in zip(_budgets(call), call.now.budget_n_B, strict=True) if n > b or not stays]
    if not rows:
        return
    budget, n = min(rows)
    for name, size, fits, needs in call.policy.scope.misfits(budget, call.score):
        give = f"Give {name}={fits} or less, or k={needs} or more." if fits else f"Give k={needs} or more."
        settings.notices.say(
            name,
            f"{name}={size} is cut to {fits}: the budget is {budget} tokens per head "
            f"(k={settings.budget.per_layer[call.layer]}, a prompt of {n}). {give}",
        )


def _watch(call: Call, value_BHT: Tensor) -> None:
    """Warn of scores that are NaN. Called at a prompt's end alone, where the host waits for the device anyway."""
    notices = call.settings.notices
    if "nan" in notices.said:
        return
    if bool((value_BHT.isnan() & (call.slots.positions[:, :, : call.slots.used] >= 0)).any()):
        notices.say(
            "nan",
            f"policy {call.policy.name!r} gave NaN scores in layer {call.layer}, which count as the lowest: what is kept there "
            "is decided by protection and position. patched(..., strict=True) raises where the first NaN arises.",
        )


def _budgets(call: Call) -> list[int]:
    """Return the tokens that each row may hold beside those kept outside the budget."""
    return [call.settings.tokens(call.layer, n) for n in call.now.budget_n_B]


def newest(call: Call) -> Tensor:
    """Return the position of each row's newest token, [B,1,1]."""
    return torch.tensor(call.now.n_B, device=call.slots.positions.device)[:, None, None] - 1
