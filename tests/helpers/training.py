"""Gradients of training steps, and a comparison of them with autograd through the oracle."""

import functools

import torch

import kvpatch
from tests.helpers.comparing import SMALL, draw
from tests.helpers.running import no_dropout
from tests.helpers.tiny import prompt
from tests.oracle import reference


def gradients(model, loss):
    """The gradients of a loss by the parameters' names, without any from before."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def agrees_with_naive_autograd(make, policy, checkpointing):
    """Compare loss and gradients under blocks of 6 with the oracle's, for weights whose evictions are decided.

    The oracle keeps autograd through every row and key; what to evict it decides on numbers alone, as the library does.
    `make(dtype=, seed=)` makes the model; `checkpointing` is None or what gradient_checkpointing_enable() takes.
    """
    options = SMALL.get(policy, {})
    for weights in range(6):
        model, ids = make(dtype=torch.float64, seed=weights), prompt(1, 24, seed=weights)
        want = reference.run(
            model, ids[0].tolist(), [], policy=policy, k=7, block=6, grad=True, draw=functools.partial(draw, 0), **options
        )
        if want.margin > 1e-6:
            break
    loss = torch.nn.functional.cross_entropy(want.logits[:-1], ids[0, 1:])
    naive = gradients(model, loss)
    no_dropout(model).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    with kvpatch.patched(model, policy, 7, block=6, **options):
        mine = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])  # the model's own loss is float32
        got = gradients(model, mine)
    torch.testing.assert_close(mine, loss.detach(), atol=1e-5, rtol=0)
    for name, gradient in naive.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
