"""torch.inference_mode() may come and go between the passes over a cache."""

import copy

import pytest
import torch

import kvpatch
from kvpatch.cache import from_dynamic
from tests.helpers.comparing import SMALL
from tests.helpers.joined import Loop, do
from tests.helpers.running import N, go_on, read, run
from tests.helpers.tiny import force, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


@pytest.mark.parametrize("policy", ["keyformer", "tova", "snapkv", "full"])
def test_inference_mode_may_come_and_go(policy):
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 6, seed=2)
    want, _ = run(model, ids, fed, policy, 0.4)
    with kvpatch.patched(model, policy, 0.4) as patch:
        cache = patch.new_cache()
        with torch.inference_mode():
            force(model, ids, fed[:, :2], cache=cache)
        with torch.no_grad():
            model(fed[:, 2:3], past_key_values=cache, use_cache=True)
        with torch.inference_mode():
            got, _ = go_on(model, fed[:, 3:], cache)
    torch.testing.assert_close(want[:, 4:], got, atol=1e-5, rtol=0)


def taken_over(cache, model):
    past = model(prompt(2, N)).past_key_values
    with kvpatch.patched(model, "window", 0.5) as patch:
        new = patch.new_cache()
        from_dynamic.absorb(new, past)
    return new


CHANGES = {
    "reorder": lambda cache, _: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache, _: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda cache, _: cache.batch_repeat_interleave(1),
    "crop": lambda cache, _: cache.crop(-1),
    "copy": lambda cache, _: copy.deepcopy(cache),
    "join": lambda cache, _: kvpatch.EvictingCache.concatenate([cache, cache.clone()]),
    "take over": lambda cache, model: taken_over(cache, model),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_in_inference_mode_leaves_a_cache_that_can_be_written(model, name):
    cache = read(model, "h2o", 0.5, steps=2, record=name == "crop")
    with torch.inference_mode():
        cache = CHANGES[name](cache, model) or cache
    tensors = [cache.seen_B, *(one.positions for one in cache.layers)]
    if name != "take over":  # the model's own keys and values, until the next pass
        tensors += [one for layer in cache.layers for one in (layer.keys, layer.values, layer.state["sum"])]
    assert not any(one.is_inference() for one in tensors)


@pytest.mark.parametrize("policy", ["h2o", "adakv", "full"])
def test_everything_in_inference_mode(policy):
    """Nothing that a cache does under torch.inference_mode() leaves it less writable than it was."""
    model = make("llama_gqa", dtype=torch.float64)
    with torch.inference_mode(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        loop = Loop(model, patch)
        loop.add((30, 0), (7, 3), (19, 7))
        loop.step()
        for deed in ("drop", "clone", "repeat", "reorder", "step"):
            do(loop, deed, 1, None)
            loop.step()
        beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": 3}
        inside = model.generate(prompt(1, 20), **beams)
        with torch.inference_mode(False), torch.no_grad():
            loop.step()
            assert torch.equal(model.generate(prompt(1, 20), **beams), inside)
