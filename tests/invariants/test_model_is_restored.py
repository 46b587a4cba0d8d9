"""Law 2: after the block, also one that raised, the model is as before: attributes, hooks, and logits bit for bit."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import FIVE, make, prompt, snapshot


@pytest.mark.parametrize("name", FIVE)
def test_after_the_block_the_model_is_as_before(name):
    model, ids = make(name), prompt(2, 20)
    before, logits = snapshot(model), model(ids).logits
    keys = set(vars(model))
    with kvpatch.patched(model, "h2o", 0.3):
        assert snapshot(model) != before
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert snapshot(model) == before
    assert set(vars(model)) == keys
    assert torch.equal(model(ids).logits, logits)


def test_an_error_inside_the_block_restores_the_model_too():
    model, ids = make("llama"), prompt(1, 20)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), kvpatch.patched(model, "h2o", 0.3):
        model(ids)
        raise ZeroDivisionError
    assert snapshot(model) == before


def test_a_failed_installation_leaves_nothing_behind(monkeypatch):
    model = make("llama")
    before = snapshot(model)
    monkeypatch.setattr(kvpatch.hooks.install, "wrap_generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kvpatch.patch(model, "h2o", 0.3)
    assert snapshot(model) == before


def test_a_foreign_patch_is_restored_and_remove_works_twice():
    model, ids = make("llama"), prompt(1, 20)
    attention = model.model.layers[0].self_attn
    calls = []
    original = attention.forward

    def foreign(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    attention.forward = foreign
    handle = kvpatch.patch(model, "h2o", 0.3)
    model(ids)
    assert not calls, "with a cache, attention is kvpatch's"
    model(ids, use_cache=False)
    assert calls, "without one it is what stood there before"
    handle.remove()
    handle.remove()
    assert attention.forward is foreign
