"""Latent attention, whose keys and values differ in size, and layers that differ in their number of heads."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvpatch
from kvpatch.backends.flash import flash_backend
from kvpatch.backends.protocol import Case
from kvpatch.cache.cache import EvictingCache
from tests.arch.test_families import certain
from tests.helpers.serving import alone, engine, greedy, prompts
from tests.helpers.tiny import force, prompt
from tests.helpers.tiny_families import EXPERTS, GQA, MIXED, make

KEY, VALUE, HEADS, LAYERS = 12, 6, 4, 2  # of deepseek_v3


def test_bytes_are_those_of_keys_and_values():
    model, ids, size = make("deepseek_v3"), prompt(1, 20), LAYERS * HEADS * (KEY + VALUE) * 4
    for k, schedule, held in ((0.5, "prompt", 10), (f"{7 * size}B", "prompt", 7)):
        with torch.no_grad(), kvpatch.patched(model, "h2o", k=k, schedule=schedule) as patch:
            cache = model(ids, use_cache=True).past_key_values
            assert cache.held(0).eq(held).all()
            assert patch.report().full_nbytes == 20 * size
            assert patch.report().nbytes == sum(layer.kv.nbytes for layer in cache.layers) >= held * size


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_entries_are_the_oracle_s(bits):
    certain("deepseek_v3", "h2o", 0.4, bits=bits)


@pytest.mark.parametrize("every", [1, 4])
def test_steps_between_the_first_layer_and_the_last(every):
    """They are bound to their layers, in a model of more than two."""
    certain("deepseek_v3_deep", "h2o", 7, schedule="both", steps=6, every=every)


def test_blocks_are_the_oracle_s():
    certain("deepseek_v3", "critical_adakv", 8, block=6)


@pytest.mark.parametrize("bits", [16, 4])
def test_saved_and_joined(bits, tmp_path):
    model, ids, fed = make("deepseek_v3"), prompt(2, 24), prompt(2, 4, seed=2)
    with torch.no_grad(), kvpatch.patched(model, "adakv", k=0.5, bits=bits) as patch:
        want, _ = force(model, ids, fed)
        caches = [model(row[None], use_cache=True).past_key_values for row in ids]
        patch.save_cache(caches[0], tmp_path / "cache")
        joined = EvictingCache.concatenate([patch.load_cache(tmp_path / "cache"), caches[1]])
        got = [model(fed[:, t : t + 1], past_key_values=joined).logits for t in range(4)]
    torch.testing.assert_close(torch.cat(got, 1), want[:, 1:], atol=2e-5, rtol=0)


def test_continuous_batching():
    model, asked = make("deepseek_v3"), prompts((20, 33))
    with kvpatch.patched(model, "h2o", k=12):
        want = [alone(model, ids, 5) for ids in asked]
        found = model.generate_batch(asked, generation_config=greedy(5), continuous_batching_config=engine())
    assert [one.generated_tokens for one in found.values()] == want


@pytest.mark.parametrize("task", ["prompt", "ragged"])
def test_flash_kernels_leave_it_to_others(task):
    why = flash_backend.reason(task, Case("cuda", torch.bfloat16, 64, value_dim=32))
    assert why == "its kernels take values of the keys' size 64, not 32"


def test_layers_with_other_numbers_of_heads():
    """Sliding layers of MiMo have twice the KV heads."""
    torch.manual_seed(0)
    sizes = {**GQA, **MIXED, **EXPERTS, "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8, "n_routed_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mimo_v2_flash", **sizes)).eval()
    with torch.no_grad(), kvpatch.patched(model, "h2o", k=0.5) as patch:
        model(prompt(1, 20), use_cache=True)
        report = patch.report()
    assert report.held().tolist() == [[[7, 7]], [[10, -1]]]
    assert report.to_dict()["held"] == [[[7, 7]], [[10]]]
    assert report.kept().sum(-1).tolist() == [[7, 7], [10, 0]]
    assert report.full_nbytes == (7 * 2 + 20) * (12 + 8) * 4
    assert "7 to 10" in str(report)
    assert [line[-3:] for line in report.strip().splitlines()] == ["35%", "50%"], "of its own heads"
