"""Random runs of what each mechanism of the newer policies adds, beside the oracle: any shape, padding and rhythm."""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvpatch
from tests.helpers.comparing import CALIBRATED, DECODING, SMALL, SMALL_STEPS, WAITING, WINDOWED, agrees, certain
from tests.helpers.tiny import MODELS

SUMS = {"h2o": {}, "roco": {"protected": 3}, "keyformer": {}, "scissorhands": {}, "key_attention": {}}
ONCE = ("snapkv", "dropkv", "expected_attention", "leverage", "lag_kv")
# the policies that show it, what is put around them, and the budget where it is not a share or a number of tokens
MECHANISMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "entries of keys and values": (("cur", "lag_kv"), (), ""),
    "held keys": (("key_diff", "leverage", "compactor"), (), ""),
    "query moments": (("expected_attention",), (), ""),
    "probes": (("tri_attention", "q_filter"), (), ""),
    "recent queries": (("r_kv", "vase"), (), ""),
    "steps of use": (("raas", "lazy"), (), ""),
    "every": ((*SUMS, "window", "tova", "key_norm", "key_diff", "cur"), (), ""),
    "sums of values and outputs": (("dropkv",), (), ""),
    "an observation window's maximum": (("defensive_snapkv", "layer_defensive"), (), ""),
    "second reading": (("kvzip", "kvzip_plus"), (), ""),
    "one ranking of all heads": ((*SUMS, *ONCE, "cur"), ("global_topk",), ""),
    "tables": ((*SUMS, "tova", "snapkv"), (), "table"),
    "Share": ((*SUMS, "tova", "snapkv"), (), "share"),
    "Mass": ((*SUMS, "snapkv"), (), "mass"),
    "Threshold": ((*SUMS, "tova", "snapkv"), (), "threshold"),
    "chunks": (("h2o", "key_norm", *ONCE), ("chunked",), ""),
    "merging": (("h2o", "key_norm", "cur", *ONCE), ("merged",), ""),
    "refitting": (("h2o", "key_norm", "kvzip", *ONCE), ("refit",), ""),
    "whole heads": (("duo",), (), "heads"),
    "a learned map": (("learned",), (), ""),
}
UNTURNED = ("mpt", "gpt2", "falcon_alibi", "bloom")  # keys without a rotation
PART = st.floats(0.05, 0.99)


def budget(kind: str) -> st.SearchStrategy[Any]:
    """Budgets of a kind; tables for two layers of two heads."""
    size = st.one_of(st.integers(3, 40), PART)
    return {
        "": st.one_of(PART, st.integers(3, 40)),
        "heads": PART,
        "table": st.lists(st.lists(size, min_size=2, max_size=2), min_size=2, max_size=2),
        "share": PART.map(kvpatch.Share),
        "mass": st.builds(kvpatch.Mass, PART, floor=st.integers(1, 9), ceiling=st.none() | st.integers(10, 30)),
        "threshold": st.floats(0.0, 0.5).map(kvpatch.Threshold),
    }[kind]


@st.composite
def runs(draw: Any, mechanism: str) -> dict[str, Any]:
    """Arguments of `agrees`."""
    policies, wrap, kind = MECHANISMS[mechanism]
    policy = draw(st.sampled_from(policies))
    own, row = dict(SMALL.get(policy, {}) | SMALL_STEPS.get(policy, {}) | SUMS.get(policy, {})), kvpatch.get_policy(policy)
    waits = policy in WAITING or bool(wrap)
    if policy in (*DECODING, "tri_attention"):
        own["every"] = draw(st.sampled_from((1, 2, 3)))
    elif len(row.score.schedules) == 3 and not wrap and policy != "duo":
        own["schedule"] = draw(st.sampled_from(("both", "both", "prompt")))
    if mechanism == "every":
        own |= {"every": draw(st.integers(2, 3)), "schedule": draw(st.sampled_from(("both", "decode")))}
    if policy in SUMS and policy != "key_attention":
        own["recent"] = draw(st.integers(0, 3))
    if policy in WINDOWED:
        own["window"] = draw(st.integers(1, 6))
    whole = waits or own.get("schedule", row.schedule) == "decode" or policy in CALIBRATED
    own["block"] = None if whole else draw(st.none() | st.integers(2, 20))
    pads = draw(st.lists(st.just(0) | st.integers(0, 12), min_size=1, max_size=3))
    two = kind in ("table",)
    name = draw(st.sampled_from(("llama_gqa", "mistral_sliding") if two else tuple(MODELS)))
    assume(name not in UNTURNED or policy != "tri_attention")
    return {
        "name": name,
        "policy": policy,
        "k": draw(budget(kind)),
        "n": max(pads) + draw(st.integers(1, 34)),
        "steps": draw(st.integers(0, 12)),
        "pads": tuple(pads),
        "weights": draw(st.integers(0, 1000)),
        "wrap": wrap,
        "sinks": draw(st.integers(0, 3)),
        **own,
    }


FEW, MANY = 12, 300
RUNS = FEW if settings.default.derandomize else MANY  # `pytest --hypothesis-profile=wide` draws as many


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_any_run(mechanism: str) -> None:
    decided = 0

    @settings(max_examples=RUNS, suppress_health_check=list(HealthCheck))
    @given(runs(mechanism))
    def run(arguments: dict[str, Any]) -> None:
        nonlocal decided
        decided += agrees(**arguments)

    run()
    print(f"{mechanism}: {decided} runs decided")
    assert decided >= RUNS / 2


FOUND = {
    "a protected token that has left the sliding window weighs nothing": {
        "name": "mistral_sliding", "policy": "h2o", "k": kvpatch.Mass(0.5), "n": 1, "steps": 13, "pads": (0,),
        "sinks": 1, "recent": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_found_by_random_runs(what: str) -> None:
    certain(**FOUND[what])


def test_every_policy_of_decode_steps_calibrations_and_one_budget_shows_a_mechanism() -> None:
    shown = {policy for policies, _, _ in MECHANISMS.values() for policy in policies}
    assert {*CALIBRATED, *DECODING, *WAITING} <= shown
