"""A pass whose cache does not reach an attention layer is noticed."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("B", "Q"), [(2, 12), (1, 1)])
@pytest.mark.parametrize("name", ["llama_gqa", "mpt"])
def test_a_cache_that_gradient_checkpointing_takes_away_is_missed(name, B, Q, reentrant):
    model = make(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    words = r"did not reach an attention layer.*model\.eval\(\)"
    with kvpatch.patched(model, "h2o", 0.5) as handle, pytest.raises(kvpatch.KVPatchError, match=words):
        model(prompt(B, Q), past_key_values=handle.new_cache())


def test_a_mask_that_the_model_replaces_is_missed():
    """A pass that keeps no cache has its own on the mask; without it every token would see all others."""
    model = make("llama_gqa")

    def copied(module, args, kwargs):
        return args, {**kwargs, "attention_mask": torch.tensor(kwargs["attention_mask"].tolist())}

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(copied, with_kwargs=True)
    words = "did not reach an attention layer"
    with kvpatch.patched(model, "h2o", 0.5, block=4), pytest.raises(kvpatch.KVPatchError, match=words):
        model(prompt(1, 12), use_cache=False)
    hook.remove()
