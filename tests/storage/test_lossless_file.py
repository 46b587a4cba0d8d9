"""A lossless cache in a file: all entries, under any policy and budget of the same model."""

import json

import pytest
import torch
from safetensors import safe_open

import kvpatch
from kvpatch.arch.upstream import cache_of
from kvpatch.cache.lossless import LosslessCache
from kvpatch.hooks.lossless import Drafter
from kvpatch.storage.kinds import LOSSLESS
from tests.helpers import tiny_families
from tests.helpers.tiny import FIVE, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}


def generate(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, output_logits=True, **options)


def assert_same(found, want):
    assert torch.equal(found.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(want.logits), rtol=1e-5, atol=1e-5)


def save_text(model, ids, path, spans=()):
    """Read ids and save the cache; return what the first step behind it and `more` gives, from a clone."""
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        if spans:
            cache.forget(spans)
        patch.save_cache(cache, path)
        return cache, model(prompt(1, 9, 4), past_key_values=cache.clone()).logits


@pytest.mark.parametrize("name", FIVE)
def test_a_loaded_cache_goes_on_under_another_policy_and_budget(name, tmp_path):
    model, ids = make(name, dtype=torch.float64), prompt(1, 40)
    cache, _ = save_text(model, ids, tmp_path / "cache")
    text = torch.cat([ids, prompt(1, 6, 3)], 1)
    with kvpatch.patched(model, "snapkv", 0.5, lossless=True) as patch:
        loaded = patch.load_cache(tmp_path / "cache")
        assert isinstance(loaded, LosslessCache) and loaded.ids == ids[0].tolist() and loaded.nbytes == cache.nbytes
        found = generate(model, text, past_key_values=loaded)
        assert loaded.verified.passes and loaded.verified.drafted
    assert_same(found, generate(model, text))
    for own, its in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(own.used_TE[:40], its.used_TE)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_families.FAMILIES)
@pytest.mark.sampled(3)
def test_every_family(name, tmp_path):
    model, ids = tiny_families.make(name, dtype=torch.float64), prompt(1, 30)
    save_text(model, ids, tmp_path / "cache")
    text = torch.cat([ids, prompt(1, 6, 3)], 1)
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        assert_same(generate(model, text, past_key_values=patch.load_cache(tmp_path / "cache")), generate(model, text))


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding", "mpt"])
def test_what_was_forgotten_stays_away(name, tmp_path):
    model, spans = make(name, dtype=torch.float64), [(3, 9), (20, 31)]
    cache, want = save_text(model, prompt(1, 40), tmp_path / "cache", spans)
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        loaded = patch.load_cache(tmp_path / "cache")
        assert loaded.kept_positions == cache.kept_positions and loaded.nbytes == cache.nbytes
        with pytest.raises(kvpatch.KVPatchError, match="edited after 40"):
            loaded.crop(-1)
        copy = loaded.clone()
        torch.testing.assert_close(model(prompt(1, 9, 4), past_key_values=loaded).logits, want, rtol=1e-6, atol=1e-6)
        assert copy.ids == cache.ids


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_cache_without_drafts_is_edited_too(interrupted, tmp_path, monkeypatch):
    """One that was loaded, or whose last pass was interrupted: the next pass chooses the budget."""
    model, ids, spans = make("llama_gqa", dtype=torch.float64), prompt(1, 40), [(3, 9)]
    _, want = save_text(model, ids, tmp_path / "edited", spans)
    save_text(model, ids, tmp_path / "cache")
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        cache = patch.load_cache(tmp_path / "cache")
        if interrupted:
            with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
                patching.setattr("kvpatch.attention.prefill.end_prompt", interrupt)
                model(prompt(1, 5, 7), past_key_values=cache)
            patch.save_cache(cache, tmp_path / "cache")
            cache.crop(-2)
            cache = patch.load_cache(tmp_path / "cache")
        with pytest.raises(kvpatch.KVPatchError, match="has read 40 tokens"):
            cache.forget([(38, 41)])
        cache.forget(spans)
        torch.testing.assert_close(model(prompt(1, 9, 4), past_key_values=cache).logits, want, rtol=1e-6, atol=1e-6)


def test_a_copy_of_a_loaded_cache_reads_before_it_drafts(tmp_path, monkeypatch):
    """One more token than was read is all that a draft needs, of a budget that holds something."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 40)
    save_text(model, ids, tmp_path / "cache")
    text, drafted, draft = torch.cat([ids, prompt(1, 1, 3)], 1), [], Drafter.get_candidates

    def watch(self, input_ids, **others):
        found = draft(self, input_ids, **others)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(Drafter, "get_candidates", watch)
    want = generate(model, text)
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        loaded = patch.load_cache(tmp_path / "cache")
        for cache in (loaded.clone(), loaded):
            drafted.clear()
            assert_same(generate(model, text, past_key_values=cache), want)
            assert drafted[0] == 0 < max(drafted)


def interrupt(*args):
    raise KeyboardInterrupt


def rewrite(path, about=None, tensors=None):
    """Write a file with some of it changed, and a checksum that fits."""
    with safe_open(path, "pt") as file:
        own, held = json.loads(file.metadata()["kvpatch"]), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    held |= tensors or {}
    LOSSLESS.write_file(path, own | (about or {}), {name: one for name, one in held.items() if one is not None})


BROKEN = [
    ({"edited": 41}, {}, "places are not those of 40 tokens, of which the first 41 were edited"),
    ({"edited": -1}, {}, "edited is -1"),
    ({}, {"ids": torch.full((40,), -2)}, "ids holds a number that is no token"),
    ({}, {"places": torch.arange(40).flip(0)}, "places are not those of 40 tokens"),
    ({"edited": 40}, {"places": torch.arange(40).flip(0)}, "places are not in order"),
    ({}, {"1.rows": None}, "it holds .*, not ids, places and the rows of 2 layers"),
    ({}, {"2.rows": torch.zeros(40, 32)}, "it holds .*, not ids, places and the rows of 2 layers"),
    ({}, {"1.rows": torch.zeros(39, 32)}, r"1.rows is torch.float32 \[39, 32\] where torch.float32 \[40, 32\] belongs"),
    ({}, {"0.rows": torch.zeros(40, 32, dtype=torch.int64)}, "its rows are torch.int64"),
    ({}, {"1.rows": torch.full((40, 32), torch.nan)}, "layer 1: keys or values are not finite"),
    ({}, {"ids": torch.ones(40, 1, dtype=torch.int64)}, r"ids is .* where torch.int64 \[T\] belongs"),
    ({}, {"places": torch.tensor(40)}, r"places is .* where torch.int64 \[N\] belongs"),
]


@pytest.mark.parametrize(("about", "tensors", "said"), BROKEN, ids=[said[:30] for *_, said in BROKEN])
def test_a_file_that_was_altered_is_refused(about, tensors, said, tmp_path):
    model = make("llama_gqa")
    save_text(model, prompt(1, 40), tmp_path / "cache")
    rewrite(tmp_path / "cache", about, tensors)
    refused = pytest.raises(kvpatch.KVPatchError, match=f"is no valid saved lossless cache: .*{said}")
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch, refused:
        patch.load_cache(tmp_path / "cache")


def test_other_models_patches_and_caches_are_refused(tmp_path):
    model, ids, path = make("llama_gqa"), prompt(1, 40), tmp_path / "cache"
    save_text(model, ids, path)
    with kvpatch.patched(make("llama_gqa", seed=1), "h2o", 0.4, lossless=True) as patch:
        with pytest.raises(kvpatch.KVPatchError, match=r"saved under another model: weights is '\w{16}' there"):
            patch.load_cache(path)
        with pytest.raises(kvpatch.KVPatchError, match="The cache is empty"):
            patch.save_cache(patch.new_cache(), path)
    with kvpatch.patched(model, "h2o", 0.4) as patch:
        with pytest.raises(kvpatch.KVPatchError, match="no cache saved by this version of kvpatch"):
            patch.load_cache(path)
        patch.save_cache(cache_of(model(ids)), path)
    refused = pytest.raises(kvpatch.KVPatchError, match="load it by a patch without lossless")
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch, refused:
        patch.load_cache(path)


def test_a_model_that_has_changed_is_refused(tmp_path):
    """By later turns, by save_cache(), and after load_cache()."""
    model, ids = make("llama_gqa"), prompt(1, 40)
    with kvpatch.patched(model, "h2o", 0.4, lossless=True) as patch:
        cache = cache_of(model(ids))
        patch.save_cache(cache, tmp_path / "cache")
        caches = [cache, cache.clone(), patch.load_cache(tmp_path / "cache")]
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        for one in caches:
            with pytest.raises(kvpatch.KVPatchError, match="Another model has read this cache, or this model has changed"):
                model(prompt(1, 3), past_key_values=one)
            with pytest.raises(kvpatch.KVPatchError, match="Another model has read this cache, or this model has changed"):
                patch.save_cache(one, tmp_path / "cache")
