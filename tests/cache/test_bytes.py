"""A budget in bytes: counted in the dtype that keys have when they are stored."""

import pytest
import torch
from transformers import DynamicCache

import kvpatch
from kvpatch import KVPatchError
from tests.helpers.tiny import force, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
HALF, FLOAT, BF16, DOUBLE = torch.float16, torch.float32, torch.bfloat16, torch.float64
TOKEN = 2 * 2 * 2 * 8  # numbers of a token: keys and values of two layers with two heads of 8


def tokens(dtype, size=8192):
    return size // (TOKEN * dtype.itemsize)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("before", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize("after", [HALF, FLOAT, BF16, DOUBLE], ids=str)
def test_a_model_that_is_converted_inside_the_block(before, after, bits):
    model, ids = make("llama_gqa", dtype=before), prompt(1, 300)
    with kvpatch.patched(model, "streaming_llm", "8KiB", bits=bits) as patch:
        model.to(after)
        out = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        cache = out.past_key_values
        assert cache.layers[0].dtype == after
        if bits == 16:
            assert cache.held(0).eq(tokens(after)).all()
        free = sum(sum(layer.kv.capacities()) - int(layer.positions.ge(0).sum()) for layer in cache.layers)
        width = sum(one.shape[-1] * one.itemsize for one in cache.layers[0].kv.stored)
        assert 8192 - 2 * 2 * width < cache.nbytes - free * width <= 8192
        cache.check_invariants()
        assert patch.report().budget == cache.settings.budget.per_layer


def test_a_list_of_sizes_and_every():
    model = make("llama_gqa", dtype=HALF)
    with kvpatch.patched(model, kvpatch.get_policy("h2o").with_options(every=5), ["2KiB", 9]):
        model.float()
        _, cache = force(model, prompt(1, 90), prompt(1, 12))
        assert [cache.settings.tokens(layer, 90) for layer in (0, 1)] == [2048 // (TOKEN // 2 * 4) - 4, 9]


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
def test_autocast(dtype):
    model = make("llama_gqa")
    with kvpatch.patched(model, "streaming_llm", "8KiB") as patch:
        with torch.autocast("cpu", dtype):
            mixed = model(prompt(1, 300), use_cache=True).past_key_values
            model(prompt(1, 1), past_key_values=mixed)
        plain = model(prompt(1, 300), use_cache=True).past_key_values
        for cache in (mixed, plain, mixed):  # each goes on as it began
            model(prompt(1, 1), past_key_values=cache)
        assert mixed.held(0).eq(tokens(dtype)).all() and plain.held(0).eq(tokens(FLOAT)).all()
        assert patch.settings.budget.per_layer == (tokens(FLOAT),) * 2


def test_a_cache_that_is_taken_over_counts_in_its_own_dtype():
    model = make("llama_gqa", dtype=HALF)
    past = DynamicCache()
    model(prompt(1, 200), past_key_values=past)
    with kvpatch.patched(model, "streaming_llm", "4KiB") as patch:
        model.float()
        cache = patch.new_cache(past)
        assert cache.settings.tokens(0, 200) == tokens(HALF, 4096)


def test_saved_and_loaded_in_another_dtype(tmp_path):
    model = make("llama_gqa", dtype=HALF)
    with kvpatch.patched(model, "streaming_llm", "8KiB") as patch:
        model.float()
        _, cache = force(model, prompt(1, 200), prompt(1, 2))
        patch.save_cache(cache, tmp_path / "one")
        loaded = patch.load_cache(tmp_path / "one")
        assert loaded.settings.tokens(0, 200) == tokens(FLOAT)
        force(model, prompt(1, 9, seed=2), prompt(1, 2), cache=loaded)


def test_a_size_that_holds_no_token_after_the_conversion_is_refused():
    model = make("llama_gqa", dtype=HALF)
    with kvpatch.patched(model, "window", f"{TOKEN * 2}B"):
        model.float()
        with pytest.raises(KVPatchError, match=rf"k='{TOKEN * 2}B' was counted .* float32, in which it holds no token"):
            model(prompt(1, 20), use_cache=True)
        model.half()
        assert model(prompt(1, 20), use_cache=True).past_key_values.held(0).eq(1).all()


def test_the_report_says_what_a_size_bounds():
    """Under the schedule "prompt" answers are kept beside it; they have a figure of their own, in each conversation's turn."""
    model, token = make("llama_gqa"), TOKEN * 4
    with kvpatch.patched(model, kvpatch.get_policy("snapkv").with_options(window=4), "8KiB") as patch:
        _, cache = force(model, prompt(2, 60), prompt(2, 10))
        report = patch.report()
        assert int(cache.held(0)[0, 0]) == 8192 // token + 10
        assert report.answers_nbytes == report.to_dict()["answers_nbytes"] == 10 * 2 * token and report.size == "8KiB"
        assert "8KiB for the prompt: 32 tokens; answers are kept beside it, now 5 KiB\n" in str(report)
        force(model, prompt(2, 5, seed=3), prompt(2, 2), cache=cache)
        assert patch.report().answers_nbytes == 2 * 2 * token
    with kvpatch.patched(model, "h2o", "8KiB") as patch:
        force(model, prompt(1, 60), prompt(1, 10))
        assert "budget                8KiB: 32 tokens\n" in str(patch.report()) and patch.report().answers_nbytes == 0


@pytest.mark.parametrize("k", [1.0, 500, "1MiB"])
def test_no_report_shows_more_than_all(k):
    """What nothing was evicted from takes 100% of a full cache, and free slots beside that."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "snapkv", k) as patch:
        model.generate(prompt(1, 40), max_new_tokens=8, do_sample=False)
        report = patch.report()
    ahead = report.nbytes - report.full_nbytes
    assert ahead > 0 and report.share == 1.0
    assert f"(100%), and {ahead:,} B in free slots" in str(report) or f"(100%), and {ahead / 1024:g} KiB in free" in str(report)
