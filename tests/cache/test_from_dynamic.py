"""Caches that the unpatched model filled."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt


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
