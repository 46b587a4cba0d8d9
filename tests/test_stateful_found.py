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
