"""The oracle's word on budgets that are no single size: tables, shares of what was seen, mass, threshold."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvpatch import Mass, Share, Threshold
from tests.helpers.comparing import SMALL, agrees, certain

SUMS = {
    "h2o": {"recent": 3},
    "roco": {"recent": 2, "protected": 4},
    "keyformer": {"recent": 0},
    "scissorhands": {"recent": 2},
    "key_attention": {"recent": 1},
}
ONCE = {name: SMALL[name] for name in ("snapkv", "expected_attention")} | {"cur": {"window": 4, "schedule": "prompt"}}

RUNS = {
    # ---- tables: k[layer][head] ----
    "h2o-table-even": ("h2o", [[9, 9], [9, 9]], {"pads": (0, 0)}),
    "h2o-table": ("h2o", [[4, 21], [26, 3]], {}),
    "h2o-table-shares": ("h2o", [[0.2, 0.7], [0.5, 0.45]], {"pads": (0, 0)}),
    "h2o-table-one": ("h2o", [[1.0, 6], [0.3, 1.0]], {}),
    "h2o-table-layer": ("h2o", [[1.0, 1.0], [12, 5]], {}),
    "h2o-table-above": ("h2o", [[33, 8], [36, 40]], {"steps": 14}),
    "h2o-table-every": ("h2o", [0.4, [3, 17]], {"every": 3, "recent": 2}),
    "h2o-table-decode": ("h2o", [[4, 17], [9, 0.5]], {"schedule": "decode", "steps": 16}),
    "h2o-table-prompt": ("h2o", [[4, 17], [9, 0.5]], {"schedule": "prompt", "sinks": 3}),
    "h2o-table-block": ("h2o", [[4, 17], [9, 0.5]], {"block": 7}),
    "h2o-table-critical": ("h2o", [[4, 17], [9, 0.5]], {"wrap": ("critical",)}),
    "h2o-table-renumbered": ("h2o", [[4, 17], [9, 0.5]], {"positions": "renumbered"}),
    "h2o-table-bits": ("h2o", [[4, 17], [9, 0.5]], {"bits": 8}),
    "tova-table": ("tova", [[4, 17], [9, 0.5]], {"dtype": torch.float32}),
    "snapkv-table": ("snapkv", [[4, 17], [9, 0.5]], SMALL["snapkv"]),
    # ---- a share of what was seen ----
    "h2o-share-small": ("h2o", Share(0.05), {"steps": 14}),
    "h2o-share": ("h2o", Share(0.37), {"steps": 14}),
    "h2o-share-large": ("h2o", Share(0.9), {"pads": (0, 0), "steps": 14}),
    "h2o-share-block": ("h2o", Share(0.5), {"block": 6}),
    "h2o-share-renumbered": ("h2o", Share(0.5), {"positions": "renumbered"}),
    "h2o-share-bits": ("h2o", Share(0.5), {"bits": 4}),
    "tova-share": ("tova", Share(0.5), {"pads": (0, 0), "steps": 14}),
    "roco-share-and-size": ("roco", [Share(0.3), 9], {"sinks": 2}),
    "snapkv-share": ("snapkv", Share(0.5), {"wrap": ("adaptive",), **SMALL["snapkv"]}),
    # ---- mass ----
    **{f"{policy}-mass": (policy, Mass(0.89), options) for policy, options in {**SUMS, **ONCE}.items()},
    "key_attention-mass-even": ("h2o", Mass(0.7), {"recent": 0, "pads": (0, 0), "steps": 14}),
    "h2o-mass-floor": ("h2o", Mass(0.6, floor=12), {"recent": 3, "steps": 14}),
    "h2o-mass-shares": ("h2o", Mass(0.89, floor=0.3, ceiling=0.6), {"steps": 14}),
    "h2o-mass-ceiling": ("h2o", Mass(0.89, ceiling=32), {"steps": 12, "pads": (0, 0)}),
    "h2o-mass-ceiling-alone": ("h2o", Mass(1.0, ceiling=11), {"recent": 2, "steps": 12}),
    "h2o-mass-decode": ("h2o", Mass(0.89), {"recent": 2, "schedule": "decode", "steps": 16, "sinks": 2}),
    "h2o-mass-decode-floor": ("h2o", Mass(0.2, floor=7), {"recent": 1, "schedule": "decode", "steps": 16}),
    "h2o-mass-prompt": ("h2o", Mass(0.89), {"recent": 2, "schedule": "prompt"}),
    "h2o-mass-block": ("h2o", Mass(0.89), {"recent": 2, "block": 7, "dtype": torch.float32}),
    "snapkv-mass-block": ("snapkv", Mass(0.89), {"block": 9, **SMALL["snapkv"]}),
    "h2o-mass-renumbered": ("h2o", Mass(0.89), {"recent": 2, "positions": "renumbered", "bits": 8}),
    "h2o-mass-and-size": ("h2o", [Mass(0.8), 0.4], {"recent": 2}),
    "keyformer-mass-shared": ("keyformer", Mass(0.89), {"recent": 2, "shared": True}),
    # ---- threshold ----
    "roco-threshold": ("roco", Threshold(0.02), {"recent": 3, "protected": 0, "steps": 14}),
    "roco-threshold-zero": ("roco", Threshold(0.0), {"recent": 3, "protected": 0}),
    "key_attention-threshold": ("key_attention", Threshold(0.3), {"recent": 1, "pads": (0, 0), "steps": 14}),
    "key_attention-threshold-high": ("key_attention", Threshold(9.0), {}),
    "keyformer-threshold": ("keyformer", Threshold(0.3), {"recent": 2}),
    "tova-threshold-block": ("tova", Threshold(0.02), {"recent": 4, "block": 8}),
    "snapkv-threshold": ("snapkv", Threshold(0.02), SMALL["snapkv"]),
    "h2o-threshold-decode": ("h2o", Threshold(0.2), {"recent": 2, "schedule": "decode", "steps": 16}),
}


@pytest.mark.parametrize("name", RUNS)
def test_kept_tokens_and_logits(name):
    policy, k, options = RUNS[name]
    certain("llama_gqa", policy, k, **options)


HEADS = {"mistral_sliding": 2, "mpt": 4, "gpt2": 4}


@pytest.mark.parametrize("name", HEADS)
def test_other_architectures(name):
    H = HEADS[name]
    certain(name, "h2o", [[4 + 5 * g for g in range(H)], [12] * H], pads=(0, 6))
    certain(name, "h2o", Share(0.4), pads=(0, 6))
    certain(name, "h2o", Mass(0.85), pads=(0, 6), recent=2)
    certain(name, "tova", Threshold(0.02), pads=(0, 6), recent=2)


@st.composite
def runs(draw):
    """Arguments of `agrees`: any budget of these under a policy that takes it, on any shape."""
    pads = draw(st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=1, max_size=3))
    policy = draw(st.sampled_from([*SUMS, "snapkv"]))
    size, part = st.one_of(st.integers(1, 40), st.floats(0.05, 1.0)), st.floats(0.05, 0.99)
    k = draw(st.one_of(
        st.lists(st.lists(size, min_size=2, max_size=2), min_size=2, max_size=2),
        part.map(Share),
        st.builds(Mass, part, floor=st.integers(1, 9), ceiling=st.one_of(st.none(), st.integers(10, 30))),
        st.floats(0.0, 0.5).map(Threshold),
    ))  # fmt: skip
    options = {"sinks": draw(st.integers(0, 3)), "block": draw(st.one_of(st.none(), st.integers(1, 20)))}
    if policy == "snapkv":
        options |= {"window": draw(st.integers(1, 8))}
    else:
        options |= {**SUMS[policy], "schedule": draw(st.sampled_from(["prompt", "both"])), "recent": draw(st.integers(0, 6))}
    n, steps = max(pads) + draw(st.integers(1, 34)), draw(st.integers(0, 16))
    weights = draw(st.integers(0, 99))
    return {"policy": policy, "k": k, "n": n, "steps": steps, "pads": tuple(pads), "weights": weights, **options}


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(runs())
def test_any_shape(arguments):
    assume(agrees("llama_gqa", **arguments))
