"""One layer's queries, keys and values as attention takes them."""

import contextlib

import pytest
import torch

import kvpatch
from tests.helpers.running import N
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_values_of_another_dtype_are_taken_as_the_cache_s(model):
    """Autocast turns projections into half precision and leaves what rotary positions touch."""

    def run(change):
        with kvpatch.patched(model, "h2o", 0.5) as handle, contextlib.ExitStack() as hooks:
            cache = handle.new_cache()
            model(prompt(2, N), past_key_values=cache)
            for layer in model.model.layers:
                attn = layer.self_attn
                for hook in (
                    attn.v_proj.register_forward_hook(lambda module, given, out: change(out)),
                    attn.o_proj.register_forward_pre_hook(lambda module, given: (given[0].bfloat16().float(),)),
                ):
                    hooks.callback(hook.remove)
            return [model(prompt(2, n, seed=3), past_key_values=cache).logits for n in (1, 1, 5)]

    got, want = run(lambda out: out.bfloat16()), run(lambda out: out.bfloat16().float())
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
