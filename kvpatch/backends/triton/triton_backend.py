"""The Triton kernels as a backend: statistics of a prompt's rows, and whole decode steps over slots.

Kernels run on a GPU. In Triton's interpreter (TRITON_INTERPRET=1) they also run on the CPU, slowly: for tests.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...policies.policy import Policy
from ...policies.scopes import Scope
from ..device import find_capability
from ..entries import FULL, centre_codecs, centre_of, codecs
from ..protocol import SPECIAL, Attended, Case, Geometry, Keys, Noise, StepSlots, Task
from . import arguments
from .arguments import spans

if TYPE_CHECKING:
    from .decode import Rule

PROMPTS = ("prompt", "statistics", "replay")  # tasks with all rows of a text
KNOWN = ("sum", "squares", "count", "gumbel")  # statistics
OLDEST = 8  # major compute capability: older GPUs have too little shared memory, and no tensor cores for bfloat16
ADVICE = (  # pattern of an error, and what to do about it
    (r"C compiler|\bgcc\b|\bclang\b|Python\.h", "Triton compiles a small C file: install gcc and Python's headers, or set CC."),
    (r"[Pp]ermission denied|Read-only file system|No space left", "Set TRITON_CACHE_DIR to a writable directory."),
    (r"out of resource", "The GPU has too little shared memory for these kernels."),
    (r"(?i)ptxas|sm_\d+|unsupported gpu|no kernel image", "This Triton does not know the GPU: pip install -U triton."),
)


def reason(task: Task, case: Case) -> str | None:
    """Return why the Triton kernels cannot do a task for such a layer, or None if they can.

    `Choice` asks as it chooses a backend.
    """
    served = () if task == "replay" else ("softcap", "sinks")
    unknown = [SPECIAL[name] for name in case.special if name not in served]
    if unknown:
        return f"its {task} kernels have no {' and no '.join(unknown)}"
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if case.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels run on a GPU"
    if case.device not in ("cpu", "cuda"):
        return f"its kernels were not tried on {case.device}"
    if case.device == "cuda" and (find_capability() or OLDEST) < OLDEST:
        return f"its kernels need a GPU of compute capability {OLDEST}.0"
    if case.device == "cuda" and (problem := driver_problem()) is not None:
        return problem
    if case.bits != FULL and task in PROMPTS:
        return "its kernels of a prompt read keys and values in the model's own precision, not entries rounded to bits="
    if case.value_dim not in (None, case.head_dim):
        return f"its kernels take values of the keys' size {case.head_dim}, not {case.value_dim}"
    if task in PROMPTS and (why := arguments.reason(case.dtype, case.head_dim)) is not None:
        return why
    if task in ("prompt", "replay"):
        return "its attention of a prompt has no gradients" if case.gradients and task == "prompt" else None
    if case.fresh:  # the policy's statistic adds noise to every logit
        return "it draws no noise for every query and key"
    for name, kernel in case.statistics:  # each statistic, and the name of the kernels' computation of it
        if kernel != name or kernel not in KNOWN:
            return f"its kernels do not know the function that computes {name!r}"
    if task == "statistics":
        return None
    if case.gradients:
        return "its decode step has no gradients"
    if case.renumbered:  # positions="renumbered": cached keys are not rotated
        return "it reads keys and positions as they are cached, and renumbered positions change at every step"
    from . import decode

    return decode.reason(case.dtype, case.head_dim, case.group, case.value_dim, case.bits)


@functools.cache
def driver_problem() -> str | None:
    """Return why Triton cannot launch a kernel on this GPU, or None; for `reason`.

    Cached, since Triton compiles code to find out.
    """
    if not torch.cuda.is_available():
        return None
    import triton

    try:
        _ = triton.runtime.driver.active.utils
    except Exception as error:
        hint = advice(error)
        return f"Triton finds no way to launch kernels ({' '.join(str(error).split())})" + (f": {hint}" if hint else "")
    return None


def advice(error: Exception) -> str | None:
    """Return what the user can do about a kernel whose first launch has failed, "" if nothing is known.

    `refusals.attempt` asks after the failure. None: the error is of another kind, or comes from Triton's interpreter, where
    nothing is launched; it is then raised.
    """
    kind = type(error)
    of_triton = kind.__module__.split(".")[0] == "triton" and kind.__name__ != "InterpreterError"
    if not of_triton and not isinstance(error, (RuntimeError, OSError, subprocess.SubprocessError)):
        return None
    return next((hint for pattern, hint in ADVICE if re.search(pattern, str(error))), "")


# ---- a prompt ----


def attend(
    q_BHGQD: Tensor,
    keys: Keys,
    rows_BQ: Tensor,
    geometry: Geometry,
    noise: Noise | None = None,
    spans_B4: Tensor | None = None,
) -> Attended:
    """Compute a layer's attention of a prompt or a replay, without gradients; arguments and results as in torch_backend.attend.

    `attend_to` and ReplayPass call it where Triton was chosen. A replay reads a text in one pass, for training, with keys
    masked where a cache would have evicted them. noise: if given, the log-sum-exp of the noisy logits is returned too.
    spans_B4: `spans` of the rows, if these are known.
    """
    from . import forward

    options = (
        _describe_shape(geometry)
        | {"sinks_HG": geometry.sinks_HG, "past": keys.columns_before, "holes": keys.may_have_empty}
        | _describe_noise(noise)
    )
    options |= {"deaths_BHT": keys.deaths_BHT, "spans_B4": spans_B4}
    tensors = q_BHGQD.detach(), keys.k_BHTD.detach(), keys.v_BHTD.detach()
    result = forward.attend(*tensors, keys.positions_BHT, rows_BQ, **options)
    return Attended(result.out, result.lse, result.noisy)


def gradients(
    q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry, attended: Attended, grad_BHGQD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of a replay (a text read in one pass, for training).

    autograd calls it in the replay's backward pass (`_Kernels`). attended: what `attend` returned. grad_BHGQD: the gradient of
    its output.
    """
    from . import backward

    options: dict[str, Any] = {name: getattr(geometry, name) for name in ("scale", "slopes_HG", "sliding")}
    options |= {"deaths_BHT": keys.deaths_BHT, "lse_BHGQ": attended.lse, "holes": keys.may_have_empty}
    tensors = q_BHGQD, keys.k_BHTD, keys.v_BHTD, keys.positions_BHT, rows_BQ
    return backward.gradients(*tensors, out_BHGQD=attended.out, grad_BHGQD=grad_BHGQD, **options)


def statistics(
    q_BHGQD: Tensor,
    keys: Keys,
    rows_BQ: Tensor,
    geometry: Geometry,
    attended: Attended,
    names: tuple[str, ...],
    noise: Noise | None = None,
    spans_B4: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the sums [B,H,T] by name, over all rows of a prompt, by which policies score; policies/statistics.py defines them.

    `_attend_and_sum` calls it for each layer when a prompt is read. attended: what attention returned; log-sum-exps that it
    lacks are computed. noise: of the sum "gumbel" (Keyformer's). spans_B4: `spans` of the rows, if they are known.
    """
    from . import forward
    from .columns import column_statistics

    inputs, shape = (q_BHGQD.detach(), keys.k_BHTD.detach()), _describe_shape(geometry) | {"past": keys.columns_before}
    shape["spans_B4"] = spans(rows_BQ) if spans_B4 is None else spans_B4
    places, plain = (keys.positions_BHT, rows_BQ), tuple(name for name in names if name != "gumbel")
    lse, noisy = attended.lse, attended.noisy
    result: dict[str, Tensor] = {}
    # log-sum-exps that attention did not return: the forward kernel computes them, without an output
    if lse is None or (noise is not None and noisy is None):
        options = shape | {"sinks_HG": geometry.sinks_HG, "holes": keys.may_have_empty} | _describe_noise(noise)
        sums = forward.attend(*inputs, None, *places, lse_BHGQ=lse, **options)
        lse, noisy = sums.lse, sums.noisy
    # a launch for the noisy softmax, and one for all other sums
    if noisy is not None:
        result["gumbel"] = column_statistics(*inputs, *places, noisy, ("sum",), **(shape | _describe_noise(noise)))["sum"]
    if plain:
        counted = visible_keys(keys, rows_BQ, geometry) if "count" in plain else None
        result |= column_statistics(*inputs, *places, lse, plain, keys_BHQ=counted, **shape)
    return result


def window_sums(
    q_BHGWD: Tensor,
    keys: Keys,
    rows_BW: Tensor,
    geometry: Geometry,
    lse_BHGW: Tensor | None = None,
    spans_B4: Tensor | None = None,
) -> Tensor:
    """Return the attention [B,H,T] of a window's rows to each key, for scores such as SnapKV's: sum over rows, mean over G.

    `_score_by_window` calls it when a prompt has been read. rows_BW: positions of the rows; -1: no row. lse_BHGW: their
    log-sum-exp if attention returned it, which saves a slow launch: few rows make few programs, each over many keys. spans_B4:
    `spans` of the rows, if they are known.
    """
    from . import forward
    from .columns import column_statistics

    inputs, places = (q_BHGWD.detach(), keys.k_BHTD.detach()), (keys.positions_BHT, rows_BW)
    shape = _describe_shape(geometry) | {"by_position": True, "spans_B4": spans(rows_BW) if spans_B4 is None else spans_B4}
    if lse_BHGW is None:
        lse_BHGW = forward.attend(*inputs, None, *places, sinks_HG=geometry.sinks_HG, **shape).lse
    return column_statistics(*inputs, *places, lse_BHGW, ("sum",), **shape)["sum"] / q_BHGWD.shape[2]


def _describe_shape(geometry: Geometry) -> dict[str, Any]:
    """Return what all kernels take of a layer's variant of attention, as keyword arguments."""
    names = ("scale", "slopes_HG", "sliding", "softcap")
    return {name: getattr(geometry, name) for name in names}


def _describe_noise(noise: Noise | None) -> dict[str, Any]:
    """Return the noise as the keyword arguments of a prompt's kernels; none without noise."""
    return {} if noise is None else {"noise_BHTG": noise.weights_BHTG, "tau": noise.tau}


def visible_keys(keys: Keys, rows_BQ: Tensor, geometry: Geometry) -> Tensor:
    """Return how many keys each row of a prompt sees, [B,H,Q].

    `statistics` needs this number n for the sum "count": how many rows give a key more than its even share 1/n.
    """
    B, H, _ = keys.positions_BHT.shape
    # a row sees the prompt's tokens up to its own (counted by positions), and those that the cache held before the prompt
    prompt_keys = rows_BQ - rows_BQ.masked_fill(rows_BQ < 0, torch.iinfo(torch.int64).max).amin(-1, keepdim=True) + 1
    past = keys.positions_BHT[:, :, : keys.columns_before].sort(-1).values.contiguous()
    held = (past >= 0).sum(-1, keepdim=True)
    if geometry.sliding is None:
        return prompt_keys[:, None] + held
    # of the earlier tokens, those within the row's window; `past` is sorted, so a search counts them
    oldest = (rows_BQ - geometry.sliding + 1).clamp(min=0)[:, None].expand(B, H, -1).contiguous()
    return prompt_keys.clamp(max=geometry.sliding)[:, None] + (past.shape[-1] - torch.searchsorted(past, oldest))


# ---- a decode step ----


def rule(policy: Policy, slots: StepSlots, wanted: bool, evicting: bool) -> Rule:
    """Return the Rule of a decode step over `slots`: statistics to update, and a value by which the kernel chooses the victim.

    `_run_kernels` calls it for each step, and FusedByKernels when it binds a layer. wanted: the policy needs statistics.
    evicting: a token is to be evicted; torch chooses it afterwards if the kernel cannot.
    """
    from .decode import Rule, known_rule

    make = Rule if torch.compiler.is_compiling() else known_rule  # known_rule caches Rules, which a traced graph does not need
    if not (wanted or evicting):
        return make(evicts=False)
    names = policy.needs.states if wanted else ()
    decay, decayed = policy.needs.decay
    value = policy.score.kernel_source if evicting and torch_evicts(policy, slots) is None else None
    return make(names, decay, tuple(name for name in decayed if name in names), value, evicts=value is not None)


def torch_evicts(policy: Policy, slots: StepSlots) -> str | None:
    """Return why torch must choose the evicted token of a decode step that the kernels otherwise run; None: they choose it.

    `rule` and `_run_kernels` ask.
    """
    if policy.every > 1:
        return "several tokens are evicted at once"
    if type(policy).eviction_keys is not Policy.eviction_keys or policy.selection is not None:
        return "the policy has an order of its own"
    # slots.state has "protect" if the user marked tokens, and "span" if parts of the text have budgets (quotas)
    if type(policy.scope) is not Scope or "protect" in slots.state or "span" in slots.state:
        return "more is protected than sinks and recent tokens"
    if (source := policy.score.kernel_source) is None:
        return "no kernel knows the score's value()"
    # after an edit of the text, positions no longer tell how many rows have seen a key, by which a mean is divided
    if source == "mean" and "unseen" in slots.state:
        return "an edit's tokens were seen by other rows than positions say"
    return None


def step(
    q_BHGD: Tensor,
    k_BH1D: Tensor,
    v_BH1D: Tensor,
    slots: StepSlots,
    newest_B: Tensor,
    geometry: Geometry,
    chosen: Rule,
    tau: float | Tensor,
) -> Tensor:
    """Run a layer's decode step of one token per row, written to each head's free slot; return the output [B,H,G,D].

    `_run_kernels` and FusedByKernels call it. Keys, values, statistics, positions and, if the rule chooses a victim, the next
    free slot are updated in place.
    """
    limits, memory = slots.limits if chosen.evicts else None, slots.kv.locate_entries()  # limits: tokens never evicted
    # keep: tokens that a head may hold, if it may have empty slots; `first` and `recent`: positions below `first`, and so
    # many newest tokens, are never evicted
    keep = slots.keep_BH1[..., 0].contiguous() if slots.may_have_empty and slots.keep_BH1 is not None else None
    first = limits.first.flatten() if limits is not None and limits.any_first else None
    recent = limits.newest.flatten() if limits is not None and limits.any_newest else None
    newest_B = newest_B.contiguous()  # a column, if the pass has several tokens
    # slots.mode.free_BH: the slot of each head that the new token goes to
    tensors = q_BHGD, k_BH1D[:, :, 0], v_BH1D[:, :, 0], memory.keys, memory.values, slots.positions, slots.mode.free_BH
    if not torch.compiler.is_compiling():
        from . import decode

        return decode.step(
            *tensors, newest_B, slots.state, chosen, **_describe_shape(geometry), sinks_HG=geometry.sinks_HG,
            begin_N=memory.begin_N,
            capacity_N=memory.capacity_N, page=memory.page, keep_BH=keep, first_B=first, recent_B=recent, tau=tau,
            codecs=slots.kv.codecs,
        )  # fmt: skip
    heat, constant = (tau, 1.0) if isinstance(tau, Tensor) else (None, tau)
    return compiled_step(
        *tensors, newest_B, list(slots.state.values()), ",".join(slots.state), ",".join(chosen.statistics),
        ",".join(chosen.decayed), chosen.decay, chosen.value or "", geometry.scale, geometry.sliding, geometry.slopes_HG,
        geometry.softcap, geometry.sinks_HG, memory.begin_N, memory.capacity_N, keep, first, recent, heat, constant,
        slots.kv.codecs[0].bits, centre_of(slots.kv.codecs),
    )  # fmt: skip


def step_as_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slot: Tensor,
    newest: Tensor,
    state: list[Tensor],
    names: str,
    statistics: str,
    decayed: str,
    decay: float,
    value: str,
    scale: float,
    sliding: int | None,
    slopes: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    begin: Tensor | None,
    capacity: Tensor | None,
    keep: Tensor | None,
    first: Tensor | None,
    recent: Tensor | None,
    tau: Tensor | None,
    constant_tau: float,
    bits: int,
    centre: Tensor | None,
) -> Tensor:
    """Run `decode.step` as the operator kvpatch::decode_step, which torch.compile calls without tracing it.

    `step` calls it, as `compiled_step`, while torch.compile traces. An operator takes tensors, numbers and texts alone: names
    of the state (`names`) and of the Rule are joined by commas, and the temperature is `tau`, or `constant_tau` if that is
    None. `decode.step` explains all others. It changes the tensors in `mutates_args`.
    """
    from .decode import known_rule, step

    state_names, added, damped = (tuple(filter(None, text.split(","))) for text in (names, statistics, decayed))
    chosen = known_rule(added, decay, damped, value or None, evicts=bool(value))
    return step(
        q, k, v, keys, values, positions, slot, newest, dict(zip(state_names, state, strict=True)), chosen, scale=scale,
        sliding=sliding, slopes_HG=slopes, softcap=softcap, sinks_HG=sinks, begin_N=begin, capacity_N=capacity, keep_BH=keep,
        first_B=first, recent_B=recent, tau=constant_tau if tau is None else tau,
        codecs=centre_codecs(codecs(bits, q.shape[-1], q.shape[-1], q.dtype), centre),
    )  # fmt: skip


# torch.compile does not trace it
compiled_step = torch.library.custom_op(
    "kvpatch::decode_step", step_as_operator, mutates_args=("keys", "values", "positions", "slot", "state")
)
compiled_step.register_fake(lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format))
