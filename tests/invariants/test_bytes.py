"""Law 10: what is allocated is what is held, and a stated slack."""

import pytest
import torch

import kvpatch
from kvpatch.cache.layer import slack
from tests.helpers.comparing import combined
from tests.helpers.joined import same_kept
from tests.helpers.running import RAGGED, run, uneven
from tests.helpers.tiny import force, left_pad, make, prompt


def test_cache_bytes_are_what_is_allocated_and_constant_over_steps():
    model, ids, fed = make("llama_gqa"), prompt(2, 64), prompt(2, 12, seed=2)
    with kvpatch.patched(model, "h2o", 0.5), torch.no_grad():
        past, sizes, pointers = None, set(), set()
        for t in range(12):
            new = ids if t == 0 else fed[:, t - 1 : t]
            past = model(new, past_key_values=past, use_cache=True).past_key_values
            sizes.add(past.nbytes)
            pointers.add(past.layers[0].keys.data_ptr())
    assert sizes == {2 * 2 * 2 * 2 * 33 * 8 * 4}  # layers, K and V, rows, heads, budget + 1 slots, head size, float32
    assert len(pointers) == 1, "the slots are allocated once"
    _, grown = run(model, ids, fed, "snapkv", 0.5)
    assert grown.nbytes < 2 * 2 * 2 * 2 * 140 * 8 * 4


@pytest.mark.parametrize("policy", RAGGED.values(), ids=RAGGED)
def test_bytes_are_the_sum_of_what_heads_hold(policy):
    model, ids, fed = make("llama_gqa"), prompt(2, 60), prompt(2, 40, seed=2)
    mask = left_pad(ids, [60, 41])
    with kvpatch.patched(model, policy, 0.4):
        for steps in (0, 1, 7, 8, 9, 24):
            _, cache = force(model, ids, fed[:, :steps], mask)
            held = sum(uneven(cache).held(layer).sum() for layer in range(2))
            free = 1 if policy.schedule == "both" else -steps % 8 if steps else 8  # room is made for eight at a time
            assert cache.nbytes == (held + 8 * free) * 2 * 8 * 4
            assert (held == 4 * (24 + 16)) == (policy.schedule == "both" or steps == 0)


LENGTHS = (400, 40)
PADDED = [
    *(("h2o", (), schedule) for schedule in ("prompt", "decode", "both")),
    *(("roco", ("adaptive",), schedule) for schedule in ("prompt", "both")),
    *(("tova", ("pyramid",), schedule) for schedule in ("prompt", "decode", "both")),
    ("snapkv", ("adaptive", "critical"), "prompt"),
]


@pytest.mark.parametrize(("policy", "wrap", "schedule"), PADDED, ids=str)
def test_a_short_row_beside_a_long_one_holds_its_own_budget(policy, wrap, schedule):
    """After the prompt and at every step: the sum of what rows may hold, a free slot each, and little more."""
    model, steps = make("llama_gqa", dtype=torch.float64), 18
    ids, fed = prompt(2, max(LENGTHS)), prompt(2, steps, seed=2)
    with torch.no_grad(), kvpatch.patched(model, combined(kvpatch.get_policy(policy), wrap), 0.5, schedule=schedule) as patch:
        cache, mask = patch.new_cache(), left_pad(ids, LENGTHS)
        logits, _ = force(model, ids, fed[:, :0], mask, cache=cache)
        outs, most = [logits], []
        for t in range(steps + 1):
            grown = t if schedule == "prompt" else 0
            whole = 1 if schedule == "decode" else 0
            rows = [n // 2 + whole * n + grown + (slack(n // 2 + grown) if schedule == "prompt" else 1) for n in LENGTHS]
            per_slot = cache.nbytes / (model.config.num_hidden_layers * 2 * 2 * 8 * 8)
            most.append(per_slot <= sum(rows) + 2 * (slack(220) if schedule == "prompt" else 0))
            assert per_slot <= 0.8 * 2 * max(rows), "no more than a batch of longest rows: the short one must cost less"
            if t < steps:
                place = {"position_ids": cache.next_positions()}
                outs.append(model(fed[:, t : t + 1], past_key_values=cache, **place).logits)
        assert all(most), most
        for row, n in enumerate(LENGTHS):
            alone, one = force(model, ids[row : row + 1, -n:], fed[row : row + 1])
            torch.testing.assert_close(torch.cat(outs, 1)[row : row + 1], alone, atol=1e-6, rtol=0)
            same_kept(cache, row, one)
