"""Caches that the unpatched model filled."""

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

import kvpatch
from tests.helpers.marks import since
from tests.helpers.tiny import left_pad, make, prompt
from tests.helpers.tiny_families import make as family


@pytest.mark.parametrize("policy", ["window", "streaming_llm", "random", "key_norm"])
def test_an_unpatched_prompt_is_converted_where_that_is_exact(policy):
    model, ids, more = make("llama_gqa"), prompt(2, 24), prompt(2, 1, seed=4)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
    text = torch.cat([ids, more], 1)
    with kvpatch.patched(model, policy, 0.5) as patch:
        want = model.generate(text, max_new_tokens=6, do_sample=False, pad_token_id=0)
        got = model.generate(text, past_key_values=past, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(want, got)
        with torch.no_grad():
            cache = patch.new_cache(past)
            for held in (12, 12, 12):  # half of 25 tokens, from the first one that follows
                assert torch.isfinite(model(more, past_key_values=cache).logits).all()
                assert cache.held(0).unique().tolist() == [held]
    with kvpatch.patched(model, "h2o", 0.5), pytest.raises(kvpatch.KVPatchError, match="Run the prompt inside"):
        model.generate(text, past_key_values=past, max_new_tokens=2)


@pytest.mark.parametrize("room", [24, 25, 40])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_a_static_cache_hands_over_what_it_has_read(name, room):
    model, ids, more = (make if name == "llama_gqa" else family)(name), prompt(2, 24), prompt(2, 3, seed=4)
    mask = left_pad(torch.cat([ids, more], 1), [27, 20])
    static, dynamic = StaticCache(model.config, max_cache_len=room), DynamicCache(config=model.config)
    with torch.no_grad():
        for past in (static, dynamic):
            model(ids, attention_mask=mask[:, :24], past_key_values=past)
    with kvpatch.patched(model, "key_norm", 0.5) as patch, torch.no_grad():
        with pytest.raises(kvpatch.KVPatchError, match=r"patch.compress\(past, attention_mask=...\) says what is padding"):
            model(more, attention_mask=mask, past_key_values=patch.new_cache(static))
        mine, theirs = (patch.compress(past, attention_mask=mask[:, :24]) for past in (static, dynamic))
        got, want = (model(more, attention_mask=mask, past_key_values=cache).logits for cache in (mine, theirs))
        mine.check_invariants()
    torch.testing.assert_close(got, want)
    assert mine.get_seq_length() == 27 and static.get_seq_length() == 24
    assert torch.equal(mine.held(0), theirs.held(0))


@since("5.24", "QuantizedCache has no fp8")
def test_a_cache_that_holds_rounded_tokens_is_refused():
    model, ids = make("llama_gqa"), prompt(2, 24)
    past = QuantizedCache("fp8", model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
    with kvpatch.patched(model, "key_norm", 0.5) as patch, pytest.raises(kvpatch.KVPatchError, match="Layer 0 of the Quant"):
        patch.new_cache(past)
