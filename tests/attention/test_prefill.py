"""Prompts: in pieces, padded, beside sliding windows, and with generated tokens behind them in one pass."""

import contextlib

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from tests.helpers.running import SEVERAL, N, feed, kept
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_a_right_padded_forward_is_unchanged_at_its_tokens():
    model = make("llama_gqa")
    ids = prompt(2, 20)
    mask = left_pad(ids, [20, 12]).flip(1)
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        with kvpatch.patched(model, "h2o", 0.5):
            got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(want[mask.bool()], got[mask.bool()], atol=2e-5, rtol=0)


@pytest.mark.parametrize("policy", [*SEVERAL, "snapkv", "expected_attention", "compactor"])
@pytest.mark.parametrize("name", FIVE)
def test_a_prompt_in_chunks_evicts_at_its_end(name, policy):
    model, ids = make(name), prompt(2, 33)
    mask = left_pad(ids, [33, 24])
    kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    # the window is longer than the last piece, which has five tokens
    options = {"snapkv": {"window": 8, "kernel": 3}, "compactor": {"sketch": 5, "chunk": 10, "sinks": 3}}.get(policy, {})
    with kvpatch.patched(model, policy, 0.6, **options) as patch:
        want = model.generate(ids, **kwargs)
        held = [p.sort(-1).values for p in patch.report().positions]
        got = model.generate(ids, prefill_chunk_size=7, **kwargs)
        again = [p.sort(-1).values for p in patch.report().positions]
    assert torch.equal(want, got)
    assert all(torch.equal(a, b) for a, b in zip(held, again, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_layers_of_unlike_budgets_have_windows_of_their_own(backend, no_gradients):
    """A small budget cuts the window in its layer alone. The prompt's pass attends to all, whatever other layers keep."""
    if backend == "triton":
        pytest.importorskip("triton")
    model, ids, held = make("llama_gqa", seed=2), prompt(1, 40), {}
    for k in ([5, 20], [20, 5], [5, 5], [20, 20]):
        with kvpatch.patched(model, "snapkv", k, window=8, kernel=3, backend=backend) as patch:
            cache = patch.new_cache()
            model(ids, past_key_values=cache)
        held[tuple(k)] = [cache.positions(layer).sort(-1).values for layer in (0, 1)]
    for one, other in ((5, 20), (20, 5)):
        assert torch.equal(held[one, other][0], held[one, one][0]) and torch.equal(held[one, other][1], held[other, other][1])


def test_several_tokens_at_once_are_decode_steps_inside_generate():
    """A chunk behind a prompt of known length gives what feeding it token by token gives."""
    for policy in SEVERAL:
        model, ids, fed = make("mistral_sliding"), prompt(2, 20), prompt(2, 9, seed=2)
        with kvpatch.patched(model, policy, 0.5) as patch, torch.no_grad():
            one, other = patch.new_cache(), patch.new_cache()
            one.plans.prompt_len = other.plans.prompt_len = 20
            want, _ = force(model, ids, fed, cache=one)
            got = model(torch.cat([ids, fed], 1), past_key_values=other, use_cache=True).logits[:, 19:]
        torch.testing.assert_close(want, got, atol=2e-5, rtol=0)
        assert kept(one) == kept(other)


def test_temperatures_of_tokens_in_the_pass_that_ends_a_prompt(model):
    """They are those of tokens that are fed one by one."""
    with kvpatch.patched(model, "keyformer", 0.5, tau=(0.5, 4.0), generation_length=4, noise="none") as handle:
        for turn in range(2):
            at_once, singly = handle.new_cache(), handle.new_cache()
            at_once.plans.prompt_len = singly.plans.prompt_len = N
            if turn:
                for cache in (at_once, singly):
                    model(prompt(2, N), past_key_values=cache)
                    model(prompt(2, 1, seed=4), past_key_values=cache)
                    cache.plans.prompt_len = 2 * N + 1
            ids = prompt(2, N + 3, seed=5)
            model(ids, past_key_values=at_once)
            for piece in ids.split([N, 1, 1, 1], 1):
                model(piece, past_key_values=singly)
            for one, other in zip(at_once.layers, singly.layers, strict=True):
                mine, theirs = (sorted(zip(layer.positions[0, 0].tolist(), layer.state["gumbel"][0, 0].tolist(), strict=True))
                                for layer in (one, other))  # fmt: skip
                mine, theirs = ([pair for pair in pairs if pair[0] >= 0] for pairs in (mine, theirs))
                assert [p for p, _ in mine] == [p for p, _ in theirs]
                assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], rel=1e-4)


def test_layers_that_share_a_score_take_generated_tokens_one_by_one():
    """A layer evicts for all tokens of a pass before the next layer runs, but needs what that one gave the first of them:
    assisted decoding then computed something else than plain decoding, and rolled back to other scores."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 12), prompt(1, 3, seed=2)
    words = "{} generated tokens in one pass .* Use shared=False"
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.5, shared=True) as patch:
        for extra in range(4):  # in the pass that ends the prompt
            cache = patch.new_cache()
            cache.plans.prompt_len = 12
            with pytest.raises(KVPatchError, match=words.format(extra)) if extra > 1 else contextlib.nullcontext():
                model(torch.cat([ids, fed[:, :extra]], 1), past_key_values=cache)
        cache = feed(model, patch, ids)
        cache.plans.prompt_len = 12
        before = [cache.positions(layer) for layer in range(2)]
        with pytest.raises(KVPatchError, match=words.format(3)):
            model(fed, past_key_values=cache)
        assert all(torch.equal(held, cache.positions(layer)) for layer, held in enumerate(before))
        want = feed(model, patch, ids, *fed.split(1, 1))
        for token in fed.split(1, 1):
            model(token, past_key_values=cache)
        assert all(torch.equal(want.positions(layer), cache.positions(layer)) for layer in range(2))
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 1.0, shared=True) as patch:
        cache = feed(model, patch, ids)
        cache.plans.prompt_len = 12
        model(fed, past_key_values=cache)  # nothing is chosen


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


def test_noise_goes_by_the_tokens_of_a_padded_turn():
    """Entries of coming tokens, worked out ahead, were counted by columns: behind a later turn's padding they were others'."""
    model = make("mpt", dtype=torch.float64)
    policy = kvpatch.policies.critical(kvpatch.policies.adaptive("keyformer"))
    more, noise = prompt(1, 7, seed=3), []
    for pad in (4, 0):
        with torch.no_grad(), kvpatch.patched(model, policy, [0.4, 12]) as patch:
            cache = feed(model, patch, prompt(1, 12), *prompt(1, 2, seed=2).split(1, dim=1))
            mask = (torch.arange(7) >= 4).long()[None]
            model(more[:, 4 - pad :], attention_mask=mask[:, 4 - pad :], past_key_values=cache)
            for token in prompt(1, 6, seed=4).split(1, dim=1):
                model(token, past_key_values=cache)
            noise.append([sorted(layer.state["noise"][layer.positions >= 0].tolist()) for layer in cache.layers])
    assert noise[0] == noise[1]


@pytest.mark.parametrize(("policy", "chooses"), [("snapkv", False), ("adakv", False), ("tova", True)])
def test_the_window_s_attention_is_dropped_once_nothing_chooses_by_it(model, policy, chooses):
    with kvpatch.patched(model, policy, 0.5) as patch:
        cache = patch.new_cache()
        model(prompt(2, N), past_key_values=cache)
    assert [("observed" in layer.state) for layer in cache.layers] == [chooses] * 2


def test_a_window_that_yields_to_the_score_observes_so_many_rows():
    """The share of the attention that the kept tokens received is of the three rows that are left of eight."""
    model = make("llama_gqa", layers=1)
    model.set_attn_implementation("eager")
    a_HQT = model(prompt(1, N), output_attentions=True).attentions[0][0]
    with kvpatch.patched(model, "snapkv", 5, window=8) as patch:
        cache = patch.new_cache()
        model(prompt(1, N), past_key_values=cache)
    held = kept(cache)[0][0]
    assert all(head[-3:] == [*range(N - 3, N)] and len(head) == 5 for head in held)
    a_HGQT = a_HQT.unflatten(0, (2, -1))[:, :, -3:]
    want_H = torch.stack([a_GQT[..., head].sum(-1).mean() for a_GQT, head in zip(a_HGQT, held, strict=True)])
    torch.testing.assert_close(cache.layers[0].mass_BH[0], want_H)
