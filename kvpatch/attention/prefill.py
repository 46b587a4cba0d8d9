"""Prefill: a prompt, or a piece of one, is attended at once and observed; at its end it is compressed to the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from ..backends import backend, torch_backend
from ..backends.protocol import Attended, Keys, Noise
from ..backends.torch_backend import Observer, Rows
from ..cache.modes import Reading
from ..policies import sampling
from ..policies.context import accumulator
from ..policies.queries import Moments
from . import local
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
    if call.recalls:
        slots.recall(call.score.recent_queries, q_BHGQD.detach(), positions_BQ)
    q_BHGQD, keys = call.renumber(q_BHGQD, keys, rows_BQ)
    if call.shows:
        call.show(keys, copied=call.positions_BQ.shape[1] > now.prompt)
    nominal_B = limit(call) if now.ends_prompt and call.evicts and not now.keeps_all else []
    if not call.evicts or call.policy.rows != "all":
        found = attend_to(call, q_BHGQD, keys, rows_BQ)
    else:
        found = _observed_prompt(call, q_BHGQD, keys, rows_BQ)
    with torch.no_grad():
        if call.evicts and call.score.observed_rows:
            _observe_window(call, q_BHGQD, keys, rows_BQ, found.lse)
        if call.evicts and call.score.moments:
            _note_queries(call, q_BHGQD, positions_BQ)
        if call.evicts and call.score.local:
            local.note(call, q_BHGQD, k_BHQD, positions_BQ, past)
        call.cache.meter.count(before, during, during)
        if now.ends_prompt:
            end_prompt(call, past, nominal_B, q_BHGQD)
    return found.out


def attend_to(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, noise: Noise | None = None) -> Attended:
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


def _observed_prompt(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> Attended:
    """Run `attend_to`, and add the statistics of all rows, or of a sample of them, to the state."""
    if call.score.samples and rows_BQ.shape[1] > sampling.READ and call.geometry.sliding is None:
        return _sampled_prompt(call, q_BHGQD, keys, rows_BQ)
    names = call.policy.statistics
    choice, case = call.cache.choice, call.case("statistics", q_BHGQD, keys, scores=True)
    name, attended = choice.of("statistics", case), None
    if name != "torch":
        noise = _noise(call, keys) if "gumbel" in names else None
        attended = attend_to(call, q_BHGQD, keys, rows_BQ, noise)
        with torch.no_grad():
            spans = call.now.once("spans", q_BHGQD.device, functools.partial(backend(name).spans, rows_BQ))
            gather = functools.partial(
                backend(name).statistics, q_BHGQD, keys, rows_BQ, call.geometry, attended, names, noise, spans
            )
            found = choice.attempt("statistics", case, gather)
            if found is not None:
                call.add(found)
                return attended
    sums, observe = _observer(call, keys, rows_BQ)
    # gradient checkpointing repeats the pass: it must compute alike with and without gradients
    fuses = attended is None and torch_backend.fuses(q_BHGQD) and not call.now.repeatable
    if fuses and choice.of("prompt", call.case("prompt", q_BHGQD, keys)) == "torch":
        attended = Attended(q_BHGQD.new_empty(*q_BHGQD.shape[:4], keys.v_BHTD.shape[-1]))
        torch_backend.observe(q_BHGQD, keys, rows_BQ, call.geometry, None, observe, "count" in sums, attended.out)
    else:
        attended = attended or attend_to(call, q_BHGQD, keys, rows_BQ)
        torch_backend.observe(q_BHGQD, keys, rows_BQ, call.geometry, attended.lse, observe, "count" in sums)
    with torch.no_grad():
        call.add(sums)
    return attended


def _noise(call: Call, keys: Keys) -> Noise:
    """Return Keyformer's noise of all keys; ones, which are exp(0), if its distribution is "none"."""
    weights_BHTG = call.slots.state_view().get("noise")
    if weights_BHTG is None:
        weights_BHTG = torch.ones(*keys.positions_BHT.shape, call.group, device=keys.positions_BHT.device)
    return Noise(weights_BHTG, _temperature(call))


def _temperature(call: Call) -> float:
    tau = call.score.temperature(0, call.cache.request.new_tokens)
    assert isinstance(tau, int | float)
    return tau


def _observer(call: Call, keys: Keys, rows_BQ: Tensor) -> tuple[dict[str, Tensor], Observer]:
    """Return the policy's statistics [B,H,T], zero, and a function that adds those of a block of rows to them."""
    tau, dtype = _temperature(call), accumulator(keys.k_BHTD.dtype)
    sums = {name: torch.zeros(keys.k_BHTD.shape[:3], dtype=dtype, device=rows_BQ.device) for name in call.policy.statistics}

    def observe(rows: Rows) -> None:
        for name, increment in call.sums(rows, rows_BQ, tau).items():
            sums[name].flatten(0, 1)[rows.n0 : rows.n1, rows.lo : rows.hi] += increment

    return sums, observe


def _sampled_prompt(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> Attended:
    """Run `attend_to`, and add statistics estimated from a sample of the rows. A sliding window bounds their cost anyway."""
    attended = attend_to(call, q_BHGQD, keys, rows_BQ)
    call.cache.choice.record("statistics", "torch", "kernels read all rows of a prompt, scores='sampled' some")
    with torch.no_grad():
        column_BR, every_B11 = sampling.sample(rows_BQ, call.settings.seed, call.layer)
        older, newest = (
            _read(call, q_BHGQD, keys, rows_BQ, attended.lse, part) for part in column_BR.tensor_split([-sampling.ROWS], 1)
        )
        call.add({name: newest[name] + total * every_B11 for name, total in older.items()})
    return attended


def _read(
    call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, lse_BHGQ: Tensor | None, column_BR: Tensor
) -> dict[str, Tensor]:
    """Return the statistics [B,H,T] of the rows at these columns; -1 is none."""
    index_BR = column_BR.clamp(min=0)
    read_BR = rows_BQ.gather(1, index_BR).masked_fill(column_BR < 0, -1)
    q, lse_BHGR = _picked(q_BHGQD, lse_BHGQ, index_BR)
    sums, observe = _observer(call, keys, read_BR)
    ends = (column_BR.amax(0) + keys.past + 1).tolist()
    torch_backend.observe(q, keys, read_BR, call.geometry, lse_BHGR, observe, "count" in sums, ends=ends)
    return sums


def _picked(q_BHGQD: Tensor, lse_BHGQ: Tensor | None, index_BR: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the queries [B,H,G,R,D] at these columns of each text, and their log-sum-exp."""
    b = torch.arange(len(index_BR), device=index_BR.device)[:, None]
    q = rearrange(rearrange(q_BHGQD.detach(), "b h g q d -> b q h g d")[b, index_BR], "b r h g d -> b h g r d")
    return q, None if lse_BHGQ is None else rearrange(lse_BHGQ[b, :, :, index_BR], "b r h g -> b h g r")


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
    q_BHGWD, lse = _picked(q_BHGQD, lse, index_BW)
    if not call.now.ends_prompt:
        mode.window_rows = (q_BHGWD, rows_BW)
        return
    mode.window_rows = None
    observed = slots.own_limits.observed
    counted = rows_BW > newest(call)[:, 0] - observed[:, 0]
    case = call.case("statistics", q_BHGWD, keys, scores=bool(call.policy.statistics))  # beside sums: their backend
    arguments = q_BHGWD, keys, rows_BW.masked_fill(~counted, -1), call.geometry, lse
    if call.score.folds is not None:
        call.cache.choice.record("statistics", "torch", "kernels sum an observation window's rows, this score folds them")
        candidate = (keys.positions_BHT >= 0) & (keys.positions_BHT <= newest(call) - observed)
        found = torch_backend.window_folds(*arguments, candidate, call.score.fold, _JOINS[call.score.folds])
        slots.statistic("observed")[:, :, : slots.used] = found
        return
    name, total = call.cache.choice.of("statistics", case), None
    if name != "torch":
        total = call.cache.choice.attempt("statistics", case, functools.partial(backend(name).window_sums, *arguments))
    if total is None:
        total = torch_backend.window_sums(*arguments)
    slots.statistic("observed")[:, :, : slots.used] = total / observed.clamp(min=1)


_JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.maximum, "sum": torch.add}


def _note_queries(call: Call, q_BHGQD: Tensor, positions_BQ: Tensor) -> None:
    """Add the queries behind the sinks, without their rotation, to the moments of the prompt's queries."""
    mode = call.slots.mode
    assert isinstance(mode, Reading)
    pieces = zip(q_BHGQD.detach().split(_AT_ONCE, 3), positions_BQ.split(_AT_ONCE, 1), strict=True)
    for q, positions in pieces:
        counted = positions >= call.policy.scope.sinks  # padding is at -1
        plain = call.rotated_back(q.flatten(1, 2), positions[:, None]).view(q.shape)
        found = Moments.of(plain, counted, spread=call.score.moments > 1)
        mode.queries = found if mode.queries is None else mode.queries.joined(found)


_AT_ONCE = 2048  # queries that are held without rotation at a time
