"""Caches that cannot be joined, and positions that a joined cache does not take."""

import pytest
import torch

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from tests.helpers.joined import Loop
from tests.helpers.tiny import force, make, prompt


def unread(model, patch):
    return patch.new_cache()


def in_a_prompt(model, patch):
    cache = patch.new_cache()
    cache.plans.prompt_len = 30
    model(prompt(1, 20), past_key_values=cache)
    return cache


def with_room(model, patch):
    cache = patch.new_cache(room=8)
    model(prompt(1, 20), past_key_values=cache)
    return cache


def read_by(policy="h2o", k=0.4, name="llama_gqa", dtype=torch.float32, **options):
    def read(model, patch):
        other = make(name, dtype=dtype)
        with kvpatch.patched(other, policy, k, **options) as own:
            return force(other, prompt(1, 9), prompt(1, 0), cache=own.new_cache())[1]

    return read


REFUSED = {
    "unread": (unread, "Cache 1 has read no prompt: run one through it first"),
    "prompt": (in_a_prompt, "Cache 1 is in the middle of a prompt: read it to its end, then concatenate"),
    "room": (with_room, r"Cache 1 was made with room=8 .* Make it without room"),
    "policy": (read_by("roco"), "another patch or model than cache 0: the policy's name is 'roco' there and 'h2o' here"),
    "recent": (read_by(recent=0.25), r"the policy's recent is 0\.25 there and 0\.5 here"),
    "k": (read_by(k=0.5), r"k is 0\.5 there and 0\.4 here"),
    "seed": (read_by(seed=3), "seed is 3 there and 0 here"),
    "block": (read_by(block=4), "block is 4 there and None here"),
    "positions": (read_by(positions="renumbered"), "positions is 'renumbered' there and 'original' here"),
    "heads": (read_by(name="llama"), "layer 0's KV heads is 4 there and 2 here"),
    "dtype": (read_by(dtype=torch.float64), r"dtype is torch\.float64 there and torch\.float32 here"),
    "other": (lambda model, patch: [1], "Cache 1 is a list: only caches that the patched model filled"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_joined(case):
    make_one, words = REFUSED[case]
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        mine = force(model, prompt(1, 12), prompt(1, 1), cache=patch.new_cache())[1]
    patch = kvpatch.patch(model, "h2o", 0.4)
    try:
        with torch.no_grad():
            other = make_one(model, patch)
    finally:
        patch.remove()
    with pytest.raises(KVPatchError, match=words):
        EvictingCache.concatenate([mine, other])


def test_nothing_twice_and_no_row():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        cache = force(model, prompt(1, 12), prompt(1, 1), cache=patch.new_cache())[1]
        with pytest.raises(KVPatchError, match="was given no cache"):
            EvictingCache.concatenate([])
        with pytest.raises(KVPatchError, match=r"in the list twice: give its clone\(\)"):
            EvictingCache.concatenate([cache, cache])
        assert cache.concatenate([cache]).seen_B.tolist() == [13], "a method of the class, on a cache too"
        with pytest.raises(KVPatchError, match="would leave no row"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        with pytest.raises(KVPatchError, match="The cache is empty, so that it has no rows yet"):
            patch.new_cache().next_positions()


@pytest.mark.parametrize("name", ["llama_gqa", "gptj", "gpt2"])
def test_positions_are_filled_in_and_wrong_ones_refused(name):
    model = make(name, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        loop.add((30, 0), (9, 2))
        assert loop.cache.next_positions(2).tolist() == [[30, 31], [11, 12]]
        assert loop.cache.get_seq_length() == 30
        loop.step(2)  # without position_ids
        loop.step(position_ids=loop.cache.next_positions())
        loop.step(attention_mask=torch.ones(2, 1, dtype=torch.long))
        before = [loop.cache.positions(layer) for layer in range(2)]
        for wrong in ([[33]], [[34], [34]]):
            with pytest.raises(KVPatchError, match=r"Row 1 has seen 15 tokens\.|Row 0 has seen 34 tokens\."):
                model(prompt(2, 1), past_key_values=loop.cache, position_ids=torch.tensor(wrong))
        assert all(torch.equal(a, loop.cache.positions(layer)) for layer, a in enumerate(before))
        loop.step()


def test_a_long_row_that_has_gone_takes_no_positions_with_it():
    """GPT-2 has 512 positions: what is left of the batch is told by the rows that are there."""
    model = make("gpt2", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 8) as patch:
        loop = Loop(model, patch)
        loop.add((510, 0), (9, 2))
        loop.step(2)
        with pytest.raises(KVPatchError, match="The text needs 513 positions, but this model has 512"):
            model(prompt(2, 1), past_key_values=loop.cache)
        loop.drop(0)
        assert loop.cache.get_seq_length() == 13
        loop.step(2)


def test_a_decoder_that_takes_no_positions_is_refused():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        loop.add((12, 0), (9, 2))
        patch._state.why_positions_fixed = "it takes no position_ids"
        with pytest.raises(KVPatchError, match="it takes no position_ids: continue the caches one by one"):
            model(prompt(2, 1), past_key_values=loop.cache)
