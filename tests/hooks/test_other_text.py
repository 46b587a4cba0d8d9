"""generate() with a cache that has read another text than its input_ids begin with."""

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from tests.helpers.tiny import left_pad, make, prompt
from tests.helpers.tiny_families import SOUND, make_listener

pytestmark = pytest.mark.usefixtures("no_gradients")
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def texts(B=1):
    context, one, other = prompt(B, 20), prompt(B, 5, seed=2), prompt(B, 14, seed=3)
    other[:, 0] = (one[:, 0] + 1) % 90 + 1
    return context, torch.cat([context, one], 1), torch.cat([context, other], 1)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "streaming_llm"])
@pytest.mark.parametrize("prefilled", [True, False])
def test_a_second_question_needs_a_copy(policy, prefilled):
    model, (context, one, other) = make("llama_gqa"), texts()
    with kvpatch.patched(model, policy, 10, **({"window": 4} if policy == "snapkv" else {})) as patch:
        cache = patch.new_cache()
        if prefilled:
            model(context, past_key_values=cache)
            want = model.generate(other, past_key_values=cache.clone(), **OPTIONS)
        first = model.generate(one, past_key_values=cache, **OPTIONS)
        kept = cache.clone()
        words = r"input_ids differ from what the cache has read at column 20 of row 0.*(cache|past_key_values)=cache\.clone\(\)"
        with pytest.raises(KVPatchError, match=words):
            model.generate(other, past_key_values=cache, **OPTIONS)
        assert cache.get_seq_length() == kept.get_seq_length(), "nothing has changed"
        longer = torch.cat([first, prompt(1, 3, seed=5)], 1)
        again = model.generate(longer, past_key_values=cache, **OPTIONS)
        assert torch.equal(again, model.generate(longer, past_key_values=kept, **OPTIONS))
        if prefilled:
            fresh = patch.new_cache()
            model(context, past_key_values=fresh)
            assert torch.equal(model.generate(other, past_key_values=fresh, **OPTIONS), want)


def test_use_cache_false_with_a_cache_goes_on_from_it_too():
    model, (context, one, other) = make("llama_gqa"), texts()
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        model(context, past_key_values=cache)
        model.generate(one, past_key_values=cache, use_cache=False, **OPTIONS)
        with pytest.raises(KVPatchError, match="input_ids differ from what the cache has read at column 20 of row 0"):
            model.generate(other, past_key_values=cache, use_cache=False, **OPTIONS)


def test_generate_of_the_class_gets_no_ids_to_compare_and_says_so_once(caplog):
    model, (context, one, _) = make("llama_gqa"), texts()
    with kvpatch.patched(model, "h2o", 10) as patch:
        type(model).generate(model, context, **OPTIONS)
        assert not caplog.records
        for _ in range(2):
            type(model).generate(model, one, past_key_values=patch.prefix(context), **OPTIONS)
        assert [record.getMessage().count("generate() of the class was called") for record in caplog.records] == [1]


def test_a_model_that_merges_sounds_knows_its_text():
    """Its decoder gets embeddings alone."""
    model, (_, one, other) = make_listener(), texts()
    one, other = one.clamp(max=SOUND - 1), other.clamp(max=SOUND - 1)
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        model.generate(one, past_key_values=cache, **OPTIONS)
        with pytest.raises(KVPatchError, match="input_ids differ from what the cache has read at column 20 of row 0"):
            model.generate(other, past_key_values=cache, **OPTIONS)


@pytest.mark.parametrize("n", [3, 24])
def test_a_question_no_longer_than_what_was_read(n):
    """transformers would slice input_ids from a negative index, and read most of the text again."""
    model, (context, _, other) = make("llama_gqa"), texts()
    ids = torch.cat([context, other[:, 20:]], 1)[:, :n] if n > 20 else other[:, -n:]
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        model.generate(context, past_key_values=cache, **OPTIONS)
        seen = cache.get_seq_length()
        model(prompt(1, 6, seed=8), past_key_values=cache)
        words = rf"have {n} columns, but the cache has read {seen + 6} tokens.*{seen + 6 + n} columns over both.*clone"
        for mask in (None, torch.ones_like(ids)):
            with pytest.raises(KVPatchError, match=words):
                model.generate(ids, attention_mask=mask, past_key_values=cache, **OPTIONS)
        assert cache.get_seq_length() == seen + 6


def test_a_cache_from_before_the_block_is_checked_as_one_from_inside(caplog):
    """It has no ids, so that lengths and padding alone are compared."""
    model, (context, one, _) = make("llama_gqa"), texts()
    past, foreign = (other(context).past_key_values for other in (model, make("llama")))
    with kvpatch.patched(model, "key_diff", 10):
        with pytest.raises(KVPatchError, match="have 12 columns, but the cache has read 20 tokens"):
            model.generate(context[:, :12], past_key_values=past, **OPTIONS)
        with pytest.raises(KVPatchError, match="holds 4 KV heads of 8 numbers, as another model made it; this model has 2"):
            model.generate(one, past_key_values=foreign, **OPTIONS)
        assert not caplog.records
        for _ in range(2):
            model.generate(one, past_key_values=past, **OPTIONS)
        assert [record.getMessage().count("came without token ids") for record in caplog.records] == [1]


@pytest.mark.parametrize("B", [1, 2])
def test_a_text_without_rows_is_refused(B):
    model, (context, one, _) = make("llama_gqa"), texts(B)
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        model.generate(context, past_key_values=cache, **OPTIONS)
        with pytest.raises(KVPatchError, match=r"input_ids has shape \[0, \d+\], which is no row: give at least one"):
            model.generate(one[:0], past_key_values=cache, **OPTIONS)


def test_what_goes_on_is_let_through():
    """New tokens alone under a mask over both, a padded batch, other pad tokens, rows that moved, and rolled back drafts."""
    model, context = make("llama_gqa"), prompt(2, 20)
    mask = left_pad(context, [20, 13])
    with kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        out = model.generate(context, attention_mask=mask, past_key_values=cache, **OPTIONS)
        seen = cache.get_seq_length()
        new, both = prompt(2, 40, seed=4), torch.ones(2, seen + 40, dtype=torch.long)
        both[:, :20] = mask
        model.generate(new, attention_mask=both, past_key_values=cache.clone(), **OPTIONS)
        repadded = torch.cat([out, new], 1)
        repadded[1, :7] = 3
        whole = torch.cat([mask, torch.ones(2, repadded.shape[1] - 20, dtype=torch.long)], 1)
        model.generate(repadded, attention_mask=whole, past_key_values=cache.clone(), **OPTIONS)
        turned = cache.clone()
        turned.reorder_cache(torch.tensor([1, 0]))
        model.generate(repadded[[1, 0]], attention_mask=whole[[1, 0]], past_key_values=turned.clone(), **OPTIONS)
        with pytest.raises(KVPatchError, match="at column 7 of row 0"):
            model.generate(repadded, attention_mask=torch.ones_like(whole), past_key_values=turned, **OPTIONS)
        model.generate(repadded[1:], attention_mask=whole[1:], past_key_values=cache.select_rows(1), **OPTIONS)
        for how in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
            rows = context if "num_beams" in how else context[:1]
            first = model.generate(rows, past_key_values=patch.new_cache(), **how, **OPTIONS)
            assert first.shape == (len(rows), 24)


def test_a_cache_at_everything_does_as_the_model_does():
    """At k=1.0 a patched model does what the unpatched one does, also with another text."""
    model, (context, one, other) = make("llama_gqa"), texts()
    plain = model(context).past_key_values
    model.generate(one, past_key_values=plain, **OPTIONS)
    want = model.generate(other, past_key_values=plain, **OPTIONS)
    with kvpatch.patched(model, "h2o", 1.0):
        cache = model(context).past_key_values
        model.generate(one, past_key_values=cache, **OPTIONS)
        assert torch.equal(model.generate(other, past_key_values=cache, **OPTIONS), want)


def test_a_stream_of_prompts_keeps_all_ids():
    model = make("llama_gqa")
    with kvpatch.patched(model, "streaming_llm", 10) as patch:
        cache = patch.new_cache()
        for seed in range(5):
            model(prompt(1, 8, seed=seed), past_key_values=cache)
        assert cache.ids.ids_BT.tolist() == torch.cat([prompt(1, 8, seed=seed) for seed in range(5)], 1).tolist()
