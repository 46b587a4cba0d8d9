"""A prompt that is read in blocks: what cannot be computed is refused, and a loss sees what is evicted."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt


def test_attention_dropout_is_refused_while_training():
    """It would be left out in silence: the probabilities it acts on are gone when the output is there."""
    model, ids = make("gpt2"), prompt(1, 20)
    model.train()
    with kvpatch.patched(model, "h2o", 5, block=4):
        with pytest.raises(kvpatch.KVPatchError, match=r"attention dropout of 0\.1.*attn_pdrop"):
            model(ids)
        model.eval()
        assert torch.isfinite(model(ids, use_cache=False).logits).all()


def test_the_loss_sees_the_eviction():
    model, ids = make("llama_gqa"), prompt(1, 60)
    model.train()
    full = model(ids, labels=ids).loss
    with kvpatch.patched(model, "window", 20, block=10):
        evicted = model(ids, labels=ids).loss
    with kvpatch.patched(model, "window", 1.0, block=10):
        same = model(ids, labels=ids).loss
    assert abs(evicted - full) > 1e-3
    torch.testing.assert_close(same, full, atol=1e-5, rtol=0)
