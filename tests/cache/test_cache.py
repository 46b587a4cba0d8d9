"""Copies of a cache, rows that move, lengths, and starting anew."""

import copy
import inspect
import re

import numpy as np
import pytest
import torch

import kvpatch
from kvpatch.cache import passes
from kvpatch.cache.settings import CacheSettings
from kvpatch.policies import get_policy
from kvpatch.policies.budgets import Budget
from tests.helpers import tiny_families
from tests.helpers.running import RAGGED, N, go_on, read, uneven
from tests.helpers.tiny import force, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_before_anything_was_read(model):
    cache = kvpatch.EvictingCache(CacheSettings(get_policy("keyformer"), Budget((0.5, 0.5))))
    assert (cache.settings.seed, cache.counters.steps, cache.turns.prompts_read, cache.get_seq_length()) == (0, 0, 0, 0)
    assert inspect.signature(passes.begin).parameters["repeatable"].default is False
    assert (cache.for_one_pass, cache.stack_due) == (False, False)
    assert (cache.settings.block, cache.settings.renumbered, cache.turns.unfinished) == (None, False, False)
    assert (cache.rows.concatenated, cache.rows.padded) == (False, False)


def test_reset_starts_anew(model):
    cache = read(model, "h2o", 0.5, steps=2)
    cache.reset()
    assert (cache.stacked, cache.stack_due) == (False, False)
    assert (cache.counters.steps, cache.turns.prompts_read, cache.turns.unfinished) == (0, 0, False)
    assert (cache.get_seq_length(), cache.seen_B) == (0, None)


@pytest.mark.parametrize("policy", ["keyformer", *RAGGED])
def test_repeat_select_reorder_clone_and_reset(policy):
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 9, seed=2)
    options = {"shared": True} if policy == "keyformer" else {}
    with kvpatch.patched(model, RAGGED.get(policy, policy), 0.4, **options) as patch:
        want, _ = force(model, ids, fed)
        cache = patch.new_cache()
        force(model, ids, fed[:, :2], cache=cache)
        (uneven(cache) if policy in RAGGED else cache).batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        twin, swapped = cache.clone(), fed.flip(0)
        logits, _ = go_on(model, swapped[:, 2:], cache)
        torch.testing.assert_close(want[:, 3:].flip(0), logits, atol=1e-5, rtol=0)
        again, _ = go_on(model, swapped[:, 2:], twin)
        assert torch.equal(logits, again), "a clone is independent of what happened to the original"
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.nbytes == 0
        fresh, _ = force(model, ids, fed, cache=cache)
        assert torch.equal(want, fresh)


def test_rows_that_move_leave_columns_and_the_clock(model):
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, :6] = mask[1, :4] = 0
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        model(prompt(2, N), attention_mask=mask, past_key_values=cache)
    clock = cache.counters.tensors_or_none
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.seen_B.tolist() == [N - 4, N - 6]
    assert cache.get_seq_length() == N
    assert cache.counters.tensors_or_none is clock
    assert (cache.stacked, cache.stack_due) == (False, False)


def test_what_fails_before_anything_moved_changes_nothing(model):
    cache = read(model, "h2o", 0.5)

    def fail(tensor):
        raise MemoryError

    with pytest.raises(MemoryError):
        cache._map_rows("reorder_cache()", fail)
    assert not cache.unfinished


@pytest.mark.parametrize("layer", [True, False, 0.0, "0", None, 2, -3])
def test_a_layer_is_one_of_the_cache_s(model, layer):
    cache = read(model, "h2o", 0.5)
    for ask in (cache.held, cache.positions, cache.get_seq_length):
        with pytest.raises(kvpatch.KVPatchError, match=re.escape(f"={layer!r}: the cache has the layers 0 to 1")):
            ask(layer)
    assert torch.equal(cache.held(-1), cache.held(1))


def test_a_shallow_copy_is_a_clone(model):
    """Two caches that shared layers would go on at each other's positions."""
    fed, other = prompt(2, 4, seed=4), prompt(2, 4, seed=5)
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache = patch.new_cache()
        model(prompt(2, 40), past_key_values=cache)
        want, _ = go_on(model, fed, cache.clone())
        copied = copy.copy(cache)
        go_on(model, other, copied)
        assert (copied.get_seq_length(), cache.get_seq_length()) == (44, 40)
        assert torch.equal(go_on(model, fed, cache)[0], want)


@pytest.mark.parametrize("convert", [np.int64, torch.tensor, lambda n: torch.tensor([n])], ids=["numpy", "0-d", "1-d"])
def test_whole_numbers_of_other_libraries(model, convert):
    cache = read(model, "full", 1.0)
    held = cache.positions(1)
    assert torch.equal(cache.positions(np.int64(1)), held) and torch.equal(cache.positions(torch.tensor(1)), held)
    assert cache.get_seq_length(np.int64(1)) == N
    cache.crop(convert(-2))
    assert cache.get_seq_length() == N - 2


def test_a_cache_that_was_filled_with_gradients_is_cloned():
    """The sinks of a model's heads are its own, and no leaf of a graph."""
    model = tiny_families.make("gpt_oss")
    with torch.enable_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
        assert cache.clone().nbytes == cache.nbytes
