"""Prefill: a prompt, or a piece of one, is attended at once and observed; at its end it is compressed to the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..backends import torch_backend
from ..backends.dispatch import backend
from ..backends.protocol import Attended, Keys, Noise
from ..backends.torch_backend import Observer, ProbabilityRows
from ..policies import own_code, sampling
from ..policies.context import accumulator
from ..policies.needs import PromptRead
from ..policies.needs.base import Fold
from ..policies.needs.window_attention import pick_rows
from .compress import end_prompt, find_newest, set_limits
from .edit import Hidden, end_edit
from .layer_call import Call


def read_prompt(call: Call, q_BHGQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor) -> Tensor:
    """Read the pass's prompt columns into the layer, and return their output [B,H,G,Q,D].

    `_attend_columns` calls it, and `read_in_blocks` once per block. Keys and values are written, the queries attend to all that
    the layer then holds, the policy's needs (what it gathers in the layer) read the pass, and if the prompt (or block) ends
    here the layer is compressed to its budget. `lender`: the store of all tokens under lossless=True. `shares_keys`: later
    layers attend to these keys, too. plain_BHGQD: queries without positions, if attention numbers the kept tokens anew
    (positions="renumbered"). `readers`: needs that read prompts. now.edit: the pass reads tokens into the middle of a text.
    rows_BQ: positions of the queries. `meter`: bytes of keys and values.
    """
    slots, now = call.slots, call.now
    positions_BQ, rows_BQ = call.positions_BQ[:, : now.prompt_columns], call.rows_BQ[:, : now.prompt_columns]
    slots.begin_prompt()  # tokens are appended from now on
    # write the columns
    if now.lender is not None:
        _borrow(call, k_BHQD, v_BHQD)
    past, nbytes_before = slots.columns_used, slots.kv.nbytes  # a prompt is appended; its end moves kept tokens to new slots
    _write_columns(call, k_BHQD, v_BHQD, positions_BQ)
    after_edit = None if now.edit is None else Hidden(slots, now.edit)  # its queries must not see what follows
    keys, nbytes_held = call.keys(past), slots.kv.nbytes
    if torch.is_grad_enabled() and k_BHQD.requires_grad:  # the cache's copies are detached: attend to those with a graph
        old_k, old_v = slots.graph or (keys.k_BHTD[:, :, :past], keys.v_BHTD[:, :, :past])
        slots.graph = (torch.cat([old_k, k_BHQD], 2), torch.cat([old_v, v_BHQD], 2))
        keys.k_BHTD, keys.v_BHTD = slots.graph
    plain_BHGQD = q_BHGQD
    q_BHGQD, keys = call.renumber(q_BHGQD, keys, rows_BQ)
    if call.shares_keys:
        call.share_keys(keys, copied=call.positions_BQ.shape[1] > now.prompt_columns)
    # attend, and add to the sums that scores need
    protected_B = set_limits(call) if now.ends_prompt and call.evicts and not (after_edit or now.keeps_all) else []
    sums_all_rows = call.evicts and call.policy.needs.rows == "all"
    attended = (_attend_and_sum if sums_all_rows else attend_to)(call, q_BHGQD, keys, rows_BQ)
    # let needs read the pass, then evict
    with torch.no_grad():
        if call.readers:
            at_once = torch_backend.DEVICE_BLOCK if q_BHGQD.is_cuda else 0  # numbers that a need may compute at a time
            read = PromptRead(
                call, q_BHGQD, plain_BHGQD, k_BHQD, v_BHQD, positions_BQ, rows_BQ, attended.lse, past, now.ends_prompt,
                functools.partial(find_newest, call), call.policy.scope.sinks, at_once,
                functools.partial(_score_by_window, call, keys), call.once,
            )  # fmt: skip
            for _, run in call.readers:
                run(read)
        call.cache.meter.count(nbytes_before, nbytes_held, nbytes_held)  # for the report's peak of memory
        if after_edit is not None:
            after_edit.show()
            end_edit(call, past, q_BHGQD.shape[3])
        elif now.ends_prompt:
            end_prompt(call, past, protected_B)
    return attended.out


def _write_columns(call: Call, k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor) -> None:
    """Write a prompt's columns into the layer before they attend, and set the layer's fields that describe its columns.

    `read_prompt` calls it. `in_text_order`: columns hold tokens in the text's order. `precomputed_state`: of coming tokens,
    computed ahead. `adopt` takes the tensors themselves as storage, `append` copies them. `gapped`: padding follows a token.
    """
    slots, now, past = call.slots, call.now, call.slots.columns_used
    with torch.no_grad():
        entry = call.entry(k_BHQD, v_BHQD, positions_BQ)
        is_whole_prompt = past == 0 and now.ends_prompt and now.final  # it is compressed at once, so it needs no copy
        (slots.adopt if is_whole_prompt else slots.append)(k_BHQD, v_BHQD, positions_BQ, entry)
    if now.padding is not None:  # padding leaves empty slots; columns up to the last of them (`reach`) cannot be cropped
        slots.may_have_empty = True
        slots.in_text_order &= not past and not now.padding.gapped
        slots.first_croppable = max(slots.first_croppable, past + now.padding.reach)
    slots.columns_read += 0 if now.edit is not None else now.prompt_columns
    slots.precomputed_state = None  # it counts columns, some of which may be padding
    slots.sliding = call.geometry.sliding


def _borrow(call: Call, k_BHQD: Tensor, v_BHQD: Tensor) -> None:
    """Give new entries to the lender, the store of all tokens (lossless=True), and append those of earlier tokens from there.

    `read_prompt` calls it before a prompt's columns are written; `end_prompt` evicts earlier tokens again, down to the budget.
    """
    assert call.now.lender is not None
    earlier = call.now.lender.exchange(call.layer, k_BHQD, v_BHQD)
    if earlier is not None:
        with torch.no_grad():
            call.slots.append(*earlier, call.entry(*earlier))
        if call.slots.columns_used < call.slots.columns_read:  # the store lacks tokens that forget() removed
            call.slots.in_text_order, call.slots.first_croppable = False, call.slots.columns_used


def attend_to(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, noise: Noise | None = None) -> Attended:
    """Return the attention of a prompt's queries over `keys`, by the chosen backend, or by torch if that cannot do it.

    `read_prompt` and `reread_chunk` call it. Nothing but `cache.backend_choice` changes. noise: if given, Triton also returns
    the log-sum-exp of the logits with it, for Keyformer's scores. `padding.attends`: padding after a row's tokens attends to
    them, as in the unpatched model. find_misfit: why flash cannot serve these keys, or None.
    """
    choice, case, padding = call.cache.backend_choice, call.case("prompt", q_BHGQD, keys), call.now.padding
    name = choice.of("prompt", case)
    if name != "torch" and padding is not None and padding.attends:
        # the kernels skip such padding, but in transformers it takes up positions, and its queries attend
        choice.record("prompt", "torch", f"{name}: padding after tokens")
        name = "torch"
    if name == "flash":
        from ..backends.flash import flash_backend

        real_B, why = None if padding is None else padding.real_B, flash_backend.find_misfit(keys, call.geometry)
        if why is None:
            try:
                out, lse, kernel = flash_backend.attend(q_BHGQD, keys, rows_BQ, call.geometry, real_B)
                choice.record("prompt", "flash", kernel)
                return Attended(out, lse)
            except flash_backend.Refused as error:  # logged already
                why = str(error)
        name = choice.instead("prompt", case, name, why)
    if name == "triton":
        spans = _find_spans(call, name, rows_BQ)
        run = functools.partial(backend(name).attend, q_BHGQD, keys, rows_BQ, call.geometry, noise, spans)
        attended = choice.attempt("prompt", case, run, name=name)
        if attended is not None:  # else the kernel could not be launched
            return attended
    return Attended(*torch_backend.attend(q_BHGQD, keys, rows_BQ, call.geometry))


def _attend_and_sum(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> Attended:
    """Attend as `attend_to` does, and add the attention that each key gets to the layer's sums, from which scores follow.

    `read_prompt` calls it for policies that score by the attention of all of a prompt's queries. The sums come from a kernel
    after attention, from torch block by block (`observe`), or from torch with the output in the same blocks (`fuses`, on a
    CPU). Prompts of more than READ tokens are sampled if the policy says so. "gumbel": the sum of Keyformer's softmax with
    noise. "count": the sum that also needs how many keys each query sees.
    """
    sampled = any(attention_sum.sampled for attention_sum in call.policy.needs.sums)
    if sampled and rows_BQ.shape[1] > sampling.READ and call.geometry.sliding is None:
        return _attend_and_sample(call, q_BHGQD, keys, rows_BQ)
    names = call.policy.needs.statistics
    choice, case = call.cache.backend_choice, call.case("statistics", q_BHGQD, keys, scores=True)
    name, attended = choice.of("statistics", case), None
    if name != "torch":
        noise = _find_noise(call, keys) if "gumbel" in names else None
        attended = attend_to(call, q_BHGQD, keys, rows_BQ, noise)
        with torch.no_grad():
            spans = _find_spans(call, name, rows_BQ)
            gather = functools.partial(
                backend(name).statistics, q_BHGQD, keys, rows_BQ, call.geometry, attended, names, noise, spans
            )
            kernel_sums = choice.attempt("statistics", case, gather)
            if kernel_sums is not None:
                call.add(kernel_sums)
                return attended
    # no kernel: torch
    sums, observe = _make_observer(call, keys, rows_BQ)
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


def _find_spans(call: Call, name: str, rows_BQ: Tensor) -> Tensor:
    """Return where each text's rows without padding lie, as a backend's kernels take it; the first layer makes it for all."""
    return call.once(f"spans of {rows_BQ.shape[1]} rows", functools.partial(backend(name).spans, rows_BQ))


def _find_noise(call: Call, keys: Keys) -> Noise:
    """Return Keyformer's noise of all keys, for a prompt's sum "gumbel" in `_attend_and_sum`.

    "noise": the state that the policy stores with each key, exp(noise) for each query head; if it stores none, exp(0).
    """
    weights_BHTG = call.slots.state_view().get("noise")
    if weights_BHTG is None:
        weights_BHTG = torch.ones(*keys.positions_BHT.shape, call.group, device=keys.positions_BHT.device)
    return Noise(weights_BHTG, _find_temperature(call))


def _find_temperature(call: Call) -> float:
    """Return the temperature of the softmax with noise (Keyformer's) while a prompt is read: that of decode step 0.

    `_find_noise` and `_make_observer` ask. new_tokens: how many generate() will decode, over which it rises; None: unknown.
    """
    tau = call.policy.needs.temperature(0, call.cache.plans.new_tokens)
    assert isinstance(tau, int | float)
    return tau


def _make_observer(call: Call, keys: Keys, rows_BQ: Tensor) -> tuple[dict[str, Tensor], Observer]:
    """Return zeros for the policy's sums [B,H,T] by name, and a function that adds a block of probabilities to them.

    `_attend_and_sum` and `_sum_rows` give the function to `torch_backend.observe`, and then read the sums. torch computes a
    prompt's probabilities block by block: some of the B*H heads, some queries, some keys.
    """
    tau, dtype = _find_temperature(call), accumulator(keys.k_BHTD.dtype)
    shape, names = keys.k_BHTD.shape[:3], call.policy.needs.statistics
    sums = {name: torch.zeros(shape, dtype=dtype, device=rows_BQ.device) for name in names}

    def observe(rows: ProbabilityRows) -> None:
        for name, increment in call.sums(rows, rows_BQ, tau).items():
            sums[name].flatten(0, 1)[rows.first_head : rows.stop_head, rows.first_column : rows.stop_column] += increment

    return sums, observe


def _attend_and_sample(call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor) -> Attended:
    """Attend as `attend_to` does, and add the policy's sums, estimated from a sample of the rows, to the layer's state.

    `_attend_and_sum` calls it for long prompts in layers without a sliding window; a window bounds the cost of all rows anyway.
    The newest ROWS rows are all read, earlier ones (R of them) are sampled.
    """
    attended = attend_to(call, q_BHGQD, keys, rows_BQ)
    call.cache.backend_choice.record("statistics", "torch", "kernels read all rows of a prompt, scores='sampled' some")
    with torch.no_grad():
        # weight_B11: how many rows each sampled row before the newest ones stands for
        column_BR, weight_B11 = sampling.sample_rows(rows_BQ, call.settings.seed, call.layer)
        older, newest = (
            _sum_rows(call, q_BHGQD, keys, rows_BQ, attended.lse, part) for part in column_BR.tensor_split([-sampling.ROWS], 1)
        )
        call.add({name: newest[name] + total * weight_B11 for name, total in older.items()})
    return attended


def _sum_rows(
    call: Call, q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, lse_BHGQ: Tensor | None, column_BR: Tensor
) -> dict[str, Tensor]:
    """Return the policy's sums [B,H,T] by name over a sample of a prompt's rows, those at `column_BR`; -1 stands for none.

    `_attend_and_sample` calls it for older and for newest rows. Changes nothing. pick_rows: queries and log-sum-exp of R rows.
    """
    index_BR = column_BR.clamp(min=0)
    read_BR = rows_BQ.gather(1, index_BR).masked_fill(column_BR < 0, -1)
    q, lse_BHGR = pick_rows(q_BHGQD, lse_BHGQ, index_BR)
    sums, observe = _make_observer(call, keys, read_BR)
    ends = (column_BR.amax(0) + keys.columns_before + 1).tolist()  # of each sampled row: key columns up to itself
    torch_backend.observe(q, keys, read_BR, call.geometry, lse_BHGR, observe, "count" in sums, ends=ends)
    return sums


def _score_by_window(
    call: Call,
    keys: Keys,
    q_BHGWD: Tensor,
    rows_BW: Tensor,
    lse_BHGW: Tensor | None = None,
    fold: Fold | None = None,
    join: str = "sum",
    last: bool = False,
) -> Tensor:
    """Return each used slot's score [B,H,T]: the attention that an observation window's rows pay it, summed or folded.

    `WindowAttention.read` calls it as `PromptRead.attention`, for the last W rows of a prompt. fold: a function of each block
    of rows that takes the place of their sum; join: "sum" or "max", by which its results for the blocks are joined. last: the
    rows are the pass's last, in their order, which makes a mask cheaper. `limits.observed`: size of the window at the end of
    the prompt, whose tokens get no score by a fold. Changes nothing but `cache.backend_choice`.
    """
    own_code.check_rows(q_BHGWD, rows_BW)
    choice, arguments = call.cache.backend_choice, (q_BHGWD, keys, rows_BW, call.geometry, lse_BHGW)
    if fold is not None:
        choice.record("statistics", "torch", "kernels sum an observation window's rows, this score folds them")
        candidate = keys.positions_BHT >= 0
        if call.now.ends_prompt:  # else the window's size is not set yet
            candidate &= keys.positions_BHT <= find_newest(call) - call.limits.observed
        return torch_backend.window_folds(*arguments, candidate, fold, _JOINS[join], last)
    case = call.case("statistics", q_BHGWD, keys, scores=bool(call.policy.needs.sums))  # one backend for both
    name, total = choice.of("statistics", case), None
    if name != "torch":
        sums, make = backend(name).window_sums, functools.partial(backend(name).spans, rows_BW)
        # layers that pass the same tensor of rows share its spans
        spans = call.once(f"spans of the rows {id(rows_BW)}", make) if call.now.shares(rows_BW) else None
        total = choice.attempt("statistics", case, functools.partial(sums, *arguments, spans))
    return torch_backend.window_sums(*arguments, last) if total is None else total


_JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.maximum, "sum": torch.add}
