"""Law 9: without block=, a training step inside the block is bit for bit the one outside."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import FIVE, MORE, make, prompt
from tests.helpers.training import gradients


def step(model, ids):
    loss = model(ids, labels=ids).loss
    return loss.detach(), gradients(model, loss)


@pytest.mark.parametrize("name", [*FIVE, *MORE])
def test_a_training_step_is_bit_for_bit_the_same(name):
    model, ids = make(name).train(), prompt(2, 24)
    torch.manual_seed(3)
    loss, grads = step(model, ids)
    with kvpatch.patched(model, "keyformer", 0.2):
        torch.manual_seed(3)
        loss_inside, grads_inside = step(model, ids)
    assert torch.equal(loss, loss_inside)
    assert grads.keys() == grads_inside.keys()
    assert all(torch.equal(grads[name], grads_inside[name]) for name in grads)


def test_gradient_checkpointing_and_cacheless_forwards_are_untouched():
    model, ids = make("llama").train(), prompt(2, 24)
    model.gradient_checkpointing_enable()
    loss, grads = step(model, ids)
    with kvpatch.patched(model, "h2o", 0.2):
        loss_inside, grads_inside = step(model, ids)
        model.eval()
        with torch.no_grad():
            inside = model(ids, use_cache=False)
    assert torch.equal(loss, loss_inside)
    assert all(torch.equal(grads[name], grads_inside[name]) for name in grads)
    assert inside.past_key_values is None
    with torch.no_grad():
        assert torch.equal(inside.logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", FIVE)
def test_gradients_flow_through_a_prompt_with_a_cache(name):
    model, ids = make(name, dtype=torch.float64), prompt(2, 24)
    _, grads = step(model, ids)
    with kvpatch.patched(model, "roco", 0.3):
        _, inside = step(model, ids)
    for key in grads:
        torch.testing.assert_close(grads[key], inside[key], atol=1e-5, rtol=1e-4)
