"""Quotas of spans against the oracle: every policy, batches with padding, budgets that heads share, blocks and decode steps."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvpatch
from tests.helpers.comparing import ANY_SCHEDULE, EVICTING, ONCE, SMALL, SMALL_STEPS, agrees, certain
from tests.helpers.tiny import force, make, prompt

THREE = [-1, *[0] * 5, *[1] * 13, -1, -1, *[2] * 9]  # of 30 columns; the batch's second row begins at the tenth


@pytest.mark.parametrize("policy", EVICTING)
def test_every_policy(policy):
    certain("llama_gqa", policy, 0.4, quota=THREE, **SMALL.get(policy, {}))


@pytest.mark.parametrize("policy", ["r_kv", "vase", "q_filter", "learned"])
def test_policies_that_look_at_steps_or_were_calibrated(policy):
    certain("llama_gqa", policy, 11, quota=THREE, steps=14, **SMALL_STEPS.get(policy, {}))


@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer", "tova", "snapkv", "critical_adakv", "layer_defensive"])
@pytest.mark.parametrize("name", ["mistral_sliding", "mpt", "gpt2"])
def test_other_models(name, policy):
    certain(name, policy, 0.3, quota=THREE, sinks=1, **SMALL.get(policy, {}))


@pytest.mark.parametrize("policy", ANY_SCHEDULE)
def test_blocks(policy):
    """A span is longer than what a block has read of it."""
    if not kvpatch.get_policy(policy).over_model:
        certain("llama_gqa", policy, 9, block=4, quota=THREE, sinks=1)


WRAPS = [("adaptive",), ("global_topk",), ("critical",), ("adaptive", "critical"), ("chunked",), ("pyramid",), ("merged",)]


@pytest.mark.parametrize("wrap", WRAPS, ids="+".join)
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_combinations(policy, wrap):
    given = {"schedule": "prompt"} if {"chunked", "merged"} & {*wrap} else {}
    certain("llama_gqa", policy, 0.4, quota=THREE, wrap=wrap, **SMALL.get(policy, {}), **given)


@pytest.mark.parametrize("k", [kvpatch.Share(0.4), [7, 0.4], [[4, 9], 8]], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "roco"])
def test_budgets(policy, k):
    certain("llama_gqa", policy, k, quota=THREE, steps=14)


def test_spans_of_one_length():
    """Only their numbers tell them apart."""
    for policy in ("h2o", "tova", "key_norm"):
        certain("llama_gqa", policy, 0.4, quota=[0] * 15 + [1] * 15, recent=2)


def test_the_cache_fills_up_first():
    for policy in ("h2o", "roco", "window"):
        certain("llama_gqa", policy, 34, quota=THREE, steps=12)


@pytest.mark.parametrize("every", [2, 5])
def test_rhythm(every):
    certain("llama_gqa", "h2o", 10, quota=THREE, steps=14, every=every)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    policy=st.sampled_from(EVICTING),
    numbers=st.lists(st.integers(-1, 3), min_size=2, max_size=34).filter(lambda one: max(one) >= 0),
    runs=st.integers(1, 4),
    steps=st.integers(0, 9),
    pad=st.integers(0, 8),
    k=st.one_of(st.floats(0.02, 0.98), st.integers(1, 40)),
    sinks=st.integers(0, 5),
    recent=st.one_of(st.none(), st.integers(0, 8), st.floats(0.0, 1.0)),
    weights=st.integers(0, 1000),
)
def test_any_spans(policy, numbers, runs, steps, pad, k, sinks, recent, weights):
    quota = [number for number in numbers for _ in range(runs)][:40]
    assume(len(quota) > pad)
    options = {} if recent is None or policy in ONCE else {"recent": recent}
    options |= {"quota": quota, "sinks": sinks}
    assume(agrees("llama_gqa", policy, k, n=len(quota), steps=steps, pads=(0, pad), weights=weights, **options))


def keep(quota):
    """The positions that each head of each layer keeps."""
    model = make("llama_gqa", dtype=torch.float64)
    with kvpatch.patched(model, "h2o", 0.4, recent=2, quota=quota):
        _, cache = force(model, prompt(1, 30), prompt(1, 8, seed=2))
    return [cache.positions(layer).tolist() for layer in range(2)]


def test_numbers_and_spans_are_one():
    numbers = torch.tensor(THREE)
    kept = [keep(quota) for quota in ([(1, 6), (6, 19), (21, 30)], numbers, numbers[None])]
    assert kept[0] == kept[1] == kept[2] != keep(None)
