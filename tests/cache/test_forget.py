"""forget(): a cache goes on as if spans of its text had been masked, whatever holds them.

`kvpatch.check_model` compares it with the masked unpatched model; tests/arch run that on every family.
"""

import random

import numpy as np
import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.check import Checks
from tests.helpers.comparing import entries, same
from tests.helpers.tiny import left_pad, make, prompt

POLICIES = (
    "full",
    "h2o",
    "roco",
    "keyformer",
    "tova",
    "snapkv",
    "adakv",
    "critical_adakv",
    "kvzip",
    "layer_defensive",
)
POLICIES += ("r_kv", "raas", "vase", "expected_attention", "cur", "pyramid(h2o)", "adaptive(roco)")
BUDGETS = (0.4, 12, kvpatch.Share(0.5), 1.0)


def read(model, patch, n=40, rows=2, steps=3, **options):
    cache = patch.new_cache()
    model(prompt(rows, n), past_key_values=cache, **options)
    for t in range(steps):
        model(prompt(rows, 1, seed=t), past_key_values=cache)
    return cache


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gpt2", "mistral_sliding"])
def test_what_follows_is_as_if_it_were_masked(name, policy):
    checks = Checks(make(name), kvpatch.get_policy(policy), 0.4)
    result = checks._run_check("", checks.check_forgetting)
    assert result.passed, result.detail


def test_positions_that_count_padding_between_tokens_are_refused():
    """forget([(7, 8)]) took the last three tokens out, and forget([(4, 6)]) none."""
    model = make("mistral_sliding")
    with torch.no_grad(), kvpatch.patched(model, "full") as patch:
        cache = patch.new_cache()
        model(prompt(1, 6), attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]), past_key_values=cache)
        before = cache.clone()
        before.forget([(2, 4)])
        assert before.positions(0)[0, 0].tolist() == [0, 1]
        model(prompt(1, 4), attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]]), past_key_values=cache)
        with pytest.raises(KVPatchError, match="whose positions count the padding"):
            cache.forget([(7, 8)])
        cache.check_invariants()
        assert cache.positions(0)[0, 0].tolist() == [0, 1, 2, 3, -1, -1, 6, 7, 8, 9]


class Count:
    """A whole number that is no int."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize(
    "spans",
    [
        [(np.int64(3), np.int64(9)), (20, np.uint8(31))],
        np.array([[3, 9], [20, 31]]),
        torch.tensor([[3, 9], [20, 31]]),
        [torch.tensor([3, 9]), np.array([20, 31])],
        [(torch.tensor(3), Count(9)), [20, 31]],
    ],
    ids=["numbers", "array", "tensor", "rows", "others"],
)
@pytest.mark.parametrize("lossless", [False, True])
def test_whole_numbers_of_any_library_are_taken(spans, lossless):
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0 if not lossless else 0.4, lossless=lossless) as patch:
        one, other = (read(model, patch, rows=1) for _ in range(2))
        one.forget(spans, np.int64(0))
        other.forget([(3, 9), (20, 31)], 0)
        assert one.positions(0).tolist() == other.positions(0).tolist() and int(one.held(0)[0, 0]) == 43 - 17
        if not lossless:
            for cache, span, reread in ((one, np.array([32, 34], dtype=np.uint8), np.uint8(5)), (other, (32, 34), 5)):
                patch.replace(cache, span, [4], reread=reread)
            for layer in range(2):
                assert same(entries(one, layer), entries(other, layer))


@pytest.mark.parametrize("k", BUDGETS, ids=str)
@pytest.mark.parametrize("policy", ["h2o", "roco", "adakv", "snapkv"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_what_stays_is_bit_for_bit_what_it_was(policy, k, bits):
    model, draw = make("llama_gqa"), random.Random(f"{policy} {k} {bits}")
    with torch.no_grad(), kvpatch.patched(model, policy, k, bits=bits) as patch:
        cache = read(model, patch)
        for _ in range(4):
            start = draw.randrange(40)
            stop, row = draw.randrange(start + 1, 44), draw.choice([None, 0, 1])
            before, copy = [entries(cache, layer) for layer in range(2)], cache.clone()
            cache.forget([(start, stop)], row)
            cache.check_invariants()
            for layer in range(2):
                left = {at: one for at, one in before[layer].items() if not (start <= at[2] < stop and row in (None, at[0]))}
                assert same(entries(cache, layer), left)
                assert same(entries(copy, layer), before[layer]), "a clone keeps its own"
        for t in range(30):
            model(prompt(2, 1, seed=50 + t), past_key_values=cache)
            cache.check_invariants()


@pytest.mark.parametrize("bits", [16, 4])
def test_budgets_that_follow_scores(bits):
    model = make("llama_gqa")
    for policy, k, options in (("h2o", kvpatch.Mass(0.8), {"recent": 4}), ("snapkv", kvpatch.Mass(0.7), {"window": 4})):
        with torch.no_grad(), kvpatch.patched(model, policy, k, bits=bits, **options) as patch:
            cache = read(model, patch)
            before = entries(cache, 0)
            cache.forget([(2, 20)])
            assert same(entries(cache, 0), {at: one for at, one in before.items() if not 2 <= at[2] < 20})
            for t in range(30):
                model(prompt(2, 1, seed=t), past_key_values=cache)
                cache.check_invariants()


def test_bytes_are_free_at_once():
    model = make("llama_gqa")
    for policy, k in (("full", 1.0), ("h2o", 0.5), ("snapkv", 0.5), ("adakv", 0.5)):
        with (
            torch.no_grad(),
            kvpatch.patched(model, policy, k, **({"window": 8} if policy in ("snapkv", "adakv") else {})) as patch,
        ):
            cache = read(model, patch, n=400)
            before, held = cache.nbytes, cache.held(0).sum().item()
            cache.forget([(0, 300)])
            left = cache.held(0).sum().item()
            assert cache.nbytes <= before * left / held * 17 / 16 + 8 * 4 * 2 * 2 * 2 * 2 * 8, policy
            assert left < held


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv"])
def test_rows_of_a_padded_batch_are_as_alone(policy):
    model, lengths = make("llama_gqa"), [24, 40]
    options = {"window": 4} if policy != "h2o" else {}
    ids, mask = prompt(2, 40), left_pad(prompt(2, 40), lengths)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), kvpatch.patched(model, policy, 10, **options) as patch:
        both = patch.new_cache()
        model(ids, attention_mask=mask, position_ids=places, past_key_values=both)
        both.forget([(3, 7)], 0)
        both.forget([(30, 33), (1, 2)], 1)
        both.check_invariants()
        for row, spans in ((0, [(3, 7)]), (1, [(30, 33), (1, 2)])):
            alone, going = patch.new_cache(), both.clone()
            model(ids[row : row + 1, 40 - lengths[row] :], past_key_values=alone)
            alone.forget(spans)
            for layer in range(2):
                assert {at[1:] for at in entries(both, layer) if at[0] == row} == {at[1:] for at in entries(alone, layer)}
            for t in range(12):
                new, at = prompt(1, 1, seed=t), torch.tensor(lengths)[:, None] + t
                full = torch.cat([mask, torch.ones(2, t + 1, dtype=torch.long)], 1)
                logits = model(new.expand(2, 1), attention_mask=full, past_key_values=going, position_ids=at).logits[row]
                own = model(new, past_key_values=alone, position_ids=at[row : row + 1]).logits[0]
                torch.testing.assert_close(logits, own, atol=1e-4, rtol=0)


def test_generate_goes_on_from_the_whole_text():
    model, ids = make("llama_gqa"), prompt(1, 40)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        cache.forget([(5, 30)])
        text = torch.cat([ids, prompt(1, 3, seed=9)], 1)
        found = model.generate(text, past_key_values=cache, max_new_tokens=6, do_sample=False)
    mask = torch.ones(1, 43, dtype=torch.long)
    out, name = model(ids, use_cache=True), kvpatch.arch.upstream.cache_argument(type(model).forward)
    past, wanted, new = kvpatch.arch.upstream.cache_of(out), text, text[:, 40:]
    for _ in range(6):
        mask = torch.ones(1, wanted.shape[1], dtype=torch.long)
        mask[:, 5:30] = 0
        places = torch.arange(wanted.shape[1])[None, -new.shape[1] :]
        out = model(new, attention_mask=mask, position_ids=places, **{name: past})
        past, new = kvpatch.arch.upstream.cache_of(out), out.logits[:, -1:].argmax(-1)
        wanted = torch.cat([wanted, new], 1)
    assert found.tolist() == wanted.tolist()


def test_a_later_prompt_is_read_behind_what_is_left():
    model = make("llama_gqa")
    for policy in ("h2o", "snapkv", "kvzip", "roco"):
        with torch.no_grad(), kvpatch.patched(model, policy, 14) as patch:
            cache = read(model, patch)
            cache.forget([(0, 30)])
            model(prompt(2, 9, seed=4), past_key_values=cache)
            cache.check_invariants()
            positions = cache.positions(0)
            assert not ((positions >= 0) & (positions < 30)).any() and positions.max() == 51


def test_a_prompt_is_read_into_a_cache_that_has_forgotten_all():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "snapkv", 0.5, window=1) as patch:
        cache = patch.new_cache()
        model(prompt(1, 4), past_key_values=cache)
        cache.forget([(0, 4)])
        model(prompt(1, 2, seed=2), past_key_values=cache)
        cache.check_invariants()
        assert cache.held(0).eq(2).all()


def test_a_cache_is_saved_joined_copied_and_reordered_after_an_edit(tmp_path):
    model = make("llama_gqa")
    for policy, spans in (("h2o", [(0, 40)]), ("adakv", [(2, 39)]), ("full", [(3, 20)])):
        with torch.no_grad(), kvpatch.patched(model, policy, 1.0 if policy == "full" else 12) as patch:
            cache = read(model, patch)
            cache.forget(spans)
            patch.save_cache(cache, tmp_path / "cache.safetensors")
            others = {"saved": patch.load_cache(tmp_path / "cache.safetensors"), "copied": cache.clone()}
            assert others["saved"].rows.columns_at_edit == 43
            others["joined"] = kvpatch.EvictingCache.concatenate([cache.select_rows(0), cache.select_rows(1)])
            for layer in range(2):
                for what, other in others.items():
                    assert same(entries(other, layer), entries(cache, layer)), what
            assert others["joined"].rows.columns_at_edit == 43, "a head may be empty"
            others["joined"].reorder_cache(torch.tensor([1, 0]))
            for other in others.values():
                other.check_invariants()
                model(prompt(2, 1), past_key_values=other)
                other.check_invariants()


def test_a_roll_back_stops_at_an_edit():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12) as patch:
        cache = read(model, patch, steps=0)
        cache.activate_past_recording()
        for t in range(3):
            model(prompt(2, 1, seed=t), past_key_values=cache)
        cache.forget([(0, 10)])
        logits = [model(prompt(2, 1, seed=t), past_key_values=cache).logits for t in range(2)]
        before = [entries(cache, layer) for layer in range(2)]
        with pytest.raises(KVPatchError, match="Cannot roll back 3 tokens: the text was edited after 43. Take back 2"):
            cache.crop(-3)
        assert all(same(entries(cache, layer), before[layer]) for layer in range(2))
        cache.crop(-2)
        cache.check_invariants()
        again = [model(prompt(2, 1, seed=t), past_key_values=cache).logits for t in range(2)]
        torch.testing.assert_close(logits, again, atol=0, rtol=0)


def test_a_record_says_when_tokens_went():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0, record=True) as patch:
        cache = read(model, patch, n=20, steps=2)
        cache.forget([(4, 9)], 1)
        model(prompt(2, 1), past_key_values=cache)
        deaths = cache.lifetimes.deaths[0]
    never = torch.iinfo(torch.int32).max
    assert deaths[1, :, 4:9].eq(22).all() and deaths[0, :, :23].eq(never).all() and deaths[1, :, :4].eq(never).all()


def test_a_prefix_that_others_use_keeps_its_tokens():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0) as patch:
        prefix = patch.prefix(ids)
        first, second = prefix.copy(), prefix.copy()
        first.forget([(0, 20)])
        assert same(entries(second, 0), entries(prefix.copy(), 0)) and len(entries(first, 0)) == 10 * 2
