"""A decode step: one token per row is written to the free slot, attends and is observed; then one token is evicted."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..backends import torch_backend
from ..backends.dispatch import backend
from ..backends.protocol import Case, Task
from ..backends.torch_backend import UNCOUNTED, ProbabilityRows
from ..policies.needs import StepRead
from ..policies.selection import find_victims, mask_top
from ..policies.windows import keep_in_window
from . import anomaly
from .layer_call import Call
from .stacked import LayerStack


def run_step(call: Call, q_BHGD: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, t: int, stack: LayerStack | None = None) -> Tensor:
    """Run a decode step in one layer: write the token at column `t` of the pass, attend, observe and evict.

    To observe is to add the step's attention probabilities to the sums that scores read. Returns the output [B,H,G,D]. With a
    `stack` (layers joined for scoring and eviction), the first of its layers writes the new token's position for all layers,
    and the last one observes and evicts for all. Without a stack, this layer does so for itself. `entry`: numbers that the
    policy stores with the token. `by_kernels`: not None if kernels ran; they observe, too, and may evict.
    `shares_keys`: later layers attend to this layer's keys, too.
    """
    positions_B1 = call.positions_BQ if call.positions_BQ.shape[1] == 1 else call.positions_BQ[:, t : t + 1]
    newest_B11 = positions_B1[:, None]
    if k_BH1D.requires_grad or v_BH1D.requires_grad:  # gradients flow through the step's query alone
        k_BH1D, v_BH1D = k_BH1D.detach(), v_BH1D.detach()
    # begin: make room for the token, and find the backend
    if stack is not None:
        entry, name = stack.begin(call, k_BH1D, v_BH1D), stack.backend  # the first layer begins the step for all
    else:
        entry, name = _begin_step(call, k_BH1D, v_BH1D, positions_B1), choose_backend(call, q_BHGD)
    # write the token and attend, by Triton or by torch
    by_kernels = _run_kernels(call, q_BHGD, k_BH1D, v_BH1D, entry, positions_B1, t, stack) if name == "triton" else None
    if by_kernels is not None:
        (out, evicted_by_kernels), p_BHGT, positions_BHT = by_kernels, None, call.slots.positions
    else:
        if name == "triton":  # its kernels could not be launched
            name = choose_backend(call, q_BHGD)
            if stack is not None:
                stack.leave_kernels(name)
        call.slots.write(k_BH1D, v_BH1D, None if stack is not None else positions_B1, entry)
        out, p_BHGT, positions_BHT = _run_torch(call, q_BHGD, positions_B1, name, stack)
        evicted_by_kernels = False
    if call.shares_keys:
        overwrites, moves = call.positions_BQ.shape[1] > 1, call.evicting and call.policy.every > 1
        call.share_keys(call.keys(call.slots.columns_used), copied=overwrites or moves)  # before this layer evicts
    # end: score and evict
    if stack is None:
        new = q_BHGD, k_BH1D, v_BH1D
        _end_step(call, new, None if p_BHGT is None else p_BHGT.detach(), positions_BHT, newest_B11, t, evicted_by_kernels)
    elif call.layer == stack.L - 1:
        stack.close()
        _end_step(
            stack.call,
            _NOTHING,
            stack.p_BHGT,
            stack.slots.positions[:, :, : stack.slots.columns_used],
            stack.newest_B11,
            t,
            evicted_by_kernels,
        )
        stack.share_free()  # gives each layer its slots for the next token
    return out


_NOTHING = None, None, None  # queries, key and value of a stack


def _run_torch(
    call: Call, q_BHGD: Tensor, positions_B1: Tensor, name: str, stack: LayerStack | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attend in a decode step that Triton does not run, by torch or a flash kernel, once `run_step` has written the token.

    Returns the output, the probabilities if the policy needs them (else None), and the keys' positions. Writes nothing but the
    probabilities to the stack's `buffer`. ragged_step: attention over heads of unequal lengths; None if it is refused.
    """
    keys, out, p_BHGT = call.keys(call.slots.columns_used), None, None
    if call.settings.renumbered:
        q_BHG1D, keys = call.renumber(q_BHGD[:, :, :, None], keys, positions_B1)
        q_BHGD = q_BHG1D[:, :, :, 0]
    if name == "flash":
        out = backend(name).ragged_step(q_BHGD, keys, call.geometry)
    if out is None:
        observes = call.observes
        buffer = None if stack is None or not observes else stack.view_probabilities(call, q_BHGD.dtype)
        out, p_BHGT = torch_backend.step(q_BHGD, keys, positions_B1[:, None], call.geometry, observes, buffer)
    return out, p_BHGT, keys.positions_BHT


def _begin_step(call: Call, k_BH1D: Tensor, v_BH1D: Tensor, positions_B1: Tensor) -> dict[str, Tensor]:
    """Begin a decode step of a layer in no stack: make room for the token and count it; `run_step` then writes the token.

    Returns the state (numbers that the policy stores) to be written with its key. `records_undo`: the step is logged, to be
    rolled back. traced: torch.compile compiles the step: its room was checked, and `catch_up` will count its token.
    `shared_score`: a sum of all layers.
    """
    slots = call.slots
    if not call.now.traced:
        slots.make_room()  # larger buffers if a head has no free slot
        if call.now.records_undo:
            slots.log_undo(call.cache.shared_score)
        slots.columns_read += 1
    return call.step_entry(k_BH1D, v_BH1D, positions_B1)


def _end_step(
    call: Call,
    new: tuple[Tensor | None, Tensor | None, Tensor | None],
    p_BHGT: Tensor | None,
    positions_BHT: Tensor,
    newest_B11: Tensor,
    t: int,
    evicted_by_kernels: bool,
) -> None:
    """End a decode step: add its attention to the layer's sums, show it to the policy's `needs`, evict, and record evictions.

    `run_step` calls it once a layer, or once a stack. The needs (what the policy asks a layer to gather) keep their numbers in
    notes; what a step overwrites goes to the undo log. evicted_by_kernels: kernels have evicted, and chosen the next token's
    slots. new: queries, key and value of the token; None for stacked layers. `steppers`: each need that reads decode steps,
    with its method. `need.rows`: rows of attention that it reads.
    """
    if p_BHGT is not None and call.policy.needs.sums:
        _add_statistics(call, p_BHGT, positions_BHT, newest_B11, t)
    if call.steppers:
        step, log, observes = StepRead(call, *new, p_BHGT, newest_B11[:, 0]), call.slots.undo_log, call.observes
        for need, run in call.steppers:
            if not observes and need.rows != "none":
                continue  # this step's probabilities were not computed
            if log and (note := call.notes.get(need.name)) is not None:
                log[-1].need_notes[need.name] = note.overwritten_by(step.positions_B1)
            run(step)
    if evicted_by_kernels:
        call.slots.follow_kernels()  # counts the token
    elif call.evicting:
        _evict_over_budget(call, newest_B11, t)
    else:
        call.slots.advance()  # the slot after the new token's is free next
    if call.evicts:
        call.note_evictions(newest_B11)


def choose_backend(call: Call, q_BHGD: Tensor) -> str:
    """Return the name of the backend that is to run a layer's decode step, and note it with the reason in `backend_choice`."""
    choice, why = call.cache.backend_choice, call.no_kernels  # the reason why no kernel can serve the policy
    if why is None and call.cache.counters.steps_behind_B is not None and call.observes:  # rows differ in steps taken
        why = "rows have temperatures of their own"
    if why is None:
        return choice.of(*_describe_case(call, q_BHGD))
    choice.record(_name_task(call), "torch", why)
    return "torch"


def choose_step_backends(call: Call) -> None:
    """Choose the backends of the coming decode steps, since a step that torch.compile traces cannot choose.

    `finish_group` calls it for each layer as a prompt ends. It does so only if tokens go into free slots. The cases that may
    come: with gradients or without them, and with empty slots to mask (`padding`) or without.
    """
    slots = call.slots
    if slots.mode.fills_free_slots:
        shape = *slots.positions.shape[:2], call.group, slots.kv.sizes[0]  # of a step's queries
        task, case = _describe_case(call, torch.empty(shape, dtype=slots.dtype, device=call.device))
        for padding, gradients in product((case.padding, True), (case.gradients, False)):
            call.cache.backend_choice.foresee(task, replace(case, padding=padding, gradients=gradients))


def _name_task(call: Call) -> Task:
    """Return the task of a layer's decode step, by which backends are chosen: "ragged" if its heads differ in their slots."""
    return "decode" if call.slots.kv.head_offsets is None else "ragged"


def _describe_case(call: Call, q_BHGD: Tensor) -> tuple[Task, Case]:
    """Return the task of a layer's decode step and its Case, the properties by which a backend is chosen for it."""
    task = _name_task(call)
    return task, call.case(task, q_BHGD, call.keys(call.slots.columns_used, contents=False), call.observes)


def _run_kernels(
    call: Call,
    q_BHGD: Tensor,
    k_BH1D: Tensor,
    v_BH1D: Tensor,
    entry: dict[str, Tensor],
    positions_B1: Tensor,
    t: int,
    stack: LayerStack | None,
) -> tuple[Tensor, bool] | None:
    """Run a step in Triton's kernels, which write, attend and observe; return the output, and if they have evicted too.

    `run_step` calls it where Triton was chosen. It returns None if the kernels cannot be launched. All is then as before, but
    free slots may hold the new token's state (`entry`), which `run_step` overwrites. Of stacked layers only the first tries: a
    failure in a later one is raised, since the layers before it have changed. `rule.moves`: a head's budget follows the text,
    and torch evicts. attempt: runs `step`, and puts the tensors `restored` back if its launch fails.
    """
    slots, observes = call.slots, call.observes
    appends = not slots.mode.fills_free_slots
    with torch.no_grad():
        evicting = call.evicting and not (appends or call.rule.moves or call.shares_keys)
        if appends:
            slots.mode.free_BH = call.now.index_column(slots.columns_used, slots.positions)
            slots.open_columns(1, entry)  # writes the state, counts the column as used
        else:
            slots.write_entry(entry)
            if call.now.records_undo:
                slots.mode.free_BH = slots.mode.free_BH.clone()  # the undo log copies what the kernel is going to change
        tau = call.cache.temperature(t - call.now.prompt_columns + 1) if observes else 1.0  # of Keyformer's softmax with noise
        rule = backend("triton").rule(call.policy, slots, observes, evicting)  # of scoring and eviction inside the kernel
        step = functools.partial(
            backend("triton").step, q_BHGD, k_BH1D, v_BH1D, slots, positions_B1[:, 0], call.geometry, rule, tau
        )
        if call.launched or (stack is not None and call.layer > 0):
            out = step()
        else:
            restored = (slots.positions, slots.mode.free_BH, *slots.state.values())  # if the launch fails
            out = call.cache.backend_choice.attempt(*_describe_case(call, q_BHGD), step, restored)  # None if the launch fails
    call.launched = out is not None
    if out is None:
        slots.columns_used -= appends  # give the opened column back
        return None
    moving = "heads evict as many tokens as their budget says" if call.rule.moves else None
    if call.evicting and not rule.evicts and (why := moving or backend("triton").torch_evicts(call.policy, slots)) is not None:
        call.cache.backend_choice.record(_name_task(call), "triton", f"torch names who goes: {why}")
    return out, rule.evicts


def _add_statistics(call: Call, p_BHGT: Tensor, positions_BHT: Tensor, newest_B11: Tensor, t: int) -> None:
    """Add a decode step's attention probabilities to the layer's sums (`slots.state`), by which tokens are scored.

    `_end_step` calls it if torch computed the probabilities. tau: temperature of Keyformer's softmax with noise.
    """
    policy, (B, H, _, T) = call.policy, p_BHGT.shape
    n_keys = UNCOUNTED
    if "count" in policy.needs.statistics:  # a score divides by the number of keys that the new token attends to
        n_keys = keep_in_window(positions_BHT >= 0, call.geometry.sliding, positions_BHT, newest_B11).sum(-1).reshape(-1, 1)
    rows = ProbabilityRows(0, B * H, 0, 1, 0, T, p_BHGT.flatten(0, 1).unsqueeze(2), n_keys)  # all heads, one row, all keys
    tau = call.cache.temperature(t - call.now.prompt_columns + 1)
    sums = call.sums(rows, newest_B11[:, 0], tau)
    call.add({name: total.view(B, H, T) for name, total in sums.items()})


def _evicts_nothing(call: Call) -> bool:
    """Tell if it is certain that no head evicts at this step, for `_evict_over_budget`.

    `mode.due`: by the host's counters some head may. If slots may be empty, a traced step cannot rely on these, and other
    processes may hold heads that evict: the eviction then runs in any case.
    """
    slots = call.slots
    return not (slots.mode.due or (slots.may_have_empty and (slots.traced or call.parallel)))


def _evict_over_budget(call: Call, newest_B11: Tensor, t: int) -> None:
    """Evict the tokens over each head's budget, if some are due at this step, and set the slots for the next token.

    `_end_step` calls it once a layer, or once a stack, unless kernels have evicted. Changes the layer's positions and mode in
    place; `mode.count` counts the new token in the mode. t: column of the pass. `rule.moves`: a budget that follows the text,
    under which a head evicts none, one or several tokens. `every`: heads wait to evict so many at once.
    """
    slots, every = call.slots, call.policy.every
    if _evicts_nothing(call):
        if slots.may_have_empty:
            slots.set_free(slots.empty_slots())
        slots.mode.count(1)
        return
    context = call.eviction_context(newest_B11, t)
    if call.settings.strict:
        context.watch = functools.partial(anomaly.check_value, call)
    positions = context.positions_BHT
    empty = positions < 0 if slots.may_have_empty else None
    if call.rule.moves:  # each head keeps `count` tokens
        keys = call.policy.eviction_keys(context, empty)
        count, slots.lost_BH1 = call.rule.kept(call.score, context, keys)
        positions.masked_fill_(~mask_top(keys, count, None), -1)
        slots.set_free(slots.empty_slots())
        slots.mode.count(1)
        return
    victims_BHE = find_victims(call.policy.eviction_keys(context, None), empty, every)  # slots
    if not slots.may_have_empty:
        if every > 1:
            slots.drop(victims_BHE)  # last tokens move into the columns of the dropped
        else:
            slots.free(victims_BHE[..., 0])  # the next token goes there
        return
    # heads below budget have empty slots for the next token, and evict nothing
    over_BH = (positions >= 0).sum(-1) >= slots.own_budget_BH1[..., 0] + every
    slots.positions.scatter_(2, victims_BHE, torch.where(over_BH[..., None], -1, slots.positions.gather(2, victims_BHE)))
    slots.set_free(slots.empty_slots())
    if not slots.traced:
        slots.mode.count(1)
