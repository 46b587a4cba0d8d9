"""Under autocast scores, norms and statistics stay float32."""

import pytest
import torch

import kvpatch
from kvpatch.hooks import attention
from tests.helpers.tiny import force, make, prompt


@pytest.mark.parametrize("base", ["h2o", "snapkv", "adaptive(roco)", "keyformer", "key_norm"])
def test_scores_norms_and_statistics_are_float32_under_autocast(base, monkeypatch):
    """What is attended is what autocast made of it; all that is made of it is as it is without autocast."""
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 5, seed=2)
    policy = kvpatch.get_policy(base if base == "key_norm" else f"critical({base})")
    attend, calls = attention.attend, []

    def noting(cache, layer, q, k, v, *bound):
        calls.append((layer, q, k, v))
        return attend(cache, layer, q, k, v, *bound)

    def replaying(cache, layer, q, k, v, *bound):
        index, *noted = calls.pop(0)
        assert index == layer
        noted = [part.to(noted[-1].dtype) for part in noted]  # the cache's own
        return attend(cache, layer, *noted, *bound)

    def run(at_attention):
        with monkeypatch.context() as patched:
            patched.setattr(attention, "attend", at_attention)
            with kvpatch.patched(model, policy, 0.4):
                _, cache = force(model, ids, fed)
        return cache.layers

    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(noting)
    assert calls
    plain = run(replaying)
    assert not calls
    for one, other in zip(mixed, plain, strict=True):
        assert one.keys.dtype == torch.bfloat16 and one.state.keys() == other.state.keys()
        assert torch.equal(one.positions, other.positions)
        for name, tensor in one.state.items():
            assert tensor.dtype == torch.float32 or name == "protect"
            assert torch.equal(tensor, other.state[name]), name


def test_autocast_and_a_projection_that_is_asked():
    """A LoRA's weights are float32 and its values half: it is asked as it runs."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["o_proj"], init_lora_weights=False)
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 5, seed=2)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, config).eval()
    with kvpatch.patched(wrapped, "critical(h2o)", 0.4), torch.autocast("cpu", torch.bfloat16):
        logits, cache = force(wrapped, ids, fed)
    assert torch.isfinite(logits).all() and cache.layers[0].output_rows is not None
