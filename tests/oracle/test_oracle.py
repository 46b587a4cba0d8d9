"""Invariant 4: kept positions and logits equal the oracle's, for every policy, architecture, padding and dtype.

The oracle runs each row alone, unpadded, in float64; the library runs them as one left-padded batch. Where a decision
hangs on a difference below a rounding error (Run.margin) two right answers exist, and the case is drawn again.
"""

import functools

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvpatch
from tests.helpers.comparing import (
    ANY_SCHEDULE,
    EVICTING,
    ONCE,
    SMALL,
    WINDOWED,
    agrees,
    certain,
    draw,
    sorted_positions,
)
from tests.helpers.tiny import FIVE, MODELS, force, left_pad, make, prompt
from tests.oracle import reference


@pytest.mark.every
@pytest.mark.parametrize("policy", ["full", *EVICTING])
@pytest.mark.parametrize("name", MODELS)
def test_every_policy_on_every_architecture(name, policy):
    certain(name, policy, 0.4, **SMALL.get(policy, {}))


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_one_length(name, policy):
    """Without padding all layers are alike, and a step evicts for all of them at once (attention/stacked.py)."""
    certain(name, policy, 0.4, pads=(0, 0), steps=10, **SMALL.get(policy, {}))


@pytest.mark.parametrize("policy", EVICTING)
def test_float32(policy):
    certain("llama_gqa", policy, 0.4, dtype=torch.float32, **SMALL.get(policy, {}))


OPTIONS = [
    ("keyformer", {"noise": "gaussian"}),
    ("keyformer", {"noise": "constant"}),
    ("keyformer", {"noise": "none"}),
    ("keyformer", {"resample": True}),
    ("keyformer", {"resample": True, "noise": "gaussian", "tau": (0.7, 3.0)}),
    ("keyformer", {"tau": (0.5, 2.5), "generation_length": 6}),
    ("keyformer", {"shared": True}),
    ("keyformer", {"shared": True, "damping": 0.9}),
    ("keyformer", {"damping": 0.5, "recent": 3}),
    ("tova", {"heads": "each"}),
    ("roco", {"recent": 2, "protected": 0.25}),
    ("roco", {"recent": 0, "protected": 4}),
    ("roco", {"protected": 1.0, "sinks": 3}),
    ("h2o", {"recent": 1.0}),
    ("h2o", {"recent": 2, "sinks": 20}),
    ("scissorhands", {"recent": 0}),
    ("dilated_window", {"dilation": 2}),
    ("snapkv", {"window": 4, "kernel": 5, "pooling": "avg"}),
    ("snapkv", {"window": 3, "kernel": 1, "pooling": None}),
    ("snapkv", {"window": 40}),
    ("snapkv", {"window": 4, "kernel": 3, "sinks": 2}),
    ("streaming_llm", {"sinks": 6}),
    ("defensive_snapkv", {"window": 4, "kernel": 5, "pooling": "max", "floor": 0.3}),
    ("defensive_snapkv", {"window": 6, "pooling": None, "sinks": 3, "alpha": 0.2}),
    ("layer_defensive", {"window": 4, "kernel": 1}),
    ("dropkv", {}),
    ("dropkv", {"window": 4, "kernel": 1, "pooling": None}),
    ("dropkv", {"window": 6, "kernel": 5, "pooling": "max", "sinks": 2}),
    ("kvzip", {}),
    ("kvzip", {"chunk": 7, "instruction": (5, 9)}),
    ("kvzip", {"chunk": 9, "instruction": ((1, 2, 3), (4, 5), (6,)), "sinks": 2, "floor": 0.3}),
    ("kvzip", {"chunk": 1, "sinks": 0, "recent": 3}),
    ("kvzip_plus", {"chunk": 7, "instruction": (5, 9)}),
    ("layer_defensive", {"window": 3, "floor": 0.5, "norm": 2}),
    ("cur", {"window": 7, "combine": "mean", "sinks": 0}),
    ("cur", {"window": 3, "combine": "key"}),
    ("cur", {"window": 1, "combine": "value"}),
    ("cur", {"window": 40}),
    ("lag_kv", {"lag": 2, "sinks": 0}),
    ("lag_kv", {"lag": 9, "sinks": 3}),
    ("lag_kv", {"lag": 4, "recent": 3}),
    ("lag_kv", {"lag": 14}),
    ("key_diff", {"sinks": 2, "recent": 4}),
    ("leverage", {}),
    ("leverage", {"sketch": 1, "sinks": 3}),
    ("compactor", {}),
    ("compactor", {"sketch": 3, "chunk": 4, "sinks": 0, "recent": 0, "blend": 2.0}),
    ("compactor", {"sketch": 3, "chunk": 9, "sinks": 5, "recent": 0.3, "blend": 0}),
    ("expected_attention", {}),
    ("expected_attention", {"future": 1, "sinks": 0}),
    ("expected_attention", {"future": 70, "eps": 0.02, "sinks": 2}),
    ("expected_attention", {"covariance": False, "recent": 5}),
    ("expected_attention", {"future": 5, "sinks": 9}),
]


@pytest.mark.parametrize(("policy", "options"), OPTIONS, ids=[f"{p}-{o}" for p, o in OPTIONS])
def test_options(policy, options):
    for name, pads in (("llama_gqa", (0, 9)), ("mistral_sliding", (0,)), ("mpt", (0, 0))):
        certain(name, policy, 0.4, pads=pads, **options)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_channels_of_values_that_are_constant(name):
    def make_pruned(seed):
        model = make(name, dtype=torch.float64, seed=seed)
        for at, parameter in model.named_parameters():
            if "v_proj.weight" in at:
                parameter.data[::3] = 0
            elif "c_attn.weight" in at:  # its columns are queries, keys and values
                parameter.data[:, -parameter.shape[1] // 3 :: 3] = 0
        return model

    assert any(agrees(name, "lag_kv", 0.4, model=make_pruned(seed), weights=seed, lag=4) for seed in range(6))


@pytest.mark.parametrize("schedule", ["prompt", "decode", "both"])
@pytest.mark.parametrize("policy", ANY_SCHEDULE)
def test_schedules(policy, schedule):
    certain("llama_gqa", policy, 0.25, schedule=schedule, steps=14, sinks=1)


@pytest.mark.parametrize("policy", ANY_SCHEDULE)
def test_a_budget_above_the_prompt(policy):
    """The cache fills up first, then evicts."""
    for pads in ((0, 0), (0, 9)):
        certain("llama_gqa", policy, 34, pads=pads, steps=12)


def test_protect():
    mask = torch.zeros(30, dtype=torch.bool)
    mask[[11, 14, 27]] = True
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 30), prompt(1, 8, seed=2)
    for policy in ("h2o", "window", "roco", "keyformer"):
        with kvpatch.patched(model, policy, 9, protect=mask, sinks=2):
            logits, cache = force(model, ids, fed)
        want = reference.run(
            model, ids[0].tolist(), fed[0].tolist(), policy=policy, k=9, protect=mask.tolist(), sinks=2,
            draw=functools.partial(draw, 0),
        )  # fmt: skip
        assert sorted_positions([cache.positions(layer)[0].tolist() for layer in range(2)]) == want.kept[-1]
        torch.testing.assert_close(logits[0], want.logits[-9:], atol=1e-5, rtol=0)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    name=st.sampled_from(tuple(MODELS)),
    policy=st.sampled_from(EVICTING),
    n=st.integers(1, 34),
    steps=st.integers(0, 9),
    pad=st.integers(0, 10),
    k=st.one_of(st.floats(0.02, 0.98), st.integers(1, 40), st.tuples(st.integers(1, 20), st.floats(0.1, 0.9)).map(list)),
    sinks=st.integers(0, 5),
    recent=st.one_of(st.none(), st.integers(0, 8), st.floats(0.0, 1.0)),
    weights=st.integers(0, 1000),
)
def test_any_shape(name, policy, n, steps, pad, k, sinks, recent, weights):
    if isinstance(k, list) and "pyramid" in policy:
        k = k[0]
    options = {"sinks": sinks} | ({} if recent is None or policy in WINDOWED else {"recent": recent})
    assume(agrees(name, policy, k, n=n + pad, steps=steps, pads=(0, pad), weights=weights, **options))


def test_generate_passes_its_length_to_tau():
    """generate() spreads tau over its own number of new tokens: another length would keep other tokens."""
    differs = 0
    for weights in range(4):
        model, ids = make("llama_gqa", dtype=torch.float64, seed=weights), prompt(1, 30, seed=weights)
        with kvpatch.patched(model, "keyformer", 0.5, tau=(1.0, 9.0), recent=2) as patch:
            out = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
            held = [p.tolist() for p in patch.report().positions]
        oracle = functools.partial(
            reference.run, model, ids[0].tolist(), out[0, 30:-1].tolist(), policy="keyformer", k=0.5, tau=(1.0, 9.0),
            recent=2, draw=functools.partial(draw, 0),
        )  # fmt: skip
        want, other = oracle(generation_length=20), oracle(generation_length=10**9)
        if want.margin < 1e-6:
            continue
        mine = sorted_positions([layer[0] for layer in held])
        assert mine == want.kept[-1]
        differs += mine != other.kept[-1]
    assert differs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FIVE)
def test_half_precision(name, dtype):
    """Where the kept set does not hang on rounding, logits follow the float64 oracle as closely as the dtype allows."""
    model = make(name, dtype=torch.float32)
    ids, fed = prompt(2, 30), prompt(2, 8, seed=2)
    mask = left_pad(ids, [30, 21])
    for policy in ("window", "streaming_llm", "dilated_window"):
        want = [
            reference.run(model, ids[row, 30 - n :].tolist(), fed[row].tolist(), policy=policy, k=0.4).logits[-9:]
            for row, n in enumerate((30, 21))
        ]
        half = make(name, dtype=dtype)
        with kvpatch.patched(half, policy, 0.4):
            got, cache = force(half, ids, fed, mask)
        assert cache.layers[0].keys.dtype == dtype
        error = (got.double() - torch.stack(want)).abs().mean() / torch.stack(want).abs().mean()
        assert error < (0.03 if dtype == torch.bfloat16 else 0.004), (policy, float(error))
    for policy in EVICTING:
        with kvpatch.patched(half, policy, 0.4):
            logits, cache = force(half, ids, fed, mask)
        assert torch.isfinite(logits).all()
        assert policy in ONCE or cache.held(1).tolist() == [[12] * cache.held(1).shape[1], [8] * cache.held(1).shape[1]]
