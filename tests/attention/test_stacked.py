"""Decode steps over a stack of alike layers."""

from itertools import product

import pytest
import torch

import kvpatch
from kvpatch.attention.stacked import LayerStack
from tests.helpers.comparing import EVICTING, ONCE
from tests.helpers.marks import slow_but
from tests.helpers.running import SEVERAL, go_on, kept, read, run
from tests.helpers.tiny import force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_layer_by_layer_and_stacked_steps_agree(monkeypatch):
    """Also where the cache is cloned between steps."""
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 9, seed=2)
    critical = [kvpatch.get_policy(f"critical({base})") for base in ("keyformer", "tova", "roco")]
    drawn_anew = kvpatch.get_policy("keyformer").with_options(resample=True)  # by the numbers of layers and heads
    for policy in (*EVICTING, *critical, drawn_anew):
        stacked, one = run(model, ids, fed, policy, 0.4)
        assert (not one.stacked) == (policy in ONCE or policy == "key_diff")
        with kvpatch.patched(model, policy, 0.4) as patch:
            cache = patch.new_cache()
            force(model, ids, fed[:, :4], cache=cache)
            twin = cache.clone()
            go_on(model, prompt(2, 3, seed=8), cache)
            again, _ = go_on(model, fed[:, 4:], twin)
        torch.testing.assert_close(stacked[:, 5:], again, atol=1e-6, rtol=0)
        with monkeypatch.context() as patched_out:
            patched_out.setattr(kvpatch.attention.attend, "_find_stack", lambda *_: None)
            alone, other = run(model, ids, fed, policy, 0.4)
        assert not other.stacked
        torch.testing.assert_close(stacked, alone, atol=1e-6, rtol=0)
        assert kept(one) == kept(other) == kept(twin)
        for mine, own in zip(one.layers, other.layers, strict=True):
            torch.testing.assert_close(mine.state, own.state, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_steps_are_stacked_once_the_slots_are_full():
    """A prompt below its budget fills up layer by layer; from then on all layers evict together."""
    model, ids, fed = make("llama_gqa"), prompt(2, 12), prompt(2, 12, seed=2)
    for policy in SEVERAL:
        _, cache = run(model, ids, fed[:, :5], policy, 16)
        assert not cache.stacked
        _, cache = run(model, ids, fed, policy, 16)
        assert cache.stacked
        assert cache.held(1).tolist() == [[16, 16], [16, 16]]


def test_layers_stand_side_by_side_in_one_stack(model, monkeypatch):
    """Made once, at the first step after a prompt."""
    made, of = [], LayerStack.of
    monkeypatch.setattr(LayerStack, "of", lambda *given: made.append(of(*given)) or made[-1])
    cache = read(model, "h2o", 0.5, steps=4)
    assert len(made) == 1
    assert cache.steps.stack is made[0]
    assert not cache.stack_due


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", slow_but((), ("h2o", "keyformer", "roco", "tova", "critical(h2o)")))
def test_kernels_step_stacked_layers(model, policy, monkeypatch):
    """Whoever names the victims, they are those of layers that step alone, and of torch."""
    pytest.importorskip("triton")
    ids, fed = prompt(2, 16), prompt(2, 5, seed=2)
    stacked, one = run(model, ids, fed, policy, 0.5, backend="triton")
    assert one.stacked and one.steps.stack.backend == one.backend_choice.ran_last["decode"][0] == "triton"
    with monkeypatch.context() as patched_out:
        patched_out.setattr(kvpatch.attention.attend, "_find_stack", lambda *_: None)
        alone, other = run(model, ids, fed, policy, 0.5, backend="triton")
    by_torch, third = run(model, ids, fed, policy, 0.5, backend="torch")
    torch.testing.assert_close(stacked, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(stacked, by_torch, atol=1e-5, rtol=0)
    assert kept(one) == kept(other) == kept(third)


@pytest.mark.parametrize("policy", ["key_norm", "critical(h2o)"])
def test_kernels_note_the_norms_of_tokens_that_are_appended(model, policy):
    """By which they are evicted once the budget is full."""
    pytest.importorskip("triton")
    ids, fed = prompt(2, 16), prompt(2, 9, seed=2)
    (got, one), (want, other) = (run(model, ids, fed, policy, 20, backend=name) for name in ("triton", "torch"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert one.backend_choice.ran_last["decode"][0] == "triton" and kept(one) == kept(other)


def test_kernels_step_stacked_layers_with_tokens_of_the_users(model):
    pytest.importorskip("triton")
    ids, fed = prompt(2, 16), prompt(2, 5, seed=2)
    named = ids[0, 3:5].tolist()
    stacked, one = run(model, ids, fed, "h2o", 0.5, backend="triton", protect=named)
    alone, other = run(model, ids, fed, "h2o", 0.5, backend="torch", protect=named)
    torch.testing.assert_close(stacked, alone, atol=1e-5, rtol=0)
    assert one.stacked and kept(one) == kept(other)


@pytest.mark.parametrize("policy", ["window", "roco"])
def test_kernels_step_stacked_layers_with_quotas(model, policy):
    pytest.importorskip("triton")
    ids, fed, quota = prompt(2, 16), prompt(2, 7, seed=2), [(0, 6), (6, 16)]
    stacked, one = run(model, ids, fed, policy, 0.5, backend="triton", quota=quota, recent=1)
    alone, other = run(model, ids, fed, policy, 0.5, backend="torch", quota=quota, recent=1)
    torch.testing.assert_close(stacked, alone, atol=1e-5, rtol=0)
    assert one.stacked and kept(one) == kept(other)


def test_a_step_with_gradients_is_not_the_kernels(model):
    pytest.importorskip("triton")
    with kvpatch.patched(model, "roco", 0.5, backend="triton") as patch:
        cache = patch.new_cache()
        force(model, prompt(1, 16), prompt(1, 2), cache=cache)
        assert cache.stacked
        with torch.enable_grad():
            model(prompt(1, 1), past_key_values=cache).logits.sum().backward()
        assert cache.steps.stack.backend == cache.backend_choice.ran_last["decode"][0] == "torch"
        model.zero_grad()
        force(model, prompt(1, 1), prompt(1, 1)[:, :0], cache=cache)
        assert cache.steps.stack.backend == cache.backend_choice.ran_last["decode"][0] == "triton"


APPENDED = {
    "full": {},
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 4},
    "h2o, below its budget": {"k": 20},
    "roco, below its budget": {"k": 20},
    "critical(keyformer), below its budget": {"k": 20},
    "h2o, a window over several turns": {"schedule": "prompt"},
}


WAYS_TO_APPEND = [*product(APPENDED, (False, True))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "padded"), slow_but((), WAYS_TO_APPEND))
def test_kernels_append(model, case, padded):
    """What is appended lies where torch appends it, also past the room that a prompt leaves, and in a second turn."""
    pytest.importorskip("triton")
    ids, fed, options = prompt(2, 16), prompt(2, 11, seed=2), {"k": 0.5} | APPENDED[case]
    mask = left_pad(ids, [16, 12]) if padded else None
    found = {}
    for backend in ("triton", "torch"):
        with kvpatch.patched(model, case.split(",")[0], backend=backend, **options):
            logits, cache = force(model, ids, fed, mask)
            ran = cache.backend_choice.ran_last[
                "ragged" if padded and "decode" not in cache.backend_choice.ran_last else "decode"
            ][0]
            if not padded:
                more, _ = force(model, prompt(2, 3, seed=5), fed[:, :2], cache=cache)
                logits = torch.cat([logits, more], 1)
        assert ran == backend
        found[backend] = logits, kept(cache)
    torch.testing.assert_close(*(found[backend][0] for backend in found), atol=1e-5, rtol=0)
    assert found["triton"][1] == found["torch"][1]


@pytest.mark.slow
def test_kernels_take_back_what_they_appended(model):
    pytest.importorskip("triton")
    found = []
    for backend in ("triton", "torch"):
        with kvpatch.patched(model, "h2o", 20, backend=backend) as patch:
            cache = patch.new_cache()
            cache.activate_past_recording()
            force(model, prompt(1, 16), prompt(1, 3, seed=2), cache=cache)
            cache.crop(-2)
            logits, _ = force(model, prompt(1, 1, seed=4), prompt(1, 6, seed=5), cache=cache)
            found.append((logits, kept(cache)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=0)
    assert found[0][1] == found[1][1]


def test_copies_make_a_stack_of_their_own(model):
    assert read(model, "h2o", 0.5, steps=2).clone().stack_due
    assert not read(model, "h2o", 0.5, room=4).clone().stack_due


def test_norms_of_generated_tokens_are_those_of_their_layer_s_values():
    """Norms are written for all layers at once, from what each layer noted when its value came."""
    model = make("llama_gqa", layers=3)
    with kvpatch.patched(model, "critical(h2o)", 0.5) as patch:
        cache = patch.new_cache()
        force(model, prompt(2, 12), prompt(2, 9, seed=2), cache=cache)
        assert cache.stacked
        for layer, block in zip(cache.layers, model.model.layers, strict=True):
            _, values, positions = layer.view()
            assert (positions.amax((1, 2)) == 20).all() and (positions >= 12).sum() > 0
            rows = block.self_attn.o_proj.weight.T.unflatten(0, (2, -1, values.shape[-1]))
            norms = torch.einsum("bhtd,hgde->bhgte", values, rows).abs().sum(-1).mean(2)
            torch.testing.assert_close(layer.state_view()["norm"], norms)


def test_layers_are_stacked_again_after_an_edit(model):
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache = patch.new_cache()
        force(model, prompt(1, 40), prompt(1, 3, seed=2), cache=cache)
        assert cache.stacked
        patch.replace(cache, (10, 14), prompt(1, 4, seed=7))
        assert not cache.stacked
        go_on(model, prompt(1, 2, seed=3), cache)
        assert cache.stacked
