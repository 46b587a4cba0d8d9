"""What the state machine (stateful.py) found, each as the few calls that showed it."""

import pytest
import torch
from stateful_oracle import Chosen, Shadow, check_cache
from tiny import make, prompt

import kvpatch


@pytest.mark.parametrize("name", ["llama_gqa", "mpt"])
@pytest.mark.parametrize("mine", ["original", "renumbered"])
def test_a_cache_goes_on_with_its_own_positions_in_a_block_of_others(name, mine):
    """A cache keeps the settings it was made with; a block of other positions than its own left it without rotary tables."""
    model, other = make(name, dtype=torch.float64), {"original": "renumbered", "renumbered": "original"}[mine]
    ids, fed, logits = prompt(2, 9), prompt(2, 4, seed=2), {}
    for later in (mine, other):
        with torch.no_grad():
            with kvpatch.patched(model, "h2o", 4, positions=mine) as patch:
                cache = patch.new_cache()
                model(ids, past_key_values=cache)
            with kvpatch.patched(model, "h2o", 4, positions=later):
                logits[later] = torch.cat(
                    [model(fed[:, t : t + 1], past_key_values=cache).logits for t in range(4)], 1
                )
    assert torch.equal(logits[mine], logits[other])


def read(model, patch, *passes):
    cache = patch.new_cache()
    for ids in passes:
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer"])
def test_generated_rows_that_are_remembered_do_not_roll_back_unrecorded(policy):
    """Under schedule "prompt" generated rows count when a later turn evicts; rolled back, they went on counting."""
    model, ids, fed, more = make("llama_gqa", dtype=torch.float64), prompt(1, 12), prompt(1, 5, seed=2), prompt(1, 6, seed=3)
    steps = fed.split(1, 1)
    with torch.no_grad(), kvpatch.patched(model, policy, 6, schedule="prompt") as patch:
        cache = read(model, patch, ids, *steps)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 4 tokens: .* Call cache.activate_past_recording"):
            cache.crop(-4)
        recorded = patch.new_cache()
        recorded.activate_past_recording()
        for one in (ids, *steps):
            model(one, past_key_values=recorded)
        recorded.crop(-4)
        model(more, past_key_values=recorded)
        want = read(model, patch, ids, steps[0], more)
        for layer in range(2):
            assert torch.equal(recorded.positions(layer).sort(-1).values, want.positions(layer).sort(-1).values)
        for state, other in zip(recorded.layers, want.layers, strict=True):
            for name, tensor in state.state.items():
                torch.testing.assert_close(tensor.sum(-1), other.state[name].sum(-1), msg=name)
