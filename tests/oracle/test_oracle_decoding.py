"""The oracle beside policies that look at what decode steps do: several evictions, some of many tokens at once."""

import pytest

import kvpatch
from tests.helpers.comparing import CALIBRATED, DECODING, certain
from tests.helpers.tiny import MODELS

STEPS = 16
CASES = {
    "raas": [{"alpha": 0.05}, {"alpha": 0.05, "every": 4}],
    "r_kv": [
        {"window": 3, "kernel": 3, "every": 3},
        {"window": 2, "every": 1, "kernel": 1, "weight": 0.8, "alike": None, "sinks": 1, "schedule": "decode"},
    ],
    "vase": [
        {"window": 3, "kernel": 3, "every": 3, "sinks": 1, "ranges": 0.4},
        {"window": 2, "every": 1, "pooling": "max", "ranges": 2, "schedule": "decode"},
    ],
    "lazy": [{"alpha": 0.05, "recent": 2, "every": 4}, {"alpha": 0.03, "recent": 0, "every": 1}],
}
EACH = [(policy, options) for policy in DECODING for options in CASES[policy]]


@pytest.mark.parametrize(("policy", "options"), EACH, ids=[f"{p}-{i}" for i, (p, _) in enumerate(EACH)])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(name, policy, options):
    certain(name, policy, 6 if kvpatch.get_policy(policy).schedule == "decode" else 9, steps=STEPS, **options)


UNTURNED = ("mpt", "gpt2", "falcon_alibi", "bloom")  # which tri_attention refuses
PROBES = [{"every": 3}, {"every": 1, "reach": 9, "schedule": "both", "sinks": 1}]
CALIBRATIONS = [("tri_attention", options) for options in PROBES] + [("q_filter", {"every": 2}), ("q_filter", {"recent": 3})]
CALIBRATIONS += [("duo", {"sinks": 2, "recent": 5}), ("duo", {"sinks": 0, "recent": 7, "every": 3, "schedule": "decode"})]
CALIBRATIONS += [("learned", {}), ("learned", {"schedule": "both", "every": 2, "sinks": 1, "floor": 0.5})]


@pytest.mark.parametrize(("policy", "options"), CALIBRATIONS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(CALIBRATIONS)])
@pytest.mark.parametrize("name", MODELS)
def test_by_a_calibration(name, policy, options):
    assert {policy for policy, _ in CALIBRATIONS} == {*CALIBRATED}
    if policy == "tri_attention" and name in UNTURNED:
        with pytest.raises(kvpatch.KVPatchError, match="positions that are rotations"):
            certain(name, policy, 6, **options)
        return
    schedule = options.get("schedule", kvpatch.get_policy(policy).schedule)
    certain(name, policy, {"duo": 0.5}.get(policy, 6 if schedule == "decode" else 9), steps=STEPS, **options)
