"""Policies of long generations on the Triton kernels: these attend, torch names who goes, and says why."""

from tests.backends import on_triton  # isort: skip  # before a kernel is defined

import pytest
import torch

import kvpatch
from kvpatch.backends.triton import triton_backend
from kvpatch.policies import scores
from tests.helpers.comparing import DECODING, SMALL_STEPS, same_tokens
from tests.helpers.tiny import force, make, prompt
from tests.policies.test_decoding import K

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("policy", DECODING)
def test_the_kernels_attend_and_torch_evicts(policy):
    k, options = K[policy], SMALL_STEPS[policy]
    model = make("llama_gqa", layers=1).to(on_triton.DEVICE)
    ids, fed = prompt(2, 14).to(on_triton.DEVICE), prompt(2, 9, seed=4).to(on_triton.DEVICE)
    found = {}
    for backend in ("torch", "triton"):
        with kvpatch.patched(model, policy, k, backend=backend, **options) as patch:
            logits, cache = force(model, ids, fed)
            found[backend] = logits, [cache.positions(0).sort(-1).values.cpu()], patch.report()
            why = triton_backend.torch_evicts(cache.settings.policy, cache.layers[0])
    torch.testing.assert_close(found["triton"][0], found["torch"][0], atol=2e-5, rtol=0)
    assert same_tokens(found["triton"][1], found["torch"][1])
    assert cache.held(0).max() <= (14 if policy in ("raas", "lazy") else 0) + k + options.get("every", 1) - 1
    name, reason = found["triton"][2].backends["decode"]
    assert name == "triton" and why in reason
    assert why == ("several tokens are evicted at once" if "every" in options else "no kernel knows the score's value()")


def test_torch_evicts_by_means_where_rows_have_not_seen_an_edit():
    """The kernels count rows by positions."""
    model, found = make("llama_gqa", layers=1).to(on_triton.DEVICE), {}
    ids, fed = prompt(2, 14).to(on_triton.DEVICE), prompt(2, 6, seed=4).to(on_triton.DEVICE)
    for backend in ("torch", "triton"):
        with kvpatch.patched(model, kvpatch.Policy("mine", scores.Mean()), 9, backend=backend) as patch:
            _, cache = force(model, ids, fed[:, :2])
            assert triton_backend.torch_evicts(cache.settings.policy, cache.layers[0]) is None
            patch.replace(cache, (1, 8), fed[:, :5])
            for t in range(6):
                model(fed[:, t : t + 1], past_key_values=cache)
            found[backend] = [cache.positions(0).sort(-1).values.cpu()]
            why = triton_backend.torch_evicts(cache.settings.policy, cache.layers[0])
    assert same_tokens(found["triton"], found["torch"])
    assert why == "an edit's tokens were seen by other rows than positions say" and why in str(patch.report().backends)
