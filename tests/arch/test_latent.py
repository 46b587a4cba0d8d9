"""Latent attention, of which a budget keeps latents, and layers that differ in their number of heads or their sizes."""

import copy
import functools

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import kvpatch
from kvpatch.arch import latent
from kvpatch.arch.automatic import AutomaticAdapter
from kvpatch.backends.flash import flash_backend
from kvpatch.backends.protocol import Case
from kvpatch.cache.cache import EvictingCache
from kvpatch.hooks.target import Target
from tests.arch.test_families import certain
from tests.helpers import tiny_families
from tests.helpers.marks import batches, skip_unless_known
from tests.helpers.running import logits_of
from tests.helpers.serving import alone, engine, greedy, prompts
from tests.helpers.tiny import force, left_pad, prompt, snapshot
from tests.helpers.tiny_families import BASE, EXPERTS, GQA, LATENT, MIXED
from tests.helpers.training import agrees_with_naive_autograd
from tests.oracle import reference_families

RANK, ROTARY, HEADS, LAYERS = 12, 4, 4, 2  # of deepseek_v3
KEY, VALUE = 12, 6  # expanded, of each head
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
AUTOMATIC = {
    "glm4_moe_lite": {**EXPERTS, **GROUPS, "first_k_dense_replace": 1},
    "axk1": {**EXPERTS, **GROUPS, "first_k_dense_replace": 1},
    "kimi_linear": {
        "layer_types": KINDS, "num_hidden_layers": 4, "linear_head_dim": 8, "linear_num_heads": 4, "head_dim": 4,
        "mlp_layer_types": ["dense"] * 4,
    },
}  # fmt: skip


def make(name, **kwargs):
    model = tiny_families.make(name, **kwargs)
    reference_families.learn(type(model))
    return model


class Wrapped(nn.Linear):
    """A projection whose weight is not all that it applies."""


def wrapped(model, kind=Wrapped):
    """Replace the projections from latents, as quantization and LoRA do."""
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = kind
    return model


unwrapped = functools.partial(wrapped, kind=nn.Linear)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_bytes_are_those_of_latents(bits):
    """With bits, an entry has two numbers per group of 4 channels, which no group reaches across."""
    numbers = RANK + ROTARY
    entry = {16: 4 * numbers, 8: numbers + 4 * 2 * 4, 4: numbers // 2 + 4 * 2 * 4}[bits]
    model, ids, size = make("deepseek_v3"), prompt(1, 20), LAYERS * entry
    centres = 0 if bits == 16 else LAYERS * 4 * numbers
    for k, schedule, held in ((0.5, "prompt", 10), (f"{7 * size + centres}B", "prompt", 7)):
        with torch.no_grad(), kvpatch.patched(model, "h2o", k=k, schedule=schedule, bits=bits) as patch:
            cache = model(ids, use_cache=True).past_key_values
            assert cache.held(0).shape == (1, 1) and cache.held(0).eq(held).all()
            assert patch.report().full_nbytes == 20 * LAYERS * 4 * numbers
            slots = sum(layer.positions.shape[2] for layer in cache.layers)
            assert sum(layer.kv.keys.nbytes for layer in cache.layers) == slots * entry
            assert patch.report().nbytes == slots * entry + centres


def test_values_are_where_their_keys_are():
    model = make("deepseek_v3")
    with torch.no_grad(), kvpatch.patched(model, "h2o", k=6):
        cache = model(prompt(2, 20), use_cache=True).past_key_values
    for layer in cache.layers:
        assert layer.kv.values.data_ptr() == layer.kv.keys.data_ptr()
        assert torch.equal(layer.kv.values, layer.kv.keys[..., :RANK])


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_entries_are_the_oracle_s(bits):
    certain("deepseek_v3", "h2o", 0.4, bits=bits)


@pytest.mark.parametrize("every", [1, 4])
def test_steps_between_the_first_layer_and_the_last(every):
    """They are bound to their layers, in a model of more than two."""
    certain("deepseek_v3_deep", "h2o", 7, schedule="both", steps=6, every=every)


def test_blocks_are_the_oracle_s():
    certain("deepseek_v3", "critical_adakv", 8, block=6)


@pytest.mark.parametrize("policy", ["critical_snapkv", "kvzip_plus"])
def test_values_are_weighed_through_both_projections(policy):
    """The oracle's rows of a head are those from the latent to its value, times the output projection's."""
    certain("minicpm3", policy, 0.4, **({} if policy == "kvzip_plus" else {"norm": 2}))


def test_values_are_noted_as_they_are_rounded():
    model, ids, fed = make("deepseek_v3"), prompt(1, 20), prompt(1, 6, seed=2)
    with kvpatch.patched(model, "cur", 24, schedule="both", bits=4):
        _, cache = force(model, ids, fed)
    for layer in cache.layers:
        decoded = layer.positions >= 20
        values = layer.kv.numbers(layer.kv.width)[1]
        torch.testing.assert_close(layer.state["value_square"][decoded], values.square().sum(-1)[decoded])
        assert decoded.any()


@pytest.mark.parametrize("policy", ["roco", "critical_adakv"])
def test_gradients_are_naive_autograd_s(policy):
    agrees_with_naive_autograd(functools.partial(make, "deepseek_v3"), policy, {"use_reentrant": False})


def test_a_pass_without_a_cache_of_the_caller_s():
    model, ids = make("deepseek_v3", dtype=torch.float64), prompt(2, 26)
    with torch.no_grad(), kvpatch.patched(model, "roco", 8, block=6) as patch:
        logits = logits_of(model, ids, past_key_values=patch.new_cache())
        without = logits_of(model, ids, use_cache=False)
    torch.testing.assert_close(logits, without, atol=1e-9, rtol=0)


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
    with safe_open(tmp_path / "cache", "pt") as file:
        assert "0.keys" in file.keys() and "0.values" not in file.keys()  # noqa: SIM118 - not a dict


def test_tokens_that_are_rolled_back():
    model, ids = make("deepseek_v3_deep"), prompt(1, 23)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with kvpatch.patched(model, "h2o", 0.4):
        want = model.generate(ids, **asked)
        assert torch.equal(model.generate(ids, **asked, prompt_lookup_num_tokens=3), want)


@pytest.mark.parametrize("bits", [16, 8])
def test_copies_go_on_by_themselves(bits):
    model, ids, fed = make("deepseek_v3"), prompt(2, 24), prompt(2, 4, seed=2)
    with torch.no_grad(), kvpatch.patched(model, "h2o", k=0.4, bits=bits):
        want, cache = force(model, ids, fed)
        _, cache = force(model, ids, fed[:, :2])
        other = cache.clone()
        for one in (cache, other):
            got = [model(fed[:, t : t + 1], past_key_values=one).logits for t in (2, 3)]
            torch.testing.assert_close(torch.cat(got, 1), want[:, 3:], atol=2e-5, rtol=0)


def test_a_replay_is_the_rollout():
    model, ids, fed = make("deepseek_v3", dtype=torch.float64), prompt(2, 26), prompt(2, 8, seed=5)
    mask = left_pad(ids, [26, 17])
    with torch.no_grad():
        with kvpatch.patched(model, "h2o", 9, record=True) as patch:
            want, cache = force(model, ids, fed, mask)
            record = patch.record(cache)
        with kvpatch.replay(model, record):
            got = logits_of(model, torch.cat([ids, fed], 1), torch.cat([mask, torch.ones_like(fed)], 1))
    torch.testing.assert_close(got[:, 25:], want, atol=1e-6, rtol=0)  # its norms are computed in float32


def test_a_cache_of_transformers_is_taken_over():
    """It holds the latent and the rotary key as two tensors; an entry here is both."""
    model, ids, fed = make("deepseek_v3"), prompt(2, 20), prompt(2, 4, seed=2)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        full, _ = force(model, ids, fed)
        with kvpatch.patched(model, "key_norm", 0.4) as patch:
            want, _ = force(model, ids, fed)
            for given in (patch.compress(past), patch.compress(copy.deepcopy(past), ids)):
                got, _ = force(model, fed[:, :1], fed[:, 1:], cache=given)
                torch.testing.assert_close(got, want[:, 1:], atol=2e-5, rtol=0)
        with kvpatch.patched(model, "window", 64) as patch:
            mine = model(ids, use_cache=True).past_key_values
            for layer, own in zip(past.layers, mine.layers, strict=True):
                torch.testing.assert_close(own.keys, layer.keys)
                torch.testing.assert_close(own.values, layer.values)
            got, _ = force(model, fed[:, :1], fed[:, 1:], cache=patch.new_cache(past))
            torch.testing.assert_close(got, full[:, 1:], atol=2e-5, rtol=0)
        with kvpatch.patched(model, "full", 1.0):
            kept = model(ids, use_cache=True).past_key_values
        with kvpatch.patched(model, "key_norm", 0.4) as patch:
            got, _ = force(model, fed[:, :1], fed[:, 1:], cache=patch.compress(kept))
            torch.testing.assert_close(got, want[:, 1:], atol=2e-5, rtol=0)


def test_a_projection_that_cannot_be_read_leaves_entries_expanded():
    model, ids, fed = wrapped(make("deepseek_v3")), prompt(2, 20), prompt(2, 4, seed=2)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
    want, _ = force(model, ids, fed)
    with kvpatch.patched(model, "h2o", 1.0) as patch:
        got, cache = force(model, ids, fed)
        assert patch.report().full_nbytes == 24 * 2 * LAYERS * HEADS * (KEY + VALUE) * 4
        with pytest.raises(kvpatch.KVPatchError, match="past holds one entry for all heads.*run the prompt inside the block"):
            patch.new_cache(past)
    assert cache.held(0).shape == (2, HEADS)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_a_projection_that_changes_inside_the_block():
    for change, before in ((wrapped, make("deepseek_v3")), (unwrapped, wrapped(make("deepseek_v3")))):
        with kvpatch.patched(before, "h2o", 0.5):
            change(before)
            with pytest.raises(kvpatch.KVPatchError, match="wrapped, quantized or offloaded inside the block"):
                before(prompt(1, 12), use_cache=True)


@pytest.mark.parametrize("offloaded", [False, True])
def test_accelerate_s_hooks(offloaded):
    """Modules that are placed on devices have hooks, too; the weight of one that is offloaded is not there."""
    accelerate = pytest.importorskip("accelerate")
    model, ids, fed = make("deepseek_v3"), prompt(1, 20), prompt(1, 4, seed=2)
    want, _ = force(model, ids, fed)
    if offloaded:
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.hooks.attach_execution_device_hook(model, "cpu")
    assert hasattr(model.model.layers[0].self_attn.kv_b_proj, "_hf_hook")
    with kvpatch.patched(model, "h2o", 1.0):
        got, cache = force(model, ids, fed)
    assert cache.layers[0].latent is not offloaded
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_part_of_a_projection_is_not_taken_for_all_of_it():
    """Processes that share a model's heads have a part of its rows each."""
    attn = make("deepseek_v3").model.layers[0].self_attn
    assert latent.is_latent(attn)
    attn.kv_b_proj.weight = nn.Parameter(attn.kv_b_proj.weight[: attn.kv_b_proj.out_features // 2])
    assert not latent.is_latent(attn)


def test_a_copy_of_the_patched_model_expands_by_its_own_weight():
    model, ids = make("deepseek_v3"), prompt(1, 12)
    before, want = snapshot(model), logits_of(model, ids)
    with kvpatch.patched(model, "h2o", 0.5):
        other = copy.deepcopy(model)
        torch.testing.assert_close(logits_of(model, ids, use_cache=False), want)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.kv_b_proj.weight.zero_()
    assert snapshot(model) == before
    assert not torch.allclose(logits_of(other, ids, use_cache=False), want)
    assert torch.equal(logits_of(model, ids), want)


def test_values_cannot_be_merged():
    model = make("deepseek_v3")
    before = snapshot(model)
    with pytest.raises(kvpatch.KVPatchError, match="is the latent in its key: use the policy that it goes around"):
        kvpatch.patch(model, kvpatch.merged("snapkv"), 0.5)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", AUTOMATIC)
def test_automatic_rows_hold_latents(name):
    skip_unless_known(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**BASE, **LATENT, **AUTOMATIC[name]})
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, fed = prompt(2, 20), prompt(2, 3, seed=2)
    want, _ = force(model, ids, fed)
    assert all(isinstance(adapter, AutomaticAdapter) for _, adapter in Target.find(model).attentions)
    with kvpatch.patched(model, "h2o", 1.0):
        got, cache = force(model, ids, fed)
    assert cache.layers[0].kv.sizes == (RANK + ROTARY, RANK) and cache.layers[0].kv.latent
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@batches
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
