"""What the state machine (stateful.py) found, each as the few calls that showed it."""

import pytest
import torch
from tiny import make, prompt

import kvpatch


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


PADDED_LATER = {
    "a later turn": ([0] * 9, [1, 1, 1, 1, 1, 0, 0, 0]),
    "the first prompt's end": ([0, 0, 0, 0, 0, 1, 1, 1, 1], [0] * 8),
    "the first prompt's middle": ([0, 0, 0, 1, 1, 1, 1, 0, 0], [0] * 8),
}


@pytest.mark.parametrize("policy", ["window", "h2o"])  # where nothing can be evicted padding counts as it does unpatched
@pytest.mark.parametrize("where", PADDED_LATER)
def test_padding_inside_a_text_takes_nothing_from_a_sliding_window(where, policy):
    """Rows looked as many columns back as the window has tokens, and lost those that padding had pushed further back."""
    model, passes = make("mistral_sliding", dtype=torch.float64), [prompt(1, n, seed=n) for n in (9, 8, 7)]
    masks = [1 - torch.tensor([pads]) for pads in (*PADDED_LATER[where], [0] * 7)]
    with torch.no_grad(), kvpatch.patched(model, policy, 20) as patch:
        cache, alone = patch.new_cache(), patch.new_cache()
        for ids, mask in zip(passes, masks, strict=True):
            seen = 0 if cache.seen_B is None else cache.next_positions()
            places = (seen + mask.cumsum(1) - 1).clamp(min=0)
            got = model(ids, past_key_values=cache, attention_mask=mask, position_ids=places).logits
            want = model(ids[mask.bool()][None], past_key_values=alone).logits
            torch.testing.assert_close(got[mask.bool()], want[0], atol=1e-8, rtol=0)


def test_layers_that_share_a_score_take_generated_tokens_one_by_one():
    """A layer evicts for all tokens of a pass before the next layer runs, but needs what that one gave the first of them:
    assisted decoding then computed something else than plain decoding, and rolled back to other scores."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 12), prompt(1, 3, seed=2)
    words = "3 generated tokens in one pass .* Use shared=False"
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.5, shared=True) as patch:
        cache = read(model, patch, ids)
        cache.prompt_len = 12
        before = [cache.positions(layer) for layer in range(2)]
        with pytest.raises(kvpatch.KVPatchError, match=words):
            model(fed, past_key_values=cache)
        assert all(torch.equal(held, cache.positions(layer)) for layer, held in enumerate(before))
        want = read(model, patch, ids, *fed.split(1, 1))
        for token in fed.split(1, 1):
            model(token, past_key_values=cache)
        assert all(torch.equal(want.positions(layer), cache.positions(layer)) for layer in range(2))
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 1.0, shared=True) as patch:
        cache = read(model, patch, ids)
        cache.prompt_len = 12
        model(fed, past_key_values=cache)  # nothing is chosen


def test_padding_is_not_rolled_back_as_if_it_were_tokens():
    """Rows lost as many tokens as columns went, also where some of these columns were their padding."""
    model, ids, more = make("llama_gqa", dtype=torch.float64), prompt(2, 6), prompt(2, 6, seed=2)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad(), kvpatch.patched(model, "full") as patch:
        for first in (True, False):
            cache = patch.new_cache()
            if not first:
                model(ids, past_key_values=cache)
            places = mask.cumsum(1) - 1 + (0 if first else 6)
            model(more, past_key_values=cache, attention_mask=mask, position_ids=places.clamp(min=0))
            before = [cache.positions(layer) for layer in range(2)]
            with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 5 tokens"):
                cache.crop(-5)
            assert all(torch.equal(held, cache.positions(layer)) for layer, held in enumerate(before))
            cache.crop(-4)
            seen = [2, 0] if first else [8, 6]
            assert cache.next_positions()[:, 0].tolist() == seen and cache.held(0).tolist() == [[n, n] for n in seen]


def test_a_head_that_got_nothing_of_a_shared_budget_is_saved(tmp_path):
    """The loader wanted a token in every head."""
    model, policies = make("llama_gqa"), kvpatch.policies
    policy = policies.critical(policies.adaptive(policies.pyramid("random")))
    empty = 0
    for seed in range(4):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.3, block=1, schedule="both", seed=seed) as patch:
            cache = read(model, patch, prompt(1, 2))
            empty += sum(int((cache.held(layer) == 0).sum()) for layer in range(2))
            patch.save_cache(cache, tmp_path / "cache.safetensors")
            again = patch.load_cache(tmp_path / "cache.safetensors")
            step = prompt(1, 1, seed=2)
            assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=again).logits)
    assert empty


def test_noise_goes_by_the_tokens_of_a_padded_turn():
    """Entries of coming tokens, worked out ahead, were counted by columns: behind a later turn's padding they were others'."""
    model = make("mpt", dtype=torch.float64)
    policy = kvpatch.policies.critical(kvpatch.policies.adaptive("keyformer"))
    more, noise = prompt(1, 7, seed=3), []
    for pad in (4, 0):
        with torch.no_grad(), kvpatch.patched(model, policy, [0.4, 12]) as patch:
            cache = read(model, patch, prompt(1, 12), *prompt(1, 2, seed=2).split(1, dim=1))
            mask = (torch.arange(7) >= 4).long()[None]
            model(more[:, 4 - pad :], attention_mask=mask[:, 4 - pad :], past_key_values=cache)
            for token in prompt(1, 6, seed=4).split(1, dim=1):
                model(token, past_key_values=cache)
            noise.append([sorted(layer.state["noise"][layer.positions >= 0].tolist()) for layer in cache.layers])
    assert noise[0] == noise[1]


@pytest.mark.parametrize("policy", ["full", "snapkv"])
def test_what_was_rolled_back_is_not_saved(policy, tmp_path):
    """Columns behind those in use kept the positions of tokens that were rolled back, which the loader refuses."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, policy, 40) as patch:
        cache = read(model, patch, prompt(1, 10))
        cache.crop(-2)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        again, step = patch.load_cache(tmp_path / "cache.safetensors"), prompt(1, 1, seed=2)
        assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=again).logits)
        assert torch.equal(cache.positions(0), again.positions(0))


def test_a_shared_score_that_only_prompts_add_to_is_saved(tmp_path):
    """The loader wanted room in it for generated tokens."""
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.5, shared=True, schedule="prompt", turns="first") as patch:
        cache = read(model, patch, prompt(1, 10), prompt(1, 1, seed=2))
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        again, turn = patch.load_cache(tmp_path / "cache.safetensors"), prompt(1, 5, seed=3)
        assert torch.equal(model(turn, past_key_values=cache).logits, model(turn, past_key_values=again).logits)


def test_padding_among_generated_tokens_beside_a_prompt_s_end_is_refused():
    """It was refused only in passes of generated tokens alone; here it failed with an IndexError inside the first layer."""
    model, mask = make("llama_gqa"), torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        cache.prompt_len = 5
        with pytest.raises(kvpatch.KVPatchError, match="marks a generated token as padding"):
            model(prompt(1, 7), attention_mask=mask, past_key_values=cache)
        assert not cache.unfinished and cache.get_seq_length() == 0
