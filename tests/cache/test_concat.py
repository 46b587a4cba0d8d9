"""Caches that are joined, dropped and added to between steps."""

import gc
import weakref

import pytest
import torch

import kvpatch
from kvpatch import EvictingCache, KVPatchError, Report
from kvpatch.cache import concat
from tests.helpers.comparing import SMALL, sorted_positions
from tests.helpers.joined import Loop, do, same_kept
from tests.helpers.tiny import force, left_pad, make, prompt


def test_one_layer_for_all_where_rows_are_alike():
    """Rows that are all full are steps of one stack of layers, with a temperature for each row."""
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 6, generation_length=9) as patch:
        loop = Loop(model, patch)
        loop.add((30, 0), (17, 3), (19, 7))
        loop.step(3)
        assert loop.cache.stacked and loop.cache.counters.steps_behind_B.tolist() == [7, 4, 0]
        loop.step(Q=4)  # a later turn counts from its own end
        assert loop.cache.counters.steps_behind_B is None
        loop.step(2)


@pytest.mark.parametrize("turns", ["all", "each", "first"])
def test_later_turns_of_joined_rows(turns):
    """Each row's budget counts its own text, from where its own turn began."""
    for policy in ("snapkv", "roco"):
        options = {**SMALL.get(policy, {}), "turns": turns, "schedule": "prompt", "protect": [3, 5, 8]}
        model = make("llama_gqa", dtype=torch.float64)
        with torch.no_grad(), kvpatch.patched(model, policy, 0.6, **options) as patch:
            loop = Loop(model, patch)
            loop.add((40, 2), (21, 0))
            loop.step(Q=13)
            loop.step()
            loop.add((30, 2))
            loop.step(Q=14)
            loop.step(2)


@pytest.mark.parametrize("policy", ["adakv", "full", "h2o"])
def test_the_longest_row_goes_and_the_others_outgrow_their_slack(policy):
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.5, **SMALL.get(policy, {})) as patch:
        loop = Loop(model, patch)
        loop.add((90, 0), (12, 0), (14, 3))
        whole = loop.cache.nbytes
        loop.drop(0)
        assert loop.cache.nbytes < whole / 2
        loop.step(12)


@pytest.mark.parametrize("policy", ["random", "keyformer"])
def test_steps_of_a_row_that_has_gone_do_not_count(policy):
    model = make("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, policy, 0.5) as patch:
        caches = [force(model, prompt(1, n), prompt(1, steps), cache=patch.new_cache())[1] for n, steps in ((6, 4), (2, 1))]
        cache = EvictingCache.concatenate(caches)
        assert cache.counters.steps == 4
        cache.batch_select_indices(torch.tensor([1]))
        cache.check_invariants()
        assert cache.counters.steps == (3 if policy == "random" else 1)


def test_padded_batches_join_where_their_positions_leave_padding_out():
    model, ids, mask = make("gpt2", dtype=torch.float64), prompt(2, 20), left_pad(prompt(2, 20), [20, 11])
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        _, padded = force(model, ids, ids[:, :3], mask, cache=patch.new_cache())
        loop = Loop(model, patch)
        loop.alone = [force(model, ids[r : r + 1, -n:], ids[r : r + 1, :3])[1] for r, n in enumerate((20, 11))]
        loop.cache = EvictingCache.concatenate([padded])
        loop.add((8, 2))
        loop.step(3)
        careless = model(ids, attention_mask=mask).past_key_values
        with pytest.raises(KVPatchError, match="Cache 1 has rows with padding, and a pass without position_ids"):
            EvictingCache.concatenate([loop.cache, careless])


@pytest.mark.parametrize("leave", ["select_rows", "batch_select_indices"])
def test_a_row_without_padding_is_joined_once_the_padded_ones_have_gone(leave):
    """Its tokens need no position_ids; a row with padding says how to give them, here after an edit."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(2, 20)
    mask, spans = left_pad(ids, [9, 20]), [(2, 5)]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 14) as patch:
        whole = patch.new_cache()
        model(ids, attention_mask=mask, position_ids=places, past_key_values=whole)
        alone = patch.new_cache()
        model(ids[1:], past_key_values=alone)
        careless = whole.clone()
        careless.forget(spans)
        model(prompt(2, 1), past_key_values=careless)
        with pytest.raises(KVPatchError, match=r"Cache 0 has rows with padding.* cache\.next_positions\(\) for a token"):
            EvictingCache.concatenate([careless])
        careful = whole.clone()
        careful.forget(spans)
        model(prompt(2, 1), position_ids=careful.next_positions(), past_key_values=careful)
        EvictingCache.concatenate([careful]).check_invariants()
        for cache in (whole, careless):
            if leave == "select_rows":
                cache = cache.select_rows(1)
            else:
                cache.batch_select_indices(torch.tensor([1]))
            if cache.get_seq_length() == 20:
                cache.forget(spans)
                model(prompt(2, 1)[1:], past_key_values=cache)
            joined = EvictingCache.concatenate([cache, alone.clone()])
            patch.replace(cache, (2, 5), [4])
            text = alone.clone()
            text.forget(spans)
            model(prompt(2, 1)[1:], past_key_values=text)
            want = model(prompt(1, 1, 5), past_key_values=text).logits
            torch.testing.assert_close(model(prompt(1, 1, 5).expand(2, 1), past_key_values=joined).logits[:1], want)


@pytest.mark.parametrize("policy", ["h2o", "adakv", "full"])
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mpt"])
def test_generate_goes_on_from_a_joined_cache(name, policy):
    model, lengths = make(name), (30, 9, 17)
    texts = [prompt(1, n + 2, seed=n) for n in lengths]
    wide = torch.cat([torch.nn.functional.pad(text, (32 - text.shape[1], 0)) for text in texts])
    mask = left_pad(wide, [n + 2 for n in lengths])
    given = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        caches = [force(model, text[:, :-2], text[:, :0], cache=patch.new_cache())[1] for text in texts]
        alone = [model.generate(t, past_key_values=c.clone(), **given) for t, c in zip(texts, caches, strict=True)]
        for ids in (wide, wide[:, -2:]):
            cache = EvictingCache.concatenate(caches)
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **given)
            for row, one in enumerate(alone):
                got, want = torch.cat(out.logits, 0)[row::3], torch.cat(one.logits, 0)
                torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
        with pytest.raises(KVPatchError, match="input_ids have 2 columns, but the cache has read 30 tokens"):
            model.generate(wide[:, -2:], past_key_values=EvictingCache.concatenate(caches), **given)


def test_rows_are_saved_without_those_that_have_gone(tmp_path):
    """Protected sizes too have a row for each that is left."""
    model = make("llama_gqa", dtype=torch.float64)
    for policy in ("keyformer", "adakv", "roco"):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
            loop = Loop(model, patch)
            loop.add((30, 0), (9, 2), (20, 4))
            loop.drop(0)
            patch.save_cache(loop.cache, tmp_path / policy)
            loop.cache = patch.load_cache(tmp_path / policy)
            assert loop.cache.rows.concatenated and loop.cache.get_seq_length() == 24
            loop.step(2)
            report = Report.of(loop.cache)
            assert report.lengths == (13, 26) and "26 columns; the rows' own: 13 to 26" in str(report)
            loop.cache.reset()
            assert not loop.cache.rows.concatenated and loop.cache.counters.steps_behind_B is None
            _, again = force(model, prompt(1, 30), prompt(1, 2), cache=loop.cache)
            same_kept(again, 0, force(model, prompt(1, 30), prompt(1, 2))[1])


def test_consumed_caches_are_emptied_layer_by_layer(monkeypatch):
    model, held, made = make("llama_gqa"), [], []
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        caches = [loop.read(40), loop.read(25, 3)]
        whole = sum(cache.nbytes for cache in caches)
        fill = concat._copy_tokens

        def watched(new, parts):
            made.append(new)
            own = sum(tensor.numel() * tensor.element_size() for layer in made for tensor in (layer.kv.keys, layer.kv.values))
            held.append(own + sum(cache.nbytes for cache in caches))
            fill(new, parts)

        monkeypatch.setattr(concat, "_copy_tokens", watched)
        kept = EvictingCache.concatenate(caches)
        assert held == [1.5 * whole, 2 * whole] and sum(cache.nbytes for cache in caches) == whole == kept.nbytes
        held.clear(), made.clear()
        joined = EvictingCache.concatenate(caches, consume=True)
        assert held == [1.5 * whole, 1.5 * whole] and joined.nbytes == whole
        assert all(cache.nbytes == 0 and cache.get_seq_length() == 0 for cache in caches)


def test_consumed_caches_that_have_taken_steps_are_emptied_layer_by_layer(monkeypatch):
    """Bound steps hold the buffers of their layers."""
    model, left = make("llama_gqa", layers=4), []
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.4) as patch:
        loop = Loop(model, patch)
        caches = [loop.read(40, 2), loop.read(25, 3)]
        buffers = [weakref.ref(layer.kv) for layer in caches[0].layers]
        join = concat._join_layer

        def watched(new, parts, limits):
            join(new, parts, limits)
            gc.collect()
            left.append(sum(buffer() is not None for buffer in buffers))

        monkeypatch.setattr(concat, "_join_layer", watched)
        EvictingCache.concatenate(caches, consume=True)
    assert left == sorted(left, reverse=True) and left[-1] <= 1


def test_an_edited_row_may_go_back_to_its_edit_when_a_longer_one_has_left():
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "full", 1.0) as patch:
        short, long = (patch.new_cache() for _ in range(2))
        for cache, n in ((short, 12), (long, 40)):
            model(prompt(1, n), past_key_values=cache)
        short.forget([(2, 5)])
        joined = EvictingCache.concatenate([short, long])
        own = joined.select_rows(0)
        model(prompt(1, 4, seed=3), past_key_values=own)
        with pytest.raises(KVPatchError, match="edited"):
            own.crop(-5)
        own.crop(-4)
        assert own.get_seq_length() == 12


def test_rows_that_are_joined_one_token_before_they_evict_several():
    """No slot but one is empty then; an eviction leaves two."""
    model = make("llama_gqa", dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.3, schedule="decode", every=2) as patch:
        loop = Loop(model, patch)
        loop.add((2, 2), (2, 2))
        assert not loop.cache.layers[0].mode.steps_until_full and loop.cache.layers[0].counts() == [4] * 4
        for _ in range(5):
            loop.step()
            loop.cache.check_invariants()


def test_only_steps_of_the_joined_cache_roll_back():
    model = make("llama_gqa", dtype=torch.float64)
    for policy in ("keyformer", "full"):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4) as patch:
            loop = Loop(model, patch)
            loop.add((30, 3), (9, 4))
            with pytest.raises(KVPatchError, match="Cannot roll back 2 tokens"):
                loop.cache.crop(-2)
            loop.cache.activate_past_recording()
            do(loop, "crop", 3, None)
            loop.step(2)


def test_steps_can_be_compiled():
    model = make("llama_gqa", layers=1, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.4, generation_length=9) as patch:
        loop = Loop(model, patch)
        loop.add((30, 3), (9, 4))
        loop.step()
        compiled, twin = torch.compile(model, backend="eager", dynamic=False), loop.cache.clone()
        for t in range(3):
            ids = prompt(2, 1, seed=t)
            want = model(ids, past_key_values=twin).logits
            got = compiled(ids, past_key_values=loop.cache).logits
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        assert loop.cache.counters.has_uncounted_steps, "no step was traced"
        assert loop.cache.next_positions().tolist() == twin.next_positions().tolist()
        for row in range(2):
            assert sorted_positions(loop.cache.positions(0)[row][None].tolist()) == sorted_positions(
                twin.positions(0)[row][None].tolist()
            )


def test_reordered_rows_know_the_longest_of_them():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        caches = [patch.new_cache(), patch.new_cache()]
        for cache, n in zip(caches, (30, 10), strict=True):
            model(ids[:, :n], past_key_values=cache)
        joined = EvictingCache.concatenate(caches)
        joined.reorder_cache(torch.tensor([1, 1]))
        assert joined.get_seq_length() == 10


def test_caches_from_files_join_where_positions_are_distances(tmp_path):
    model, ids = make("mpt"), prompt(1, 30)
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        caches = []
        for n in (30, 10):
            model(ids[:, :n], past_key_values=(cache := patch.new_cache()))
            patch.save_cache(cache, tmp_path / f"{n}")
            caches.append(patch.load_cache(tmp_path / f"{n}"))
        joined = EvictingCache.concatenate(caches)
        assert model(ids[:, :1].expand(2, 1), past_key_values=joined).logits.isfinite().all()
