"""RowPool: the rows of a decode step as requests come, wait and end."""

import torch

import kvpatch
from kvpatch import EvictingCache
from kvpatch.serving.rows import RowPool
from tests.helpers.joined import same_kept
from tests.helpers.serving import prompts
from tests.helpers.tiny import make


def held(cache, row):
    """The positions that each head of a row holds, in both layers."""
    heads = [head.tolist() for layer in range(2) for head in cache.positions(layer)[row]]
    return [sorted(position for position in head if position >= 0) for head in heads]


def read(model, patch, ids):
    cache = patch.new_cache()
    model(torch.tensor([ids]), past_key_values=cache)
    return cache


def test_rows_are_those_asked_for():
    """Whatever is asked for in whatever order, each request goes on with what it holds, and the others stay as they are."""
    model, texts = make("llama_gqa"), dict(zip("abcd", prompts((20, 61, 9, 33)), strict=True))
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        pool, alone = RowPool(), {name: read(model, patch, ids) for name, ids in texts.items()}
        for name, ids in texts.items():
            pool.add(name, read(model, patch, ids))
        for step, wanted in enumerate(("abcd", "db", "c", "acd", "abcd", "ab", "dcba")):
            rows = pool.gather(wanted)
            assert sorted(rows.names) == sorted(wanted)
            fed = torch.tensor([[5 + 7 * step + ord(name) % 13] for name in rows.names])
            logits = model(fed, past_key_values=rows.cache).logits[:, -1]
            for row, name in enumerate(rows.names):
                own = model(fed[row : row + 1], past_key_values=alone[name]).logits[0, -1]
                assert torch.allclose(logits[row], own, atol=1e-5), (step, name)
                assert held(rows.cache, row) == held(alone[name], 0), (step, name)
        pool.drop("b")
        pool.drop("never there")
        assert sorted(name for part in pool.parts for name in part.alive) == ["a", "c", "d"]
        assert sorted(pool.gather("ca").names) == ["a", "c"] and len(pool.parts) == 2
        for name in "acd":
            pool.drop(name)
        assert not pool.parts


def test_rows_of_ended_requests_go_in_the_next_pass(monkeypatch):
    """Whoever ends a request may run in another stream than the passes; and its name may be a new request's before the next."""
    model, texts = make("llama_gqa"), dict(zip("abc", prompts((20, 61, 9)), strict=True))
    moved, select = [], EvictingCache.batch_select_indices
    monkeypatch.setattr(EvictingCache, "batch_select_indices", lambda *given: (moved.append(given), select(*given))[1])
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        pool = RowPool(order=str)
        for name, ids in texts.items():
            pool.add(name, read(model, patch, ids))
        pool.gather("abc")
        moved.clear()
        pool.drop("b")
        assert not moved
        pool.add("b", read(model, patch, texts["c"]))
        rows = pool.gather("cb")
        assert rows.names == ["b", "c"] and held(rows.cache, 0) == held(rows.cache, 1)
        assert [part.names for part in pool.parts] == [["a"], ["b", "c"]]


def test_nothing_moves_while_the_requests_are_the_same():
    model, texts = make("llama_gqa"), prompts((20, 61))
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        pool = RowPool()
        for name, ids in zip("ab", texts, strict=True):
            cache = patch.new_cache()
            model(torch.tensor([ids]), past_key_values=cache)
            pool.add(name, cache)
        first = pool.gather("ab")
        assert pool.gather("ba") is first


def test_temperatures_are_each_row_s():
    """keyformer's temperature rises over the new tokens that a request was asked for, whatever the others were."""
    model, texts, wanted = make("llama_gqa"), prompts((40, 40, 33)), (5, 40, 12)
    with kvpatch.patched(model, "keyformer", 12, tau=(1.0, 20.0)) as patch, torch.no_grad():
        pool, alone = RowPool(), []
        for ids, new in zip(texts, wanted, strict=True):
            for keep in (alone.append, lambda cache: pool.add(str(len(alone)), cache)):
                cache = patch.new_cache()
                cache.plans.new_tokens = new
                model(torch.tensor([ids]), past_key_values=cache)
                keep(cache)
        rows = pool.gather("123")
        for step in range(12):
            model(torch.tensor([[5 + step], [6 + step], [7 + step]]), past_key_values=rows.cache)
            for row, cache in enumerate(alone):
                model(torch.tensor([[5 + step + row]]), past_key_values=cache)
                same_kept(rows.cache, row, cache)
