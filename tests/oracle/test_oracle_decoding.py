"""The oracle beside policies that look at what decode steps do: several evictions, some of many tokens at once."""

import pytest

import kvpatch
from tests.helpers.comparing import DECODING, certain
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
