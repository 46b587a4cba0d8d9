"""The table of named policies, the functions that combine policies, and the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..errors import KVPatchError, match_name
from .allocation import Adaptive, Global
from .calibration import QueryFilter, TriAttention, WholeHeads
from .content import Compactor, Cur, KeyDiff, KeyNorm, LagKV, Leverage
from .decoding import LastUse, Recurrence, Redundancy, SampledAttention
from .expected import ExpectedAttention
from .learned import Learned
from .merging import Merge
from .naming import COMBINED, refuse_name
from .outputs import OutputChange
from .policy import Policy
from .refitting import Refit
from .repeated import Repeated, RepeatedOutputs
from .scopes import DeviationScope, RangeScope, Scope
from .scores import (
    Accumulated,
    AccumulatedQuantized,
    Defensive,
    DilatedRecency,
    GumbelSoftmax,
    Last,
    Mean,
    Never,
    ObservationWindow,
    Random,
    Recency,
    Score,
)
from .selection import Chunked, TwoStage
from .slopes import Pyramid

# ---- combinations ----


def critical(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` that selects tokens by CriticalKV's two stages [CriticalKV Algorithm 1].

    Args:
        base: a policy or the name of one.
        **options: alpha, eps, norm (see TwoStage), or options of the base.

    Raises:
        KVPatchError: an unknown option, or a base whose score is not a weight, since it may be negative.

    Example:
        kvpatch.patched(model, kvpatch.critical("h2o", alpha=0.25), k=0.3)
    """
    return _combine_parts("critical", base, selection=TwoStage()).with_options(**options)


def adaptive(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` under which the heads of a layer share one budget according to their scores [AdaKV].

    Args:
        base: a policy or the name of one.
        **options: floor (see Adaptive), or options of the base.

    Raises:
        KVPatchError: an unknown option, or a base that never evicts or keeps the whole prompt.

    Example:
        kvpatch.patched(model, kvpatch.adaptive("roco", floor=0.5), k=0.3)
    """
    return _combine_parts("adaptive", base, over_heads=Adaptive()).with_options(**options)


def global_topk(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` under which the heads of all layers share one budget according to their scores.

    Args:
        base: a policy or the name of one.
        **options: floor (see Global), or options of the base.

    Raises:
        KVPatchError: an unknown option, or a base that never evicts, keeps the whole prompt, or divides its budget over heads
            already.

    Example:
        kvpatch.patched(model, kvpatch.policies.global_topk("snapkv", floor=0.5), k=0.3)
    """
    return _combine_parts("global_topk", base, over_heads=Global()).with_options(**options)


def pyramid(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` whose budgets fall linearly from the first layer to the last [PyramidKV].

    Args:
        base: a policy or the name of one.
        **options: beta (see Pyramid), or options of the base.

    Raises:
        KVPatchError: an unknown option, or a base that never evicts.

    Example:
        kvpatch.patched(model, kvpatch.pyramid("h2o", beta=10), k=0.3)
    """
    return _combine_parts("pyramid", base, over_layers=Pyramid()).with_options(**options)


def chunked(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` that keeps whole chunks of the prompt by the mean of their scores [ChunkKV].

    Args:
        base: a policy or the name of one; its schedule becomes "prompt".
        **options: size, together (see Chunked), or options of the base.

    Raises:
        KVPatchError: an unknown option, a base that never evicts, or one with a selection of its own.

    Example:
        kvpatch.patched(model, kvpatch.policies.chunked("h2o", size=10), k=0.3)
    """
    return _combine_parts("chunked", base, selection=Chunked(), schedule="prompt").with_options(**options)


def merged(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` that folds evicted values, as a prompt ends, into kept tokens with like keys [MergingPress].

    Args:
        base: a policy or the name of one; its schedule becomes "prompt".
        **options: threshold (see Merge), or options of the base.

    Raises:
        KVPatchError: an unknown option, or a base that never evicts.

    Example:
        kvpatch.patched(model, kvpatch.merged("key_norm"), k=0.3)
    """
    return _combine_parts("merged", base, merging=Merge(), schedule="prompt").with_options(**options)


def refit(base: str | Policy, **options: Any) -> Policy:
    """Return a copy of `base` that refits kept values, as a prompt ends, to keep attention's outputs [Attention Matching].

    The values are solved by regression over queries of a second reading of the prompt (as `kvzip` reads it): see Refit.

    Args:
        base: a policy or the name of one; its schedule becomes "prompt".
        **options: ridge, queries, instruction, chunk (see Refit), or options of the base.

    Raises:
        KVPatchError: an unknown option, a base that never evicts, or one that merges values already.

    Example:
        kvpatch.patched(model, kvpatch.refit("kvzip", floor=0.2), k=0.1)
    """
    return _combine_parts("refit", base, merging=Refit(), schedule="prompt").with_options(**options)


def _combine_parts(prefix: str, base: str | Policy, **part: Any) -> Policy:
    """Return a copy of `base`, named prefix_base, in which `part` replaces parts; `critical` and the like call it.

    Raises KVPatchError if the base never evicts, has a part of another class in a place that one of `part` takes, or keeps a
    prompt at whose end heads are to share a budget.
    """
    policy = base if isinstance(base, Policy) else get_policy(base)  # a name is looked up
    if not policy.evicts:
        raise KVPatchError(f"{prefix}({policy.name!r}): {policy.name!r} never evicts, so there is nothing to combine.")
    for name, does in (("over_heads", "shares a budget by"), ("selection", "selects by"), ("merging", "changes values by")):
        held = getattr(policy, name)
        if held is not None and type(part.get(name, held)) is not type(held):
            raise KVPatchError(
                f"{prefix}({policy.name!r}): {policy.name!r} {does} {type(held).__name__} already, and a policy has one of its "
                "kind: combine the policy that it was made of."
            )
    shares = part.get("over_heads")
    others = [one for one in policy.score.schedules if shares is not None and one in shares.schedules]
    if others and policy.schedule not in others:
        raise KVPatchError(
            f"{prefix}({policy.name!r}): {policy.name!r} keeps the prompt whole (schedule={policy.schedule!r}). Give "
            f"{prefix}(kvpatch.get_policy({policy.name!r}).with_options(schedule={others[-1]!r}))."
        )
    return dataclasses.replace(policy, name=f"{prefix}_{policy.name}", **part)


# fmt: off
POLICIES = {row.name: row for row in (
    Policy("full",            Never(),                schedule="both", source="the baseline: never evicts"),
    Policy("random",          Random(),               source="RoCo, baselines"),
    Policy("window",          Recency(),              source="RoCo 4.1"),
    Policy("dilated_window",  DilatedRecency(),       source="Keyformer Figure 2"),
    Policy("streaming_llm",   Recency(),              Scope(sinks=4), source="StreamingLLM"),
    Policy("key_attention",   Accumulated(),          source="Keyformer 2.3.1"),
    Policy("h2o",             Accumulated(),          Scope(recent=0.5), source="H2O"),
    Policy("scissorhands",    AccumulatedQuantized(), Scope(recent=0.5), source="ScissorHands"),
    Policy("tova",            Last(),                 source="TOVA"),
    Policy("roco",            Mean(),                 DeviationScope(recent=10), source="RoCo 4.3"),
    Policy("keyformer",       GumbelSoftmax(),        Scope(recent=0.3), source="Keyformer Algorithm 1"),
    Policy("snapkv",          ObservationWindow(),    schedule="prompt", source="SnapKV"),
    Policy("pyramidkv",       ObservationWindow(),    schedule="prompt", source="PyramidKV", over_layers=Pyramid()),
    Policy("adakv",           ObservationWindow(),    schedule="prompt", source="AdaKV", over_heads=Adaptive()),
    Policy("dropkv",          OutputChange(),         schedule="prompt", source="DropKV"),
    Policy("key_norm",        KeyNorm(),              source="L2-norm baseline"),
    Policy("key_diff",        KeyDiff(),              source="KeyDiff"),
    Policy("cur",             Cur(),                  Scope(sinks=4), source="CurDKV"),
    Policy("lag_kv",          LagKV(),                Scope(sinks=4), schedule="prompt", source="LagKV"),
    Policy("chunk_kv",        ObservationWindow(),    schedule="prompt", source="ChunkKV", selection=Chunked()),
    Policy("leverage",        Leverage(),             schedule="prompt", source="Compactor"),
    Policy("compactor",       Compactor(),            Scope(sinks=8, recent=4), schedule="prompt", source="Compactor"),
    Policy("expected_attention", ExpectedAttention(), Scope(sinks=4), schedule="prompt", source="Expected Attention"),
    Policy("q_filter",        QueryFilter(),          source="Q-Filters"),
    Policy("duo",             WholeHeads(),           Scope(sinks=128, recent=256), source="DuoAttention"),
    Policy("learned",         Learned(), Scope(sinks=4), schedule="prompt", source="KVzap", over_heads=Global(floor=0.5)),
    Policy("raas",            LastUse(),              schedule="decode", source="RaaS"),
    Policy("lazy",            Recurrence(),           Scope(recent=128), schedule="decode", source="LazyEviction", every=128),
    Policy("r_kv",            Redundancy(),           source="R-KV", every=128),
    Policy("tri_attention",   TriAttention(),         schedule="decode", source="TriAttention", every=128),
    Policy("vase",            SampledAttention(),     RangeScope(sinks=4), source="VaSE", every=64),
)}
# fmt: on
for _base in ("snapkv", "pyramidkv", "adakv"):
    _critical = dataclasses.replace(critical(POLICIES[_base]), source="CriticalKV Algorithms 1 and 2")
    POLICIES[_critical.name] = _critical
for _name, _score, _source in (("kvzip", Repeated(), "KVzip"), ("kvzip_plus", RepeatedOutputs(), "KVzip+")):
    POLICIES[_name] = Policy(_name, _score, Scope(sinks=4), schedule="prompt", source=_source, over_heads=Global(floor=0.0))
for _name, _shared in (("defensive_snapkv", Adaptive(floor=0.0)), ("layer_defensive", Global(floor=0.0))):
    _parts: dict[str, Any] = {"over_heads": _shared, "selection": TwoStage()}
    POLICIES[_name] = Policy(_name, Defensive(), schedule="prompt", source="DefensiveKV", **_parts)


def list_policies() -> tuple[str, ...]:
    """Return the names of all registered policies, in the order of the table."""
    return tuple(POLICIES)


def get_policy(name: str) -> Policy:
    """Look up a registered policy, or build a combination such as "critical(adaptive(roco))" from its name.

    Names are found in any case, and with any hyphens, underscores and spaces: "SnapKV", "Ada-KV".

    Raises:
        KVPatchError: an unknown name; the message suggests the nearest one.

    Example:
        kvpatch.get_policy("snapkv").with_options(window=16)
    """
    if isinstance(name, str) and (combined := COMBINED.fullmatch(name)) is not None:
        combine: Callable[[str], Policy] = globals()[combined[1].lower()]  # a function of this module
        return combine(combined[2])
    if isinstance(name, Score):
        raise KVPatchError(f"{name!r} is a score, which is one part of a policy: give Policy('my_policy', {name!r}).")
    registered = match_name(name, POLICIES)
    if registered is None:
        raise refuse_name(name, POLICIES)
    return POLICIES[registered]


def register_policy(name: str, policy: Policy, *, exist_ok: bool = False) -> None:
    """Add a policy to the table POLICIES under a name, for `patched(model, policy=name)` and the command line.

    Args:
        name: an identifier.
        policy: what it names.
        exist_ok: replace a policy of that name, as a notebook's cell does that is run again.

    Raises:
        KVPatchError: `name` is taken, in any spelling of it, or not an identifier, or `policy` is not a Policy.

    Example:
        kvpatch.register_policy("h2o_sinks", kvpatch.get_policy("h2o").with_options(sinks=4))
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise KVPatchError(f"A policy's name must be an identifier such as 'my_policy', not {name!r}.")
    registered = match_name(name, POLICIES)  # "TOVA" is found as "tova"
    if registered is not None and not (exist_ok and registered == name):
        raise KVPatchError(
            f"A policy named {registered!r} is already registered; choose another name, or pass exist_ok=True to replace it."
        )
    if not isinstance(policy, Policy):
        raise KVPatchError(
            f"register_policy takes a kvpatch.Policy, not {type(policy).__name__}: build one from a score and a scope, "
            "or change a named one with get_policy('h2o').with_options(recent=0.1)."
        )
    POLICIES[name] = dataclasses.replace(policy, name=name)


def unregister_policy(name: str) -> None:
    """Remove a policy from the table POLICIES, so that `patched` and the command line no longer know its name.

    Raises:
        KVPatchError: there is no policy of that name.
    """
    registered = match_name(name, POLICIES)
    if registered is None:
        raise refuse_name(name, POLICIES)
    del POLICIES[registered]
