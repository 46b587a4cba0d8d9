"""RowPool: the rows of a decode step as requests come, wait and end."""

import torch

import kvpatch
from kvpatch.serving.rows import RowPool
from tests.helpers.serving import prompts
from tests.helpers.tiny import make


def test_rows_are_those_asked_for():
    """Whatever is asked for in whatever order, each request goes on with what it holds, and the others stay as they are."""
    model, texts = make("llama_gqa"), dict(zip("abcd", prompts((20, 61, 9, 33)), strict=True))
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():

        def read(ids):
            cache = patch.new_cache()
            model(torch.tensor([ids]), past_key_values=cache)
            return cache

        pool, alone = RowPool(), {name: read(ids) for name, ids in texts.items()}
        for name, ids in texts.items():
            pool.add(name, read(ids))
        for step, wanted in enumerate(("abcd", "db", "c", "acd", "abcd", "ab", "dcba")):
            rows = pool.gather(wanted)
            assert sorted(rows.names) == sorted(wanted)
            fed = torch.tensor([[5 + 7 * step + ord(name) % 13] for name in rows.names])
            logits = model(fed, past_key_values=rows.cache).logits[:, -1]
            for row, name in enumerate(rows.names):
                own = model(fed[row : row + 1], past_key_values=alone[name]).logits[0, -1]
                assert torch.allclose(logits[row], own, atol=1e-5), (step, name)
                for layer in range(2):
                    assert torch.equal(rows.cache.positions(layer)[row].sort()[0], alone[name].positions(layer)[0].sort()[0])
        pool.drop("b")
        pool.drop("never there")
        assert sorted(name for part in pool.parts for name in part.names) == ["a", "c", "d"]
        assert sorted(pool.gather("ca").names) == ["a", "c"] and len(pool.parts) == 2
        for name in "acd":
            pool.drop(name)
        assert not pool.parts


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
