"""What `check` finds: mistakes in what a policy evicts, scores that are NaN, and budgets that evict nothing on its tokens."""

import dataclasses
import math

import pytest
import torch

import kvpatch
from kvpatch.cache.cache import EvictingCache
from kvpatch.evaluation.check import Checks
from kvpatch.evaluation.check_table import compare_logits
from kvpatch.evaluation.masked import measure_rounding
from tests.helpers import tiny, tiny_families

OWN = "what {} evicts is masked the same"
FORGOTTEN = "tokens that are forgotten are masked the same"


def failed(table):
    return [result.name for result in table if not result.passed]


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv", "critical_pyramidkv", "random", "keyformer"])
def test_the_policys_own_evictions_are_compared(policy):
    table = kvpatch.check_model(tiny.make("llama_gqa"), policy, 0.4)
    assert failed(table) == []
    detail = next(result.detail for result in table if result.name == OWN.format(policy))
    assert "tokens evicted per head, off by" in detail


@pytest.mark.parametrize("policy", ["merged(h2o)", "refit(snapkv)"])
def test_a_policy_that_changes_values_evicts_as_the_masked_model(policy):
    """A masked model has no other values, so that they are left as they are where the two are compared."""
    assert failed(kvpatch.check_model(tiny.make("llama_gqa"), policy, 0.4)) == []


@pytest.mark.parametrize("name", ["mpt", "bloom", "falcon_alibi", "gpt2", "mistral_sliding"])
def test_every_kind_of_positions(name):
    assert failed(kvpatch.check_model(tiny.make(name), "h2o", 0.4)) == []


def test_layers_that_slide_and_sinks():
    for name in ("gemma2", "gpt_oss"):
        assert failed(kvpatch.check_model(tiny_families.make(name), "roco", 9)) == []


def test_a_policy_that_holds_other_tokens_than_it_says(monkeypatch):
    """Positions that are off by one: the window of the second check is known in advance, so only its own check sees them."""
    model, real = tiny.make("llama_gqa"), EvictingCache.positions

    def positions(cache, layer):
        held = real(cache, layer)
        return torch.where(held > 2, held - 1, held) if cache.settings.policy.name == "h2o" else held

    monkeypatch.setattr(EvictingCache, "positions", positions)
    assert failed(kvpatch.check_model(model, "h2o", 0.4)) == [OWN.format("h2o"), FORGOTTEN]


class NoNumbers(kvpatch.Score):
    """A score that is no number."""

    def value(self, context):
        return torch.full(context.positions_BHT.shape, float("nan"))


@pytest.mark.parametrize("k", [0.5, 12])
def test_scores_that_are_nan_fail(k):
    policy = dataclasses.replace(kvpatch.get_policy("key_norm"), name="nan", score=NoNumbers())
    table = kvpatch.check_model(tiny.make("llama"), policy, k)
    assert OWN.format("nan") in failed(table)
    assert "scores" in next(result.detail for result in table if result.name == OWN.format("nan"))


def test_a_large_budget_is_checked_on_a_longer_text_or_said_not_to_be():
    model = tiny.make("llama_gqa")
    for k, words in ((200, "tokens evicted per head"), ("2GB", "NOTHING EVICTED of"), (1.0, "NOTHING EVICTED of")):
        table = kvpatch.check_model(model, "h2o", k)
        assert failed(table) == []
        assert words in next(result.detail for result in table if result.name == OWN.format("h2o"))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(kvpatch.KVPatchError, match=r"training mode fills no cache.*model\.eval\(\)"):
        kvpatch.check_model(tiny.make("gpt2").train(), "h2o")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_tolerance_comes_from_the_models_own_rounding(dtype):
    model = tiny.make("llama", dtype=dtype)
    checks = Checks(model, "window")
    moved = measure_rounding(model, checks.target.list_mixers(), checks.ids_BT, {})
    assert checks.tolerance == 6 * moved
    unit = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    assert 6 * unit <= checks.tolerance < 60 * unit
    table = kvpatch.check_model(model, "h2o", 0.4)
    assert failed(table) == [] and ("float32 would tell more" in table.note) == (dtype == torch.bfloat16)
    assert model.model.layers[0].self_attn._forward_hooks == {} == model.model.layers[0].self_attn._forward_pre_hooks


def test_logits_that_are_nan_without_the_patch_too_are_left_out():
    """In float64, padding makes an unpatched MPT's logits NaN; what is NaN under the patch alone still fails."""
    table = kvpatch.check_model(tiny.make("mpt", dtype=torch.float64), "h2o", 0.4)
    assert failed(table) == [] and "40% of the logits are NaN or infinite unpatched too" in next(iter(table)).detail
    expected, nan = torch.tensor([1.0, 2.0, -math.inf]), math.nan
    assert compare_logits("cut", torch.tensor([1.0, 2.0, -math.inf]), expected, "", 0.1).passed
    for got, wanted in (([1.0, nan, 0.0], expected), ([1.0, 2.5, 0.0], expected), ([nan] * 3, torch.full((3,), nan))):
        assert not compare_logits("wrong", torch.tensor(got), wanted, "", 0.1).passed
