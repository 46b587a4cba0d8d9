"""Rolling back tokens: exactly, or not at all."""

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from tests.helpers.comparing import SMALL, SMALL_STEPS
from tests.helpers.running import RAGGED, SEVERAL, N, feed, go_on, kept, read, run, uneven
from tests.helpers.tiny import force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


@pytest.mark.parametrize("policy", [*SEVERAL, "snapkv", "full", *RAGGED])
def test_rolling_back_restores_everything(policy):
    """Ragged layers that do not evict make room and move in between."""
    ragged = policy in RAGGED
    n, steps, right, wrong = (40, 50, 28, 9) if ragged else (30, 14, 5, 6)
    model, ids, fed = make("llama_gqa"), prompt(2, n), prompt(2, steps, seed=2)
    options = {"shared": True} if policy == "keyformer" else {}
    with kvpatch.patched(model, RAGGED.get(policy, policy), 0.4, **options) as patch:
        want, plain = force(model, ids, fed)
        cache = patch.new_cache()
        force(model, ids, fed[:, :right], cache=cache)
        cache.activate_past_recording()
        go_on(model, prompt(2, wrong, seed=9), uneven(cache) if ragged else cache)
        assert cache.get_seq_length() == n + right + wrong
        cache.crop(2 - wrong)
        cache.crop(n + right)
        assert cache.get_seq_length() == n + right
        logits, _ = go_on(model, fed[:, right:], cache)
    torch.testing.assert_close(want[:, right + 1 :], logits, atol=1e-5 if ragged else 0, rtol=0)
    assert kept(plain) == kept(cache)


def test_tokens_that_evicted_nothing_roll_back_without_a_record():
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 12, seed=2)
    with kvpatch.patched(model, RAGGED["adakv"], 0.4) as patch:
        want, plain = force(model, ids, fed)
        cache = patch.new_cache()
        force(model, ids, torch.cat([fed[:, :6], prompt(2, 3, seed=9)], 1), cache=cache)
        uneven(cache).crop(-3)
        logits, _ = go_on(model, fed[:, 6:], cache)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 13 tokens"):
            cache.crop(-13)
    torch.testing.assert_close(want[:, 7:], logits, atol=1e-5, rtol=0)
    assert kept(plain) == kept(cache)


@pytest.mark.parametrize("policy", ["key_norm", "snapkv"])
def test_a_protected_token_that_was_rolled_back_leaves_no_mark(model, policy):
    """The next token was written to its column, and was protected in its place."""
    ids, fed, more = prompt(1, N), prompt(1, 4, seed=2), prompt(1, 25, seed=3)
    ids[:, -3:] = 96
    with kvpatch.patched(model, policy, N + 4, schedule="prompt", protect=[96]) as patch:
        cache, want = patch.new_cache(), patch.new_cache()
        model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False, pad_token_id=0)
        cache.crop(N - 3)
        model(ids[:, : N - 3], past_key_values=want)
        for one in (cache, want):
            go_on(model, fed, one)
            assert not one.layers[0].state["protect"].any()
            model(more, past_key_values=one)
        assert kept(cache) == kept(want)


@pytest.mark.parametrize("options", [{"turns": "first"}, {"quota": [(3, 20)]}])
def test_a_text_that_was_rolled_back_to_nothing_begins_with_a_first_prompt(model, options):
    """It passed for a later turn, which turns="first" keeps whole and quota= has no spans of."""
    with kvpatch.patched(model, "key_norm", N, schedule="prompt", **options) as patch:
        cache, want = patch.new_cache(), patch.new_cache()
        model(prompt(1, N), past_key_values=cache)
        cache.crop(-N)
        assert not cache.get_seq_length()
        for one in (cache, want):
            model(prompt(1, 2 * N, seed=2), past_key_values=one)
            one.check_invariants()
        assert kept(cache) == kept(want) and cache.held(0).unique().tolist() == [N]


@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer"])
def test_generated_rows_that_are_remembered_do_not_roll_back_unrecorded(policy):
    """Under schedule "prompt" generated rows count when a later turn evicts; rolled back, they went on counting."""
    model, ids, fed, more = make("llama_gqa", dtype=torch.float64), prompt(1, 12), prompt(1, 5, seed=2), prompt(1, 6, seed=3)
    steps = fed.split(1, 1)
    with torch.no_grad(), kvpatch.patched(model, policy, 6, schedule="prompt") as patch:
        cache = feed(model, patch, ids, *steps)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 4 tokens: .* Call cache.activate_past_recording"):
            cache.crop(-4)
        recorded = patch.new_cache()
        recorded.activate_past_recording()
        for one in (ids, *steps):
            model(one, past_key_values=recorded)
        recorded.crop(-4)
        model(more, past_key_values=recorded)
        want = feed(model, patch, ids, steps[0], more)
        for layer in range(2):
            assert torch.equal(recorded.positions(layer).sort(-1).values, want.positions(layer).sort(-1).values)
        for state, other in zip(recorded.layers, want.layers, strict=True):
            for name, tensor in state.state.items():
                torch.testing.assert_close(tensor.sum(-1), other.state[name].sum(-1), msg=name)


def test_steps_that_are_rolled_back_were_not_taken(model):
    cache = read(model, "h2o", 0.5, steps=3, record=True)
    cache.crop(-2)
    assert (cache.counters.steps, cache.stacked, cache.stack_due) == (1, False, False)
    cache.crop(-1)
    assert cache.counters.steps == 0


def test_a_shared_score_is_rolled_back(model):
    options = {"shared": True, "noise": "none"}
    cache, want = (read(model, "keyformer", 0.5, steps, record=True, **options) for steps in (3, 1))
    assert not torch.equal(cache.shared_score[..., : N + 1], want.shared_score[..., : N + 1])
    cache.crop(-2)
    torch.testing.assert_close(cache.shared_score[..., : N + 1], want.shared_score[..., : N + 1])


def test_nothing_is_rolled_back(model):
    cache = read(model, "h2o", 0.5, steps=2)
    counters, stack = cache.counters.tensors_or_none, cache.steps.stack
    cache.crop(0)
    assert cache.counters.tensors_or_none is counters
    assert cache.steps.stack is stack is not None


def test_one_token_behind_a_prompt_is_not_recorded(model):
    """In the pass that ends it: a journal costs memory, and is what activate_past_recording() is for."""
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        for extra, held in ((1, 0), (2, 2)):
            cache = handle.new_cache()
            cache.plans.prompt_len = N
            model(prompt(2, N + extra), past_key_values=cache)
            assert [len(layer.undo_log) for layer in cache.layers] == [held] * len(cache.layers)
    with pytest.raises(KVPatchError, match="was not recorded"):
        read(model, "h2o", 0.5, steps=1).crop(-1)


@pytest.mark.parametrize("policy", ["compactor", "kvzip"])
def test_a_prompt_whose_last_tokens_have_changed_the_scores_of_others_does_not_roll_back(policy):
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, 30, **SMALL[policy]) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
        before = [layer.state[name].clone() for layer in cache.layers for name in ("local", "repeated") if name in layer.state]
        for t in range(3):
            model(prompt(1, 1, seed=t), past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 4 tokens"):
            cache.crop(-4)
        cache.crop(-3)
        after = [layer.state[name] for layer in cache.layers for name in ("local", "repeated") if name in layer.state]
        assert before and all(torch.equal(one[:, :, :20], other[:, :, :20]) for one, other in zip(before, after, strict=True))
        cache.crop(0)
        cache.crop(-20)
        assert cache.get_seq_length() == 0


def test_rolling_back_what_was_not_recorded_is_refused():
    model, ids, fed = make("llama_gqa"), prompt(1, 30), prompt(1, 4, seed=2)
    _, cache = run(model, ids, fed, "h2o", 0.4)
    with pytest.raises(kvpatch.KVPatchError, match="activate_past_recording"):
        cache.crop(-1)
    _, cache = run(model, ids, fed, "snapkv", 0.4)
    with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 5 tokens"):
        cache.crop(-5)


def test_steps_that_the_record_no_longer_has_are_refused_with_its_length(monkeypatch):
    """The bug: the error said to call activate_past_recording(), which had been called."""
    monkeypatch.setattr("kvpatch.cache.layer.UNDO_STEPS", 4)
    model, ids = make("llama_gqa"), prompt(1, 30)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        cache = patch.new_cache()
        cache.activate_past_recording()
        force(model, ids, prompt(1, 6, seed=2), cache=cache)
        with pytest.raises(kvpatch.KVPatchError, match="The record has the last 4 steps"):
            cache.crop(-5)
        cache.crop(-4)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "expected_attention", "r_kv", "key_diff"])
def test_a_prompt_that_has_not_ended_keeps_what_was_read_of_it(policy):
    """The bug: tokens taken back between two pieces of a prompt stayed in sums of attention, windows and moments."""
    model, ids = make("llama_gqa"), prompt(1, 30)
    with torch.no_grad(), kvpatch.patched(model, policy, 9, **(SMALL | SMALL_STEPS).get(policy, {})) as patch:
        cache = patch.new_cache()
        cache.plans.prompt_len = 30  # as generate(prefill_chunk_size=...) announces it, and leaves it when interrupted
        model(ids[:, :20], past_key_values=cache)
        if policy == "key_diff":  # reads keys alone
            cache.crop(-3)
            model(ids[:, 17:], past_key_values=cache)
            assert torch.equal(cache.positions(1), feed(model, patch, ids).positions(1))
            return
        with pytest.raises(kvpatch.KVPatchError, match="their prompt has not ended"):
            cache.crop(-3)
        model(ids[:, 20:], past_key_values=cache)
        cache.crop(0)
        cache.check_invariants()


def test_a_later_prompt_cannot_be_rolled_back_into_the_steps_before_it():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        cache = patch.new_cache()
        model(ids[:, :20], past_key_values=cache)
        cache.activate_past_recording()
        for t in range(20, 23):
            model(ids[:, t : t + 1], past_key_values=cache)
        model(ids[:, 23:28], past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 2 tokens"):
            cache.crop(-2)


def test_a_padded_prompt_read_in_blocks_cannot_be_cropped_into():
    """A row's last columns are not its last tokens there."""
    model, ids = make("llama_gqa"), prompt(2, 20)
    with kvpatch.patched(model, "h2o", 1.0, block=8) as patch, torch.no_grad():
        cache = patch.new_cache()
        model(ids, attention_mask=left_pad(ids, [20, 11]), past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 2 tokens"):
            cache.crop(-2)


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


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
def test_a_prompt_below_its_budget_rolls_back_too(model, policy):
    """Nothing was evicted, so the prompt's last tokens are the last columns; heads that share a budget are no exception."""
    ids, fed = prompt(2, 12), prompt(2, 4, seed=2)
    with kvpatch.patched(model, policy, 40):
        want = force(model, ids[:, :9], fed)[0]
        cache = force(model, ids, fed[:, :2])[1]
        cache.crop(-5)
        got = go_on(model, fed, cache)[0]
    torch.testing.assert_close(got, want[:, -4:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_row_may_lose_all_its_tokens(policy):
    """It goes on like a row that begins; the invariants did not allow it, nor did the error say that padding stays."""
    model, ids, more = make("llama_gqa"), prompt(2, 6), prompt(2, 4, seed=5)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad(), kvpatch.patched(model, policy, 1.0) as patch:
        cache = patch.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(KVPatchError, match=r"Cannot roll back 6 tokens: row 0 has 5\. Take back at most 5"):
            cache.crop(-6)
        cache.crop(-5)
        cache.check_invariants()
        assert cache.seen_B.tolist() == [0, 1]
        mask = torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
        logits = model(more, attention_mask=mask, past_key_values=cache).logits
        want = model(torch.cat([ids[:, :1], more], 1), attention_mask=mask).logits[:, 1:]
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
