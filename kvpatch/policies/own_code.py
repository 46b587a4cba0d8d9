"""Calls of scores and scopes that a user wrote: a mistake there is answered with the method and what it should return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import KVPatchError
from .context import OWN_STATE, EvictionContext, NewTokens
from .needs import AnyNeed, Need, PromptRead, StepRead
from .scopes import Scope
from .scores import Score
from .statistics import STATISTICS

_PASSES = {"read": "prompt", "step": "step"}
_HERE = __name__.partition(".")[0]


def is_own(part: object) -> bool:
    """Tell whether a user wrote the class of a policy's part (a score, scope or need): it is not defined in kvpatch."""
    return type(part).__module__.partition(".")[0] != _HERE


def call_value(score: Score, policy: str, context: EvictionContext) -> Tensor:
    """Call `value` of a user's score for `Policy.eviction_keys`, at each eviction; check and return the scores [B,H,T].

    Raises:
        KVPatchError: the method raised an error, or returned anything else.
    """
    where = _name_method(score, "value(context)", policy)  # for messages
    wanted = f"a float tensor {_format_shape(context.positions_BHT, 'B,H,T')}, the shape of context.positions_BHT"
    result = _run_method(where, wanted, lambda error: _name_missing_need(error, context), score.value, context)
    if not isinstance(result, Tensor) or result.shape != context.positions_BHT.shape:
        raise KVPatchError(f"{where} returned {_describe_result(result)}: it must return {wanted}.")
    return result


def call_mask(scope: Scope, policy: str, context: EvictionContext) -> Tensor | None:
    """Call `mask` of a user's scope for `Policy.eviction_keys`; check and return the protected tokens, bool [B,H,T] or None.

    Raises:
        KVPatchError: the method raised an error, or returned anything else.
    """
    where, wanted = (
        _name_method(scope, "mask(context)", policy),
        f"a bool tensor {_format_shape(context.positions_BHT, 'B,H,T')}, or None",
    )
    result = _run_method(where, wanted, lambda error: _name_missing_need(error, context), scope.mask, context)
    is_mask = isinstance(result, Tensor) and result.dtype == torch.bool
    if result is not None and not (is_mask and result.shape == context.positions_BHT.shape):
        said = f"a tensor of {result.dtype}" if isinstance(result, Tensor) and not is_mask else _describe_result(result)
        raise KVPatchError(f"{where} returned {said}: it must return {wanted}.")
    return result


def call_entry(part: Score | AnyNeed, policy: str, new: NewTokens, taken: Collection[str]) -> dict[str, Tensor]:
    """Call `entry` of a user's score or need for `Policy.entry`, as tokens are cached; check and return it.

    `entry` returns the numbers to store with each new token, by name. taken: names that others store under.

    Raises:
        KVPatchError: the method raised an error, or returned anything else.
    """
    where = _name_method(part, "entry(new)", policy)
    wanted = f"a dict of tensors {_format_shape(new.k_BHQD[..., 0], 'B,H,Q')} or [B,H,Q,n]"
    signature = " Its signature is entry(self, new); new is a kvpatch.policies.NewTokens."
    result = _run_method(where, wanted, lambda error: signature, part.entry, new)
    if not isinstance(result, dict):
        raise KVPatchError(f"{where} returned {_describe_result(result)}: it must return {wanted}.")
    for name, one in result.items():
        if not isinstance(one, Tensor) or one.shape[:3] != new.k_BHQD.shape[:3] or one.ndim > 4:
            raise KVPatchError(f"{where}: {name!r} is {_describe_result(one)}: it must return {wanted}.")
        if name in taken or any(name == one.name for one in OWN_STATE):
            raise KVPatchError(f"{where} stores {name!r}, under which layers have numbers already: take another name.")
    return result


def bind_passes(
    needs: Iterable[AnyNeed], method: Literal["read", "step"], policy: str
) -> tuple[tuple[AnyNeed, Callable[[PromptRead | StepRead], None]], ...]:
    """Pair each need of a policy that defines `method` with a function that calls it, for layers to run in their passes.

    method: "read" for prompts, "step" for decode steps. A method of a user's own class is called by `_read_pass`, whose error
    names the method. `Call.__init__` calls this. A Call stands for a layer in its passes.
    """

    def bind_method(need: AnyNeed) -> Callable[[Any], None]:
        run: Callable[[Any], None] = getattr(need, method)
        return functools.partial(_read_pass, need, f"{method}({_PASSES[method]})", policy, run) if is_own(need) else run

    return tuple((need, bind_method(need)) for need in needs if getattr(type(need), method) is not getattr(Need, method))


def _read_pass(need: AnyNeed, method: str, policy: str, run: Callable[[Any], None], read: PromptRead | StepRead) -> None:
    """Call `run`, the method `read` or `step` of a user's need, with the layer's pass; its errors name the method.

    Layers call it through `bind_passes`. The error of a step says what it was not given, probabilities (p_BHGT) or the token's
    query, key and value, and why.
    """
    name, hint = type(need).__name__, ""
    if isinstance(read, StepRead) and read.p_BHGT is None:
        hint += f' step.p_BHGT is None: {name}.rows is {need.rows!r}, and "window" asks for it.'
    if isinstance(read, StepRead) and read.q_BHGD is None:
        hint += f" A step of layers that are stepped as one has no queries, keys, values or notes: {name}.alone is False."
    _run_method(_name_method(need, method, policy), "", lambda _: hint, run, read)


def check_rows(q_BHGWD: Tensor, rows_BW: Tensor) -> None:
    """Check the queries that a need gives to `prompt.attention`, and their positions, for `_score_by_window`; change nothing.

    Raises:
        KVPatchError: the tensors have other axes, or not one position for each query.
    """
    if q_BHGWD.ndim != 5 or rows_BW.shape != (q_BHGWD.shape[0], q_BHGWD.shape[3]):
        raise KVPatchError(
            "prompt.attention(q, rows) takes queries [B,H,G,W,D] and a position for each row, [B,W], such as "
            f"prompt.q_BHGQD[:, :, :, -8:] and prompt.rows_BQ[:, -8:]; got {list(q_BHGWD.shape)} and {list(rows_BW.shape)}."
        )


def _run_method(where: str, wanted: str, hint: Callable[[Exception], str], method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's method and return its result; an error in it becomes a KVPatchError that names the method.

    `call_value`, `call_mask`, `call_entry` and `_read_pass` call it. where, wanted: the method and what it must return ("":
    nothing), for the message. hint: more to say about an error.
    """
    try:
        return method(*arguments)
    except (KVPatchError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        returns = f" It must return {wanted}." if wanted else ""
        message = f"{where} raised {type(error).__name__}: {error}.{returns}{hint(error)}"
        raise KVPatchError(message) from error


def _name_method(part: object, method: str, policy: str) -> str:
    return f"{type(part).__name__}.{method} of policy {policy!r}"


def _format_shape(like: Tensor, letters: str) -> str:
    return f"[{letters}] = {list(like.shape)}"


def _describe_result(result: object) -> str:
    if result is None:
        return "None"
    return f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"


def _name_missing_need(error: Exception, context: EvictionContext) -> str:
    """Return advice if a user's method read a missing key of `context.state`: what its class must declare or store.

    `call_value` and `call_mask` add it to their error; "" for other errors.
    """
    if not isinstance(error, KeyError) or not error.args:
        return ""
    name, has = error.args[0], ", ".join(map(repr, context.state)) or "nothing"
    if name in STATISTICS:
        return f" context.state has {has}; {name!r} is there if the class says needs = (Sums({name!r}),)."
    return f" context.state has {has}; {name!r} is there if entry() returns it."
