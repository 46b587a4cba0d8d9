"""Prefill: a prompt, or a piece of one, is attended at once and observed; at its end it is compressed to the budget."""

from __future__ import annotations

import functools

import torch
from einops import rearrange
from torch import Tensor

from ..backends import backend, torch_backend
from ..backends.protocol import Attended, Keys, Noise
from ..backends.torch_backend import Rows
from ..cache.modes import Reading
from ..policies.context import accumulator
from .compress import end_prompt, limit, newest
from .layer_call import Call


def attend(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Return the output [B,H,G,Q,D] of the pass's prompt columns."""
    slots, now = call.slots, call.now
    positions_BQ, rows_BQ = call.positions_BQ[:, : now.prompt], call.rows_BQ[:, : now.prompt]
    slots.begin_prompt()
    past, before = slots.used, slots.kv.nbytes  # a new prompt is appended; compression makes slots again
    with torch.no_grad():
        entry = call.entry(k_BHQD, v_BHQD, positions_BQ, now.protect_BQ)
        whole = past == 0 and now.ends_prompt and now.final
        (slots.adopt if whole else slots.append)(k_BHQD, v_BHQD, positions_BQ, entry)
    if now.padding is not None:
        slots.holes = True
        slots.contiguous &= not past and not now.padding.gapped
        slots.floor = max(slots.floor, past + now.padding.reach)
    slots.seen += now.prompt
    slots.ahead = None  # it counts columns, some of which may be padding
    slots.sliding = call.geometry.sliding
    keys, during = call.keys(past), slots.kv.nbytes
    if torch.is_grad_enabled() and k_BHQD.requires_grad:  # the cache's own copies are detached
        old = slots.graph or (keys.k_BHTD[:, :, :past], keys.v_BHTD[:, :, :past])
        slots.graph = (torch.cat([old[0], k_BHQD], 2), torch.cat([old[1], v_BHQD], 2))
        keys.k_BHTD, keys.v_BHTD = slots.graph
    q_BHGQD, keys = call.renumber(q_BHGQD, keys, rows_BQ)
    nominal_B = limit(call) if now.ends_prompt and call.evicts and not now.keeps_all else []
    if not call.evicts or call.policy.rows != "all":
        found = _attend(call, q_BHGQD, keys, rows_BQ)
    else:
        found = _observed_prompt(call, q_BHGQD, keys, rows_BQ)
    with torch.no_grad():
        if call.evicts and call.score.observed_rows:
            _observe_window(call, q_BHGQD, keys, rows_BQ, found.lse)
        if now.ends_prompt:
            end_prompt(call, past, nominal_B)
    call.cache.meter.count(before, during, slots.kv.nbytes)
    return found.out


def _attend(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, noise: Noise | None = None) -> Attended:
    """Attend; noise: of logits whose log-sum-exp is returned too by a kernel that computes both at once."""
    choice, case, padding = call.cache.choice, call.case("prompt", q_BHGQD, keys), call.now.padding
    name = choice.of("prompt", case)
    if name != "torch" and padding is not None and padding.behind:
        # kernels leave out padding between tokens, but transformers' columns count it, and its queries attend
        choice.record("prompt", "torch", f"{name}: padding behind tokens")
        name = "torch"
    if name == "flash":
        from ..backends.flash import flash_backend

        real_B, why = None if padding is None else padding.real_B, flash_backend.misfit(keys, call.geometry)
        if why is None:
            try:
                out, lse, kernel = flash_backend.attend(q_BHGQD, keys, rows_BQ, call.geometry, real_B)
                choice.record("prompt", "flash", kernel)
                return Attended(out, lse)
            except flash_backend.Refused as error:  # logged already
                why = str(error)
        name = choice.instead("prompt", case, name, why)
    if name == "triton":
        run = functools.partial(backend(name).attend, q_BHGQD, keys, rows_BQ, call.geometry, noise)
        found = choice.attempt("prompt", case, run, name=name)
        if found is not None:
            return found
    return Attended(*torch_backend.attend(q_BHGQD, keys, rows_BQ, call.geometry))


def _observed_prompt(
    call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor
) -> Attended:
    """Run `_attend`, and add the statistics of all rows to the state."""
    B, H, G, _, _ = q_BHGQD.shape
    T, dtype, names = keys.k_BHTD.shape[2], accumulator(q_BHGQD.dtype), call.policy.statistics
    tau = call.score.temperature(0, call.cache.request.new_tokens)
    choice, case = call.cache.choice, call.case("statistics", q_BHGQD, keys, scores=True)
    name, attended = choice.of("statistics", case), None
    if name != "torch":
        noise = _noise(call, keys, tau) if "gumbel" in names else None
        attended = _attend(call, q_BHGQD, keys, rows_BQ, noise)
        with torch.no_grad():
            gather = functools.partial(
                backend(name).statistics, q_BHGQD, keys, rows_BQ, call.geometry, attended, names, noise
            )
            found = choice.attempt("statistics", case, gather)
            if found is not None:
                call.add(found)
                return attended
    sums = {name: torch.zeros(B * H, T, dtype=dtype, device=q_BHGQD.device) for name in names}

    def observe(rows: Rows) -> None:
        for name, increment in call.sums(rows, rows_BQ, tau).items():
            sums[name][rows.n0 : rows.n1, rows.lo : rows.hi] += increment

    # gradient checkpointing repeats the pass: it must compute alike with and without gradients
    fuses = attended is None and torch_backend.fuses(q_BHGQD) and not call.now.repeatable
    if fuses and call.backend("prompt", q_BHGQD, keys) == "torch":
        attended = Attended(torch.empty_like(q_BHGQD, memory_format=torch.contiguous_format))
        torch_backend.observe(q_BHGQD, keys, rows_BQ, call.geometry, None, observe, "count" in sums, attended.out)
    else:
        attended = attended or _attend(call, q_BHGQD, keys, rows_BQ)
        # with it, torch would add ALiBi block by block from another origin, and not cap
        same = call.geometry.slopes_HG is None and call.geometry.softcap is None
        torch_backend.observe(q_BHGQD, keys, rows_BQ, call.geometry, attended.lse if same else None, observe, "count" in sums)
    with torch.no_grad():
        call.add({name: total.view(B, H, T) for name, total in sums.items()})
    return attended


def _noise(call: Call, keys: Keys, tau: float | Tensor) -> Noise:
    """Return Keyformer's noise of all keys; ones, which are exp(0), if its distribution is "none"."""
    weights_BHTG = call.slots.state_view().get("noise")
    if weights_BHTG is None:
        weights_BHTG = torch.ones(*keys.positions_BHT.shape, call.group, device=keys.positions_BHT.device)
    return Noise(weights_BHTG, float(tau))


def _observe_window(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, lse: Tensor | None) -> None:
    """Keep the observation window's rows until the prompt ends; then write their mean attention to the state "observed"."""
    slots, rows_BW = call.slots, rows_BQ
    mode = slots.mode
    assert isinstance(mode, Reading)
    if mode.window_rows is not None:
        q_BHGQD = torch.cat([mode.window_rows[0], q_BHGQD], 3)
        rows_BW, lse = torch.cat([mode.window_rows[1], rows_BQ], 1), None  # the log-sum-exp of earlier rows was not kept
    width = min(call.score.observed_rows, rows_BW.shape[1])
    # the newest rows of each text, wherever its padding lies
    index_BW = rows_BW.topk(width, dim=1).indices.sort(1).values
    rows_BW = rows_BW.gather(1, index_BW)
    b = torch.arange(len(rows_BW), device=rows_BW.device)[:, None]
    q_BHGWD = rearrange(q_BHGQD.detach(), "b h g q d -> b q h g d")[b, index_BW]
    q_BHGWD = rearrange(q_BHGWD, "b w h g d -> b h g w d")
    if not call.now.ends_prompt:
        mode.window_rows = (q_BHGWD, rows_BW)
        return
    mode.window_rows = None
    assert slots.limits is not None
    observed = slots.limits.observed
    counted = rows_BW > newest(call)[:, 0] - observed[:, 0]
    case = call.case("statistics", q_BHGWD, keys, scores=bool(call.policy.statistics))  # beside sums: their backend
    if lse is not None:
        lse = lse[b, :, :, index_BW].permute(0, 2, 3, 1)
    arguments = q_BHGWD, keys, rows_BW.masked_fill(~counted, -1), call.geometry, lse
    name, total = call.cache.choice.of("statistics", case), None
    if name != "torch":
        total = call.cache.choice.attempt("statistics", case, functools.partial(backend(name).window_sums, *arguments))
    if total is None:
        total = torch_backend.window_sums(*arguments)
    slots.statistic("observed")[:, :, : slots.used] = total / observed.clamp(min=1)
