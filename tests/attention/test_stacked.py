"""Decode steps over a stack of alike layers."""


import pytest
import torch

import kvpatch
from kvpatch.attention.stacked import LayerStack
from tests.helpers.comparing import EVICTING, WINDOWED
from tests.helpers.running import SEVERAL, go_on, kept, read, run
from tests.helpers.tiny import force, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")

@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_layer_by_layer_and_stacked_steps_agree(monkeypatch):
    """Also where the cache is cloned between steps."""
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 9, seed=2)
    critical = [kvpatch.get_policy(f"critical({base})") for base in ("keyformer", "tova", "roco")]
    for policy in (*EVICTING, *critical):
        stacked, one = run(model, ids, fed, policy, 0.4)
        assert (one.stack is None) == (policy in WINDOWED)
        with kvpatch.patched(model, policy, 0.4) as patch:
            cache = patch.new_cache()
            force(model, ids, fed[:, :4], cache=cache)
            twin = cache.clone()
            go_on(model, prompt(2, 3, seed=8), cache)
            again, _ = go_on(model, fed[:, 4:], twin)
        torch.testing.assert_close(stacked[:, 5:], again, atol=1e-6, rtol=0)
        with monkeypatch.context() as patched_out:
            patched_out.setattr(kvpatch.attention.attend, "_stack", lambda *_: None)
            alone, other = run(model, ids, fed, policy, 0.4)
        assert other.stack is None
        torch.testing.assert_close(stacked, alone, atol=1e-6, rtol=0)
        assert kept(one) == kept(other) == kept(twin)


def test_steps_are_stacked_once_the_slots_are_full():
    """A prompt below its budget fills up layer by layer; from then on all layers evict together."""
    model, ids, fed = make("llama_gqa"), prompt(2, 12), prompt(2, 12, seed=2)
    for policy in SEVERAL:
        _, cache = run(model, ids, fed[:, :5], policy, 16)
        assert cache.stack is None
        _, cache = run(model, ids, fed, policy, 16)
        assert cache.stack is not None
        assert cache.held(1).tolist() == [[16, 16], [16, 16]]


def test_layers_stand_side_by_side_in_one_stack(model, monkeypatch):
    """Made once, at the first step after a prompt."""
    made, of = [], LayerStack.of
    monkeypatch.setattr(LayerStack, "of", lambda *given: made.append(of(*given)) or made[-1])
    cache = read(model, "h2o", 0.5, steps=4)
    assert len(made) == 1
    assert cache.stack is made[0]
    assert not cache.stack_due


def test_kernels_have_no_stack(model):
    pytest.importorskip("triton")
    cache = read(model, "h2o", 0.5, steps=2, backend="triton")
    assert cache.stack is None


def test_copies_make_a_stack_of_their_own(model):
    assert read(model, "h2o", 0.5, steps=2).clone().stack_due
    assert not read(model, "h2o", 0.5, room=4).clone().stack_due
