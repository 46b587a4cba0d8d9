"""Invariants 3, 5 and 7, and what a cache can be asked to do: laws that need no oracle."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch.policies import Score
from tests.helpers.comparing import EVICTING, WINDOWED
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt

SEVERAL = ("random", "streaming_llm", "scissorhands", "tova", "roco", "keyformer")


def kept(cache):
    """Per layer, row and head the sorted positions held."""
    return [
        [[sorted(p for p in head if p >= 0) for head in row] for row in cache.positions(layer).tolist()]
        for layer in range(len(cache.layers))
    ]


def run(model, ids, fed, policy, k, mask=None, **options):
    with kvpatch.patched(model, policy, k, **options):
        logits, cache = force(model, ids, fed, mask)
    return logits, cache


@pytest.mark.parametrize("policy", EVICTING)
def test_budget_positions_and_protection_after_every_step(policy):
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 10, seed=2)
    lengths = [40, 26]
    mask = left_pad(ids, lengths)
    options = {"window": 6} if policy in WINDOWED else {}
    generated_stay = policy in WINDOWED
    with kvpatch.patched(model, policy, 0.3, sinks=2, **options), torch.no_grad():
        past = None
        for t in range(10):
            new = ids if t == 0 else fed[:, t - 1 : t]
            out = model(new, attention_mask=mask, past_key_values=past, use_cache=True)
            past = out.past_key_values
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
            for layer in range(2):
                for row, n in enumerate(lengths):
                    uniform = kvpatch.get_policy(policy).over_heads is None and "pyramid" not in policy
                    for head in kept(past)[layer][row]:
                        assert not uniform or len(head) == int(0.3 * n) + (t if generated_stay else 0)
                        assert len(set(head)) == len(head)
                        assert 0 <= min(head)
                        assert max(head) < n + t
                        assert {0, 1} <= set(head)
            for row, n in enumerate(lengths):
                assert sum(past.held(layer)[row].sum() for layer in range(2)) == 4 * (
                    int(0.3 * n) + (t if generated_stay else 0)
                )
            assert past.get_seq_length() == 40 + t


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("name", FIVE)
def test_a_padded_row_gives_what_it_gives_alone_and_rows_permute(name, policy):
    model, ids, fed = make(name), prompt(3, 36), prompt(3, 8, seed=2)
    lengths = [36, 23, 30]
    options = {"window": 5} if policy in WINDOWED else {}
    logits, cache = run(model, ids, fed, policy, 0.4, left_pad(ids, lengths), **options)
    together = kept(cache)
    for row, n in enumerate(lengths):
        alone, one = run(model, ids[row : row + 1, 36 - n :], fed[row : row + 1], policy, 0.4, **options)
        torch.testing.assert_close(logits[row : row + 1], alone, atol=3e-5, rtol=0)
        assert [layer[row] for layer in together] == [layer[0] for layer in kept(one)]
    order = torch.tensor([2, 0, 1])
    turned, cache = run(
        model, ids[order], fed[order], policy, 0.4, left_pad(ids, [lengths[i] for i in order.tolist()]), **options
    )
    torch.testing.assert_close(logits[order], turned, atol=3e-5, rtol=0)
    assert [[layer[i] for i in order.tolist()] for layer in together] == kept(cache)


def test_permuting_kv_heads_permutes_what_they_keep():
    model, ids, fed = make("llama_gqa"), prompt(1, 36), prompt(1, 8, seed=2)
    logits, cache = run(model, ids, fed, "roco", 0.4)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for proj, heads in ((attention.q_proj, 4), (attention.k_proj, 2), (attention.v_proj, 2)):
                weight = proj.weight.view(2, heads // 2 * 8, 32).flip(0).reshape(heads * 8, 32)
                proj.weight.copy_(weight)
            attention.o_proj.weight.copy_(attention.o_proj.weight.view(32, 2, 16).flip(1).reshape(32, 32))
    turned, other = run(model, ids, fed, "roco", 0.4)
    torch.testing.assert_close(logits, turned, atol=3e-5, rtol=0)
    assert [[row[::-1] for row in layer] for layer in kept(cache)] == kept(other)


@pytest.mark.parametrize("policy", ["random", "keyformer"])
def test_same_seed_same_text_another_seed_another_set(policy):
    model, ids = make("llama_gqa"), prompt(1, 50)

    def text(seed):
        with kvpatch.patched(model, policy, 0.3, seed=seed) as patch:
            out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
            return out, patch.report().positions[0].sort(-1).values

    (a, held_a), (b, held_b), (_, held_c) = text(5), text(5), text(6)
    assert torch.equal(a, b)
    assert torch.equal(held_a, held_b)
    assert not torch.equal(held_a, held_c)


def test_sampling_with_a_seed_repeats():
    model, ids = make("llama_gqa"), prompt(2, 40)

    def text(seed):
        torch.manual_seed(seed)
        with kvpatch.patched(model, "keyformer", 0.3):
            return model.generate(ids, max_new_tokens=12, do_sample=True, pad_token_id=0)

    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))


@pytest.mark.parametrize("schedule", ["prompt", "decode", "both"])
@pytest.mark.parametrize("policy", SEVERAL)
def test_schedules(policy, schedule):
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 20, seed=2)
    _, cache = run(model, ids, fed, policy, 0.4, schedule=schedule)
    want = {"prompt": 12 + 20, "decode": 30 + 12, "both": 12}[schedule]
    assert cache.held(0).tolist() == [[want] * 2] * 2
    for head in kept(cache)[0][0]:
        if schedule == "decode":
            assert set(range(30)) <= set(head)
        if schedule == "prompt":
            assert set(range(30, 50)) <= set(head)


def test_budgets_of_every_kind():
    model, ids, fed = make("llama_gqa"), prompt(1, 100), prompt(1, 3, seed=2)
    per_token = 2 * 2 * 8 * 4  # keys and values, two heads of eight float32
    cases = [
        (0.29, [29, 29]),
        (17, [17, 17]),
        (1, [1, 1]),
        (0.001, [1, 1]),
        ([0.5, 10], [50, 10]),
        (f"{per_token * 2 * 25 + 1}B", [25, 25]),
        ([f"{per_token * 7}B", 1.0], [7, 103]),
        (1.0, [103, 103]),
    ]
    for k, want in cases:
        _, cache = run(model, ids, fed, "h2o", k)
        assert [cache.held(layer).unique().tolist() for layer in range(2)] == [[n] for n in want], k


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


def test_protected_tokens_stay():
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 12, seed=2)
    marked = torch.zeros(2, 30, dtype=torch.bool)
    marked[0, [3, 9]] = marked[1, [5]] = True
    _, cache = run(model, ids, fed, "window", 8, protect=marked)
    assert all({3, 9} <= set(head) for head in kept(cache)[1][0])
    assert all({5} <= set(head) and len(head) == 8 for head in kept(cache)[1][1])
    token = int(ids[0, 4])
    where = {i for i in range(30) if int(ids[0, i]) == token}
    _, cache = run(model, ids[:1], fed[:1], "h2o", 12, protect=[token])
    assert all(where <= set(head) for head in kept(cache)[0][0])
    with pytest.raises(kvpatch.KVPatchError, match="protect= marks 20 tokens"):
        run(model, ids[:1], fed[:1], "h2o", 12, protect=torch.arange(30) < 20)


def test_a_row_below_its_budget_fills_up_before_it_evicts():
    model, ids, fed = make("llama_gqa"), prompt(2, 20), prompt(2, 16, seed=2)
    lengths = [20, 8]
    _, cache = run(model, ids, fed, "h2o", 15, left_pad(ids, lengths))
    assert cache.held(0).tolist() == [[15, 15], [15, 15]]
    for steps in (3, 7, 8):
        logits, cache = run(model, ids, fed[:, :steps], "h2o", 15, left_pad(ids, lengths))
        alone, one = run(model, ids[1:, 12:], fed[1:, :steps], "h2o", 15)
        torch.testing.assert_close(logits[1:], alone, atol=3e-5, rtol=0)
        assert cache.held(0)[1].tolist() == [min(8 + steps, 15)] * 2
        assert kept(cache)[0][1] == kept(one)[0][0]


@pytest.mark.parametrize("policy", [*SEVERAL, "snapkv", "full"])
def test_rolling_back_restores_everything(policy):
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 14, seed=2)
    options = {"shared": True} if policy == "keyformer" else {}
    with kvpatch.patched(model, policy, 0.4, **options) as patch, torch.no_grad():
        want, plain = force(model, ids, fed)
        cache = patch.new_cache()
        force(model, ids, fed[:, :5], cache=cache)
        cache.activate_past_recording()
        wrong = prompt(2, 6, seed=9)
        for t in range(6):
            model(wrong[:, t : t + 1], past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 41
        cache.crop(-4)
        cache.crop(35)
        assert cache.get_seq_length() == 35
        logits = [model(fed[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(5, 14)]
    assert torch.equal(want[:, 6:], torch.cat(logits, 1))
    assert kept(plain) == kept(cache)


def test_rolling_back_what_was_not_recorded_is_refused():
    model, ids, fed = make("llama_gqa"), prompt(1, 30), prompt(1, 4, seed=2)
    _, cache = run(model, ids, fed, "h2o", 0.4)
    with pytest.raises(kvpatch.KVPatchError, match="activate_past_recording"):
        cache.crop(-1)
    _, cache = run(model, ids, fed, "snapkv", 0.4)
    with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 5 tokens"):
        cache.crop(-5)


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


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("policy", ["h2o", "keyformer", "tova"])
def test_assisted_decoding_gives_what_plain_decoding_gives(name, policy):
    model, assistant, ids = make(name), make("llama", layers=1, seed=3), prompt(1, 25)
    with kvpatch.patched(model, policy, 0.5) as patch:
        plain = model.generate(ids, max_new_tokens=20, do_sample=False)
        held = [p.sort(-1).values for p in patch.report().positions]
        lookup = model.generate(ids, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4)
        assisted = model.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=assistant)
        for one, other in zip(held, patch.report().positions, strict=True):
            # the last accepted token may not have been fed yet, so compare where both have seen the same
            if patch.report().seen == 44:
                assert torch.equal(one, other.sort(-1).values)
    assert torch.equal(plain, assisted)
    assert torch.equal(plain, lookup)


def test_beams_carry_their_own_history():
    """A beam's logits are those of its own text fed through a cache of its own."""
    model, ids = make("llama_gqa"), prompt(2, 30)
    mask = left_pad(ids, [30, 22])
    for policy in ("h2o", "keyformer", "tova", "roco"):
        with kvpatch.patched(model, policy, 0.4) as patch:
            out = model.generate(
                ids, attention_mask=mask, num_beams=4, max_new_tokens=12, do_sample=False, pad_token_id=0,
                num_return_sequences=4, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            sums = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices).sum(1)
            for row in range(8):
                text = out.sequences[row : row + 1, 30:]
                source = slice(row // 4, row // 4 + 1)
                cache = patch.new_cache()
                cache.request.new_tokens = 12
                logits, _ = force(model, ids[source], text[:, :-1], mask[source], cache)
                score = logits.log_softmax(-1).gather(2, text[..., None]).sum()
                torch.testing.assert_close(score, sums[row], atol=2e-4, rtol=0)


def test_repeat_select_clone_and_reset():
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 6, seed=2)
    with kvpatch.patched(model, "keyformer", 0.4, shared=True) as patch:
        want, _ = force(model, ids, fed)
        cache = patch.new_cache()
        force(model, ids, fed[:, :2], cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        twin = cache.clone()
        swapped = fed.flip(0)
        logits, _ = _go_on(model, swapped[:, 2:], cache)
        torch.testing.assert_close(want[:, 3:].flip(0), logits, atol=1e-5, rtol=0)
        again, _ = _go_on(model, swapped[:, 2:], twin)
        assert torch.equal(logits, again), "a clone is independent of what happened to the original"
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.nbytes == 0
        fresh, _ = force(model, ids, fed, cache=cache)
        assert torch.equal(want, fresh)


def _go_on(model, fed, cache):
    with torch.no_grad():
        steps = [model(fed[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(fed.shape[1])]
    return torch.cat(steps, 1), cache


def test_several_tokens_at_once_are_decode_steps_inside_generate():
    """Where the prompt's length is known, a chunk behind it gives what feeding it token by token gives."""
    for policy in SEVERAL:
        model, ids, fed = make("mistral_sliding"), prompt(2, 20), prompt(2, 9, seed=2)
        with kvpatch.patched(model, policy, 0.5) as patch, torch.no_grad():
            one, other = patch.new_cache(), patch.new_cache()
            one.request.prompt_len = other.request.prompt_len = 20
            want, _ = force(model, ids, fed, cache=one)
            got = model(torch.cat([ids, fed], 1), past_key_values=other, use_cache=True).logits[:, 19:]
        torch.testing.assert_close(want, got, atol=2e-5, rtol=0)
        assert kept(one) == kept(other)


@pytest.mark.parametrize("policy", [*SEVERAL, "snapkv"])
@pytest.mark.parametrize("name", FIVE)
def test_a_prompt_in_chunks_evicts_at_its_end(name, policy):
    model, ids = make(name), prompt(2, 33)
    mask = left_pad(ids, [33, 24])
    kwargs = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    # the window is longer than the last piece, which has five tokens
    options = {"window": 8, "kernel": 3} if policy == "snapkv" else {}
    with kvpatch.patched(model, policy, 0.6, **options) as patch:
        want = model.generate(ids, **kwargs)
        held = [p.sort(-1).values for p in patch.report().positions]
        got = model.generate(ids, prefill_chunk_size=7, **kwargs)
        again = [p.sort(-1).values for p in patch.report().positions]
    assert torch.equal(want, got)
    assert all(torch.equal(a, b) for a, b in zip(held, again, strict=True))


@pytest.mark.parametrize("policy", ["window", "streaming_llm", "random", "key_norm"])
def test_an_unpatched_prompt_is_converted_where_that_is_exact(policy):
    model, ids, more = make("llama_gqa"), prompt(2, 24), prompt(2, 1, seed=4)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
    text = torch.cat([ids, more], 1)
    with kvpatch.patched(model, policy, 0.5) as patch:
        want = model.generate(text, max_new_tokens=6, do_sample=False, pad_token_id=0)
        got = model.generate(text, past_key_values=past, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(want, got)
        with torch.no_grad():
            cache = patch.new_cache(past)
            for held in (12, 12, 12):  # half of 25 tokens, from the first one that follows
                assert torch.isfinite(model(more, past_key_values=cache).logits).all()
                assert cache.held(0).unique().tolist() == [held]
    with kvpatch.patched(model, "h2o", 0.5), pytest.raises(kvpatch.KVPatchError, match="Run the prompt inside"):
        model.generate(text, past_key_values=past, max_new_tokens=2)


def test_mpt_evicts_although_its_config_says_no_cache():
    """MptConfig's default is use_cache=False; generate() inside the block uses one unless the caller said no."""
    model, ids = make("mpt"), prompt(1, 30)
    model.config.use_cache = model.generation_config.use_cache = False
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert patch.report().held().unique().tolist() == [15]
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
        with pytest.raises(kvpatch.KVPatchError, match="Nothing to report"):
            patch.report()


@settings(max_examples=40)
@given(
    n=st.integers(1, 40),
    steps=st.integers(0, 6),
    k=st.one_of(st.floats(0.01, 0.99), st.integers(1, 60)),
    policy=st.sampled_from(kvpatch.list_policies()),
    name=st.sampled_from(FIVE),
    sinks=st.integers(0, 8),
    pad=st.integers(0, 12),
)
def test_any_shape_and_budget_holds_what_it_should(n, steps, k, policy, name, sinks, pad):
    model = make(name)
    ids, fed = prompt(2, n + pad), prompt(2, steps, seed=2)
    lengths = [n + pad, n]
    logits, cache = run(model, ids, fed, policy, k, left_pad(ids, lengths), sinks=sinks)
    assert torch.isfinite(logits).all()
    for row, length in enumerate(lengths):
        budget = max(1, int(k * length + 1e-6)) if isinstance(k, float) else k
        want = min(budget, length) + (steps if policy in WINDOWED else min(steps, max(budget - length, 0)))
        if policy == "full":
            want = length + steps
        held = torch.stack([cache.held(layer)[row] for layer in range(2)])
        assert held.sum() == held.numel() * want
        if policy in kvpatch.list_policies() and kvpatch.get_policy(policy).over_heads is None and "pyramid" not in policy:
            assert held.unique().tolist() == [want]


def test_scores_below_zero_are_in_order():
    """A user's own score may be negative: its order is kept, and it is never taken for an empty slot."""

    @dataclass(frozen=True)
    class Oldest(Score):
        def value(self, moment):
            return -moment.positions_BHS.float() - 0.5

    policy = kvpatch.Policy("oldest", Oldest())
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 5, seed=2)
    for mask in (None, left_pad(ids, [30, 20])):
        _, cache = run(model, ids, fed, policy, 7, mask)
        assert kept(cache) == [[[list(range(7))] * 2] * 2] * 2


def test_layer_by_layer_and_stacked_steps_agree(monkeypatch):
    """deck.py computes what decode.py computes, also where a cache is cloned, rolled back or taken through beams."""
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 9, seed=2)
    critical = [kvpatch.get_policy(f"critical({base})") for base in ("keyformer", "tova", "roco")]
    for policy in (*EVICTING, *critical):
        stacked, one = run(model, ids, fed, policy, 0.4)
        assert (one.stack is None) == (policy in WINDOWED)
        with kvpatch.patched(model, policy, 0.4) as patch:
            cache = patch.new_cache()
            force(model, ids, fed[:, :4], cache=cache)
            twin = cache.clone()
            _go_on(model, prompt(2, 3, seed=8), cache)
            again, _ = _go_on(model, fed[:, 4:], twin)
        torch.testing.assert_close(stacked[:, 5:], again, atol=1e-6, rtol=0)
        with monkeypatch.context() as patched_out:
            patched_out.setattr(kvpatch.attention.attend, "_deck", lambda *_: None)
            alone, other = run(model, ids, fed, policy, 0.4)
        assert other.stack is None
        torch.testing.assert_close(stacked, alone, atol=1e-6, rtol=0)
        assert kept(one) == kept(other) == kept(twin)


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
            got, _ = _go_on(model, fed[:, 3:], cache)
    torch.testing.assert_close(want[:, 4:], got, atol=1e-5, rtol=0)


def test_steps_are_stacked_once_the_slots_are_full():
    """A prompt below its budget fills up layer by layer; from then on all layers evict together."""
    model, ids, fed = make("llama_gqa"), prompt(2, 12), prompt(2, 12, seed=2)
    for policy in SEVERAL:
        _, cache = run(model, ids, fed[:, :5], policy, 16)
        assert cache.stack is None
        _, cache = run(model, ids, fed, policy, 16)
        assert cache.stack is not None
        assert cache.held(1).tolist() == [[16, 16], [16, 16]]
