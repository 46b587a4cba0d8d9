"""patch.replace() with more tokens than its span has: what follows moves up, and is not read again.

Oracles: the unpatched model's entries, keys turned by as many positions as open; and a cache in which the place was left free
from the beginning.
"""

import random

import pytest
import torch

import kvpatch
from kvpatch.arch.upstream import cache_of
from kvpatch.errors import KVPatchError
from tests.helpers.comparing import entries, same
from tests.helpers.tiny import left_pad, make, prompt

RENUMBERED = {"positions": "renumbered"}


def turned(model, keys, places):
    """Keys [B,H,T,D] turned by so many positions each [T]."""
    cos, sin = model.model.rotary_emb(keys, places[None])
    half = keys.shape[-1] // 2
    return keys * cos[:, None] + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin[:, None]


@pytest.mark.parametrize("name", ["llama", "llama_gqa"])
def test_what_follows_is_as_the_unpatched_models_entries_moved_up(name):
    """Random texts, places and lengths, in float64: keys that stand behind are turned by the positions that open."""
    draw, model = random.Random(name), make(name, dtype=torch.float64)
    for _ in range(20):
        B, n, N, spare = draw.randrange(1, 4), draw.randrange(3, 30), draw.randrange(1, 9), draw.randrange(0, 3)
        start = draw.randrange(0, n - 1 - spare) if n - 1 - spare > 0 else 0
        stop = min(start + spare, n - 1, start + N - 1)
        ids, new, later = prompt(B, n, seed=n), prompt(B, N, seed=N + 50), prompt(B, 3, seed=99)
        shift = N - (stop - start)
        with torch.no_grad():
            spliced = cache_of(model(ids, use_cache=True))
            beside = cache_of(model(torch.cat([ids[:, :start], new], 1), use_cache=True))
            for layer, other in zip(spliced.layers, beside.layers, strict=True):
                behind = turned(model, layer.keys[:, :, stop:], torch.full((n - stop,), shift))
                layer.keys = torch.cat([other.keys, behind], 2)
                layer.values = torch.cat([other.values, layer.values[:, :, stop:]], 2)
            argument = kvpatch.arch.upstream.cache_argument(type(model).forward)
            expected = model(later, **{argument: spliced}).logits
            with kvpatch.patched(model, "h2o", 1.0, **RENUMBERED) as patch:
                cache = patch.new_cache()
                model(ids, past_key_values=cache)
                patch.replace(cache, (start, stop), new)
                cache.check_invariants()
                assert cache.get_seq_length() == n + shift and cache.positions(0).max() == n + shift - 1
                text = torch.cat([ids[:, :start], new, ids[:, stop:]], 1)
                assert cache.ids.ids_BT.equal(text), "ids of the text as it stands now"
                got = model(later, past_key_values=cache).logits
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)  # cosines are float32


POLICIES = ("full", "h2o", "roco", "tova", "keyformer", "snapkv", "adakv", "pyramidkv", "critical_snapkv", "cur", "lag_kv")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gptj"])
def test_an_insertion_is_a_free_place_that_was_filled(name, policy):
    model, before, behind, new = make(name, dtype=torch.float64), prompt(2, 11), prompt(2, 9, seed=4), prompt(2, 5, seed=7)
    with torch.no_grad(), kvpatch.patched(model, policy, 1.0, **RENUMBERED) as patch:
        free, tight = patch.new_cache(), patch.new_cache()
        model(torch.cat([before, prompt(2, 5, seed=3)], 1), past_key_values=free)
        free.forget([(11, 16)])
        model(before, past_key_values=tight)
        for cache in (free, tight):
            model(behind, past_key_values=cache)
        patch.replace(free, (11, 16), new)
        patch.replace(tight, (11, 11), new)
        for t in range(4):
            logits = [model(prompt(2, 1, seed=t), past_key_values=cache).logits for cache in (free, tight)]
            torch.testing.assert_close(*logits, atol=1e-9, rtol=0)
        for layer in range(2):
            assert tight.positions(layer).sort(-1).values.equal(free.positions(layer).sort(-1).values)
        tight.check_invariants()


def test_sums_that_layers_share_and_the_newest_turn_move_up():
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 12, shared=True, **RENUMBERED) as patch:
        cache = patch.new_cache()
        for n in (20, 9):
            model(prompt(2, n, seed=n), past_key_values=cache)
        model(prompt(2, 1), past_key_values=cache)
        before = cache.shared_score.clone()
        patch.replace(cache, (8, 8), prompt(2, 5, seed=3))
        assert cache.shared_score[..., 14:35].equal(before[..., 9:30])
        assert cache.ids.prompt == 25
        model(prompt(2, 1), past_key_values=cache)
        cache.check_invariants()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(
    ("policy", "k"),
    [("full", 1.0), ("h2o", 12), ("h2o", 0.5), ("roco", 20), ("adakv", 0.4), ("snapkv", 0.4), ("h2o", kvpatch.Share(0.4)),
     ("h2o", kvpatch.Mass(0.8)), ("keyformer", 14), ("pyramidkv", 14)],
)  # fmt: skip
def test_what_is_held_behind_moves_up_bit_for_bit(policy, k, bits):
    model, draw = make("llama_gqa"), random.Random(f"{policy} {k} {bits}")
    options = {"recent": 4} if isinstance(k, kvpatch.Mass) else {}
    with torch.no_grad(), kvpatch.patched(model, policy, k, bits=bits, **options, **RENUMBERED) as patch:
        cache = patch.new_cache()
        model(prompt(2, 40), past_key_values=cache)
        for _ in range(5):
            model(prompt(2, 1), past_key_values=cache)
            n, N = cache.get_seq_length(), draw.randrange(1, 9)
            start = draw.randrange(n)
            stop = min(start + draw.randrange(N), n - 1)
            before, counts, copy = [entries(cache, layer) for layer in range(2)], cache.held(0), cache.clone()
            patch.replace(cache, (start, stop), prompt(2, N, seed=n))
            cache.check_invariants()
            shift = N - (stop - start)
            for layer in range(2):
                behind = {(b, h, p + shift): one for (b, h, p), one in before[layer].items() if p >= stop}
                now = entries(cache, layer)
                assert same({at: one for at, one in now.items() if at[2] >= stop + shift}, behind), "entries and scores"
                assert same(entries(copy, layer), before[layer]), "a clone keeps its own"
                assert all(at in before[layer] for at in now if at[2] < start)
            if policy in ("h2o", "roco", "keyformer") and isinstance(k, int):
                assert cache.held(0).le(counts.max()).all(), "heads keep the budgets that they have"
        for t in range(20):
            model(prompt(2, 1, seed=t), past_key_values=cache)
            cache.check_invariants()


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv"])
def test_rows_of_a_padded_batch_are_as_alone(policy):
    model, lengths = make("llama_gqa"), [24, 40]
    options = {"window": 4} if policy != "h2o" else {}
    ids, mask, new = prompt(2, 40), left_pad(prompt(2, 40), lengths), prompt(2, 7, seed=3)
    with torch.no_grad(), kvpatch.patched(model, policy, 14, **options, **RENUMBERED) as patch:
        both = patch.new_cache()
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), past_key_values=both)
        patch.replace(both, (8, 10), new)
        both.check_invariants()
        text = [torch.cat([one[:8], added, one[10:]]) for one, added in zip(_unpad(ids, lengths), new, strict=True)]
        for row, own in enumerate(text):
            alone = patch.new_cache()
            model(ids[row : row + 1, 40 - lengths[row] :], past_key_values=alone)
            patch.replace(alone, (8, 10), new[row])
            assert both.ids.ids_BT[row, 45 - len(own) :].equal(own) and alone.ids.ids_BT[0].equal(own)
            for layer in range(2):
                assert {at[1:] for at in entries(both, layer) if at[0] == row} == {at[1:] for at in entries(alone, layer)}
            going = both.clone()
            for t in range(6):
                token = prompt(1, 1, seed=t)
                full = torch.cat([left_pad(prompt(2, 45), [29, 45]), torch.ones(2, t + 1, dtype=torch.long)], 1)
                logits = model(token.expand(2, 1), attention_mask=full, past_key_values=going).logits[row]
                torch.testing.assert_close(logits, model(token, past_key_values=alone).logits[0], atol=1e-4, rtol=0)


def _unpad(ids, lengths):
    return [row[len(row) - n :] for row, n in zip(ids, lengths, strict=True)]


@pytest.mark.parametrize("reread", [1, 6])
def test_tokens_behind_are_read_again(reread):
    """With all of them read again, the text is as it would be read from its beginning."""
    model, ids, new = make("llama_gqa", dtype=torch.float64), prompt(1, 12), prompt(1, 4, seed=7)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0, **RENUMBERED) as patch:
        edited, anew = patch.new_cache(), patch.new_cache()
        model(ids, past_key_values=edited)
        patch.replace(edited, (6, 6), new, reread=reread)
        model(torch.cat([ids[:, :6], new, ids[:, 6:]], 1), past_key_values=anew)
        for layer in range(2):
            read, wanted = entries(edited, layer), entries(anew, layer)
            assert read.keys() == wanted.keys()
            for at in (one for one in wanted if one[2] < 10 + reread):
                torch.testing.assert_close(read[at][:2], wanted[at][:2], atol=1e-9, rtol=0)
        logits = [model(prompt(1, 1), past_key_values=cache).logits for cache in (edited, anew)]
        assert (reread == 6) == torch.allclose(*logits, atol=1e-9, rtol=0)


def test_a_longer_text_is_saved_joined_rolled_back_and_gone_on_from(tmp_path):
    model = make("llama_gqa")
    for policy in ("h2o", "adakv", "keyformer"):
        with torch.no_grad(), kvpatch.patched(model, policy, 12, **RENUMBERED) as patch:
            cache = patch.new_cache()
            model(prompt(2, 40), past_key_values=cache)
            patch.replace(cache, (20, 20), prompt(2, 6, seed=3))
            patch.save_cache(cache, tmp_path / "cache.safetensors")
            others = [patch.load_cache(tmp_path / "cache.safetensors"), cache.clone()]
            others.append(kvpatch.EvictingCache.concatenate([cache.select_rows(0), cache.select_rows(1)]))
            with pytest.raises(KVPatchError, match="Cannot roll back 1 tokens: the text was edited after 46"):
                cache.crop(-1)
            for other in others:
                for layer in range(2):
                    assert same(entries(other, layer), entries(cache, layer))
                logits = [model(prompt(2, 9, seed=4), past_key_values=one).logits for one in (other, cache.clone())]
                torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
                other.check_invariants()


def test_generate_goes_on_from_the_longer_text():
    model, ids, new = make("llama_gqa"), prompt(1, 40), prompt(1, 6, seed=7)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.6, **RENUMBERED) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        patch.replace(cache, (5, 5), new)
        text = torch.cat([ids[:, :5], new, ids[:, 5:], prompt(1, 3, seed=9)], 1)
        with pytest.raises(KVPatchError, match="input_ids differ from what the cache has read at column 5"):
            model.generate(torch.cat([ids, text[:, 40:]], 1), past_key_values=cache.clone(), max_new_tokens=2)
        assert model.generate(text, past_key_values=cache, max_new_tokens=6, do_sample=False).shape == (1, 55)
        cache.check_invariants()


def test_a_prefix_that_others_use_keeps_its_positions():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 12, **RENUMBERED) as patch:
        prefix = patch.prefix(ids)
        first, second = prefix.copy(), prefix.copy()
        before = [entries(second, layer) for layer in range(2)]
        patch.replace(first, (3, 3), prompt(1, 9, seed=3))
        for other in (second, prefix.copy()):
            assert all(same(entries(other, layer), before[layer]) for layer in range(2)) and other.ids.ids_BT.equal(ids)
