"""Saving and loading a compressed cache."""

import copy
import json

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.policies.scopes import AllBut
from tests.helpers.comparing import combined
from tests.helpers.running import feed, go_on, kept
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt

CASES = {
    "h2o": ("h2o", {}),
    "roco": ("roco", {"recent": 2}),
    "keyformer_shared": ("keyformer", {"shared": True}),
    "snapkv": ("snapkv", {"window": 4}),
    "adakv": ("adakv", {"window": 4}),
    "critical_adaptive_roco": (combined("roco", ("adaptive", "critical")), {"recent": 2, "protected": 0.2}),
    "pyramid_tova": (combined("tova", ("pyramid",)), {}),
    "full": ("full", {}),
    "renumbered": ("h2o", {"positions": "renumbered"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FIVE)
def test_a_loaded_cache_goes_on_as_the_saved_one(name, case, tmp_path):
    policy, options = CASES[case]
    if name == "gpt2" and case == "renumbered":
        return
    model, ids, fed = make(name), prompt(2, 40), prompt(2, 12, seed=2)
    mask = left_pad(ids, [40, 29]) if case in ("roco", "adakv") else None
    longer = None if mask is None else torch.cat([mask, torch.ones(2, 12, dtype=mask.dtype)], 1)
    with kvpatch.patched(model, policy, 0.4, **options) as patch:
        cache = patch.new_cache()
        force(model, ids, fed[:, :3], mask, cache=cache)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        want, _ = rest_of(model, fed, cache, longer)
    with kvpatch.patched(model, policy, 0.4, **options) as patch:
        loaded = patch.load_cache(tmp_path / "cache.safetensors")
        assert loaded.get_seq_length() == 43
        got, _ = rest_of(model, fed, loaded, longer)
    torch.testing.assert_close(want, got, atol=1e-5, rtol=0)
    assert kept(cache) == kept(loaded)
    assert cache.nbytes == loaded.nbytes


def rest_of(model, fed, cache, mask):
    if mask is None or model.config.model_type == "mpt":
        return go_on(model, fed[:, 3:], cache)
    logits = []
    with torch.no_grad():
        for t in range(3, 12):
            positions = mask[:, : 41 + t].sum(1, keepdim=True) - 1
            out = model(fed[:, t : t + 1], attention_mask=mask[:, : 41 + t], position_ids=positions, past_key_values=cache)
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


@pytest.fixture
def saved(tmp_path):
    model, ids = make("llama_gqa"), prompt(1, 40)
    with kvpatch.patched(model, "h2o", 0.4) as patch:
        _, cache = force(model, ids, prompt(1, 3, seed=2))
        patch.save_cache(cache, tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


OTHERS = [
    ({"name": "llama"}, {}, r"saved under another model: KV heads is 2 there and 4 here"),
    ({"name": "llama_gqa", "seed": 1}, {}, r"another model: weights is '\w{16}' there"),
    ({"name": "mistral"}, {}, r"another model: class is 'LlamaModel' there and 'MistralModel' here"),
    ({"name": "llama_gqa", "dtype": torch.bfloat16}, {}, r"another model: dtype is 'torch.float32' there and 'torch.bfloat16'"),
    ({}, {"policy": "roco"}, r"another settings's policy: name is 'h2o' there and 'roco' here"),
    ({}, {"recent": 0.25}, r"policy: recent is 0\.5 there and 0\.25 here"),
    ({}, {"k": 0.5}, r"k is 0\.4 there and 0\.5 here"),
    ({}, {"seed": 7}, r"seed is 0 there and 7 here"),
    ({}, {"block": 8}, r"block is None there and 8 here"),
    ({}, {"positions": "renumbered"}, r"positions is 'original' there and 'renumbered' here"),
]


@pytest.mark.parametrize(("model", "options", "words"), OTHERS, ids=[f"{m}{o}" for m, o, _ in OTHERS])
def test_a_file_of_something_else_is_refused(saved, model, options, words):
    patch = kvpatch.patch(make(**{"name": "llama_gqa", **model}), **{"policy": "h2o", "k": 0.4, **options})
    with pytest.raises(KVPatchError, match=words):
        patch.load_cache(saved)


@pytest.mark.parametrize("lossless", [False, True])
def test_a_file_of_a_model_that_rotates_keys_otherwise_is_refused(lossless, tmp_path):
    """No weight shows it: the file was read, and the text went on with keys at other angles."""
    model, path = make("llama_gqa"), tmp_path / "cache.safetensors"
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    with kvpatch.patched(model, "h2o", 0.4, lossless=lossless) as patch:
        _, cache = go_on(model, prompt(1, 40), patch.new_cache())
        patch.save_cache(cache, path)
        assert patch.load_cache(path).get_seq_length() == 40
    words = "another model's rotation's rope_parameters: rope_theta is 10000.0 there and 500.0 here"
    with kvpatch.patched(other, "h2o", 0.4, lossless=lossless) as patch, pytest.raises(KVPatchError, match=words):
        patch.load_cache(path)


MARKED = {
    "mask": {"protect": numpy.arange(40) < 3},
    "ids": {"protect": [numpy.int64(7)]},
    "range": {"protect": range(5)},
    "text": {"protect": AllBut(tuple(range(80)))},
    "numbers": {"quota": numpy.arange(40) // 20},
}


@pytest.mark.parametrize("options", MARKED.values(), ids=MARKED)
def test_options_that_json_has_no_form_of(options, tmp_path):
    """Arrays and ranges are taken where tensors and lists are; protect="text" becomes all ids but those of images."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5, **options) as patch:
        _, cache = force(model, prompt(1, 40), prompt(1, 1))
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        assert kept(patch.load_cache(tmp_path / "cache.safetensors")) == kept(cache)
    with kvpatch.patched(model, "h2o", 0.5) as patch, pytest.raises(KVPatchError, match=f"policy: {next(iter(options))} is "):
        patch.load_cache(tmp_path / "cache.safetensors")


def test_truncated_altered_and_missing_files_are_refused(saved, tmp_path):
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    altered = {**tensors, "1.keys": tensors["1.keys"].clone()}
    altered["1.keys"].view(-1)[5] += 1e-3
    save_file(altered, tmp_path / "altered", metadata=metadata)
    about = json.loads(metadata["kvpatch"])
    about["layers"][0]["used"] -= 1
    save_file(tensors, tmp_path / "described", metadata={**metadata, "kvpatch": json.dumps(about)})
    save_file(tensors, tmp_path / "other")
    (tmp_path / "truncated").write_bytes(saved.read_bytes()[:-100])
    (tmp_path / "text").write_text("no cache")
    cases = {
        "altered": "its checksum does not match, so it was altered. Save it anew",
        "described": "its checksum does not match, so it was altered. Save it anew",
        "other": "is no cache saved by this version",
        "truncated": "is truncated or no such file",
        "text": "is truncated or no such file",
        "missing": "There is no file",
    }
    with kvpatch.patched(make("llama_gqa"), "h2o", 0.4) as patch:
        for name, words in cases.items():
            with pytest.raises(KVPatchError, match=words):
                patch.load_cache(tmp_path / name)


@pytest.mark.parametrize(("case", "state"), [("critical_adaptive_roco", "norm"), ("h2o", "sum")])
def test_a_file_without_a_state_that_every_layer_has_is_refused(case, state, tmp_path):
    policy, options = CASES[case]
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, 0.4, **options) as patch:
        _, cache = force(model, prompt(1, 20), prompt(1, 1))
        del cache.layers[1].state[state]
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        with pytest.raises(KVPatchError, match=f"it holds no 1.state.{state}"):
            patch.load_cache(tmp_path / "cache.safetensors")


def test_what_cannot_be_saved(tmp_path):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.4) as patch, torch.no_grad():
        cache = patch.new_cache()
        with pytest.raises(KVPatchError, match="empty: there is nothing to save"):
            patch.save_cache(cache, tmp_path / "x")
        cache.plans.prompt_len = 30
        model(prompt(1, 20), past_key_values=cache)
        with pytest.raises(KVPatchError, match="in the middle of a prompt"):
            patch.save_cache(cache, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_head_that_got_nothing_of_a_shared_budget_is_saved(tmp_path):
    """The loader wanted a token in every head."""
    model, policies = make("llama_gqa"), kvpatch.policies
    policy = policies.adaptive(policies.pyramid("random"))
    empty = 0
    for seed in range(4):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.3, block=1, schedule="both", seed=seed) as patch:
            cache = feed(model, patch, prompt(1, 2))
            empty += sum(int((cache.held(layer) == 0).sum()) for layer in range(2))
            patch.save_cache(cache, tmp_path / "cache.safetensors")
            again = patch.load_cache(tmp_path / "cache.safetensors")
            step = prompt(1, 1, seed=2)
            assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=again).logits)
    assert empty


@pytest.mark.parametrize("policy", ["full", "snapkv"])
def test_what_was_rolled_back_is_not_saved(policy, tmp_path):
    """Columns behind those in use kept the positions of tokens that were rolled back, which the loader refuses."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, policy, 40) as patch:
        cache = feed(model, patch, prompt(1, 10))
        cache.crop(-2)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        again, step = patch.load_cache(tmp_path / "cache.safetensors"), prompt(1, 1, seed=2)
        assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=again).logits)
        assert torch.equal(cache.positions(0), again.positions(0))


def test_a_shared_score_that_only_prompts_add_to_is_saved(tmp_path):
    """The loader wanted room in it for generated tokens."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.5, shared=True, schedule="prompt", turns="first") as patch:
        cache = feed(model, patch, prompt(1, 10), prompt(1, 1, seed=2))
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        again, turn = patch.load_cache(tmp_path / "cache.safetensors"), prompt(1, 5, seed=3)
        assert torch.equal(model(turn, past_key_values=cache).logits, model(turn, past_key_values=again).logits)


@pytest.mark.parametrize("policy", ["full", "h2o", "adakv"])
def test_a_joined_cache_is_saved_after_a_further_turn(policy, tmp_path):
    """It called more columns uncroppable than were in use."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, policy, 1.0) as patch:
        cache = EvictingCache.concatenate([feed(model, patch, prompt(1, n)) for n in (3, 9)])
        model(prompt(2, 7), past_key_values=cache)
        cache.check_invariants()
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        again, step = patch.load_cache(tmp_path / "cache.safetensors"), prompt(2, 1, seed=2)
        assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=again).logits)


def test_rows_that_were_asked_for_other_numbers_of_tokens_are_saved(tmp_path):
    """Their temperatures change over other spans; the loaded rows took the default one."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 8, tau=(1.0, 4.0)) as patch:
        parts = [feed(model, patch, prompt(1, 20, seed=seed)) for seed in (1, 2)]
        for part, new in zip(parts, (3, 12), strict=True):
            part.plans.new_tokens = new  # as an engine announces it
        cache = EvictingCache.concatenate(parts)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        again = patch.load_cache(tmp_path / "cache.safetensors")
        for seed in range(6):
            step = prompt(2, 1, seed=seed)
            assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=again).logits)
            for one, other in zip(cache.layers, again.layers, strict=True):
                assert all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())
