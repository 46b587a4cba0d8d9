"""The settings of a patch, checked against each other and against the model before anything changes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn

from ..arch.adapter import dtype_of
from ..backends.dispatch import check
from ..backends.entry_sizes import BITS
from ..cache.settings import CacheSettings
from ..cache.tensors import FLOATS
from ..errors import KVPatchError, match_name, suggest
from ..policies import Policy, get_policy
from ..policies.budgets import Budget, as_python, check_count, is_list
from ..policies.naming import POSITIONS
from ..policies.options import PolicyOptions
from ..policies.scopes import AllBut
from ..policies.served import refuse_pairs
from ..policies.uses import USES, Use
from .inputs import refuse_misspelt_arguments
from .target import Target

_CALLS = {call: "; ".join(use.name for use in USES if use.write_call() == call) for call in map(Use.write_call, USES)}
_WIDTH = max(map(len, _CALLS))
UNNAMED = "\n".join(
    [
        "patched() needs a policy: name the one that suits the use.",
        *(f"  {call:<{_WIDTH}}  # {use}" for call, use in _CALLS.items()),
        "list_policies() has all names.",
    ]
)


def check_model(model: object, policy: object) -> None:
    """Raise KVPatchError, for `patched`, unless its `model` is a module, or if model and `policy` were swapped."""
    if isinstance(policy, nn.Module) and not isinstance(model, nn.Module):
        name = repr(model) if isinstance(model, str) else "policy"
        raise KVPatchError(f"patched() takes the model first: patched(model, {name}, k=0.5).")
    if not isinstance(model, nn.Module):
        raise KVPatchError(
            f"patched() takes a model (torch.nn.Module), not {type(model).__name__}: call patched(model, policy, k)."
        )


def positions_of(positions: object) -> str:
    """Return the argument `positions` of `patched` and of commands, in upper or lower case, as "original" or "renumbered".

    Raises:
        KVPatchError: `positions` is neither.
    """
    found = match_name(positions, POSITIONS)
    if found is None:
        meant = suggest(positions, POSITIONS)
        raise KVPatchError(f"positions={positions!r} is unknown; use 'original' or 'renumbered'.{meant}")
    return found


def bits_of(bits: object) -> int:
    """Return the argument `bits` of `patched` as an int, also if it is a number of numpy, or raise KVPatchError."""
    if not isinstance(bits, Integral) or int(bits) not in BITS:
        raise KVPatchError(
            f"bits={bits!r} must be 16 (keys and values in the model's own precision), 8 or 4 (rounded, so that a budget in "
            "bytes holds more tokens). `kvpatch compare MODEL FILE -k SIZE --bits auto` measures all three on your own text."
        )
    return int(bits)


def check_options(seed: object, block: object, **switches: object) -> None:
    """Raise KVPatchError for values of patched()'s arguments that are wrong for every model.

    `patched` calls it before it looks at the model. seed, block: its arguments. switches: those that are flags, by name.
    """
    if block is not None:
        check_count("block", block, "tokens")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise KVPatchError(f"seed={seed!r} must be an int.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise KVPatchError(f"{name}={value!r} must be True or False.")


def policy_of(policy: str | Policy | None, schedule: str | None, options: dict[str, Any], arguments: Sequence[str]) -> Policy:
    """Return the policy with its options set, from the arguments of `patched`. arguments: their names, for corrections.

    Raises:
        KVPatchError: no policy, an unknown one, an option that it does not have, or a bad value.
    """
    if policy is None:
        refuse_misspelt_arguments(tuple(PolicyOptions.__annotations__), options, arguments)
        raise KVPatchError(UNNAMED)
    chosen = policy if isinstance(policy, Policy) else get_policy(policy)
    refuse_misspelt_arguments(tuple(chosen.options()), options, arguments)
    return chosen.with_options(schedule, **options)


def settings_of(  # noqa: PLR0913 - those of patched()
    target: Target,
    policy: Policy,
    k: object,
    *,
    bits: int,
    block: int | None,
    positions: str,
    backend: str,
    seed: int,
    strict: bool,
    record: bool,
) -> CacheSettings:
    """Check the arguments of `patched` against the model and each other, and return the settings of the patch.

    `patched` calls it before it changes the model. target: the model's parts that are patched. The others are `patched`'s
    arguments of the same names, each of which was checked by itself.

    Raises:
        KVPatchError: the model cannot work with this policy, budget, positions or backend, or two of these exclude each other.
    """
    # what the policy needs of the model. bounds: each layer's sliding window, or None
    renumbered, bounds, k = positions == "renumbered", target.bounds(), as_python(k)
    policy, listed = _resolve_protected(policy, target), is_list(k)
    target.check_rotations(policy, renumbered)
    if policy.projects:
        target.check_projection(policy)
    target.check_calibration(policy)
    k = policy.score.budget(k, policy, bounds)
    budget, budgets = _parse_budgets(k, target, bits, bounds, policy)
    shapes = target.shapes()
    settings = CacheSettings(
        policy,
        budget,
        bits,
        seed,
        block,
        renumbered=renumbered,
        backend=backend,
        bounds=bounds,
        latent=tuple(shape.latent for shape in shapes),
        parallel=target.parallel,
        strict=target.names() if strict else (),
        counts_columns=target.counts_columns(),
        records_lifetimes=record,
        layer_numbers=target.layer_numbers,
        budgets=budgets,
    )
    # raise if two features exclude each other, a budget does not fit the policy or the heads, or the backend lacks something
    refuse_pairs(settings.list_features(listed=listed, least=_find_least(budget), alibi=target.find_alibi()))
    for rule, shape in zip(budget.rules, shapes, strict=True):
        rule.check(policy, shape.heads)
    for case in dict.fromkeys(target.list_cases(renumbered, policy)):
        check(backend, case)
    return settings


def _parse_budgets(
    k: object, target: Target, bits: int, bounds: tuple[int | None, ...], policy: Policy
) -> tuple[Budget, dict[torch.dtype, Budget]]:
    """Return the budget `k` of patched() for keys of the model's dtype; if k is in bytes, also one for each dtype of keys.

    `settings_of` calls it. bounds: each layer's sliding window, or None. Under autocast keys have another dtype than the model.
    """

    def parse(dtype: torch.dtype) -> Budget:
        """Parse `k` for keys of a dtype, on which the bytes of a token depend."""
        # fixed: bytes of the centres that keys are rounded around. extra: a policy that evicts every `every` steps lets a head
        # hold up to every - 1 tokens over its budget in between
        sizes = {"bytes_per_token": target.bytes_per_token(bits, dtype), "fixed": target.bytes_of_centres(bits, dtype)}
        return Budget.parse(k, n_layers=len(target.attentions), **sizes, bounds=bounds, extra=policy.every - 1)

    model_dtype = dtype_of(target.decoder)
    budget = parse(model_dtype)
    budgets = {model_dtype: budget} if budget.sizes else {}  # sizes: budgets in bytes, as the user wrote them
    for dtype in FLOATS if budget.sizes else ():
        with contextlib.suppress(KVPatchError):  # no token fits: in_dtype() says so if it is needed
            budgets.setdefault(dtype, parse(dtype))
    return budget, budgets


def _resolve_protected(policy: Policy, target: Target) -> Policy:
    """Return the policy, for `settings_of`, with protect="image" replaced by the ids of the model's image tokens.

    protect="text" is replaced by all ids but these. A policy with another `protect` comes back as it is.
    """
    kind = policy.scope.protect
    if not isinstance(kind, str) or policy.scope.keeps_system:
        return policy
    ids = target.image_tokens()
    if not ids:
        raise KVPatchError(
            f"protect={kind!r}: the configuration of this model names no token of an image. Give token ids or a boolean mask."
        )
    return policy.with_options(None, protect=ids if kind == "image" else AllBut(ids))


def _find_least(budget: Budget) -> int | None:
    """Return the smallest budget of a layer or head in tokens, for `settings_of`; None if none is in tokens (shares, rules)."""
    sizes = (size for k in budget.per_layer for size in (k if isinstance(k, tuple) else (k,)))
    return min((size for size in sizes if isinstance(size, int)), default=None)
