"""Moments of a prompt's queries: gathered in pieces, without rotation, and what reads them."""

import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from kvpatch.policies.needs import QueryMoments
from kvpatch.policies.needs.chunk_attention import OpenChunks
from kvpatch.policies.needs.query_moments import Moments
from tests.helpers.contexts import small_context
from tests.helpers.running import run
from tests.helpers.tiny import make, prompt
from tests.helpers.tiny_families import make as family


def test_moments_of_pieces_are_those_of_the_whole():
    q, counted = torch.randn(2, 2, 3, 20, 4, dtype=torch.float64), torch.rand(2, 20) < 0.7
    counted[1, :7] = False  # a piece of which nothing counts
    found = Moments.of(q[..., :7, :], counted[:, :7], True)
    for begin, end in ((7, 8), (8, 20)):
        found = found.join_parts(Moments.of(q[..., begin:end, :], counted[:, begin:end], True))
    for b in range(2):
        own = q[b, :, :, counted[b]]
        torch.testing.assert_close(found.mean_BHG1D[b, :, :, 0], own.mean(2))
        wanted = torch.stack([torch.stack([torch.cov(one.T, correction=0) for one in head]) for head in own])
        torch.testing.assert_close(found.spread_BHGDD[b] / counted[b].sum(), wanted)


def test_rows_are_chosen_with_their_spread():
    q, counted = torch.randn(2, 1, 2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    both, turned = Moments.of(q, counted, True), Moments.of(q.flip(0), counted, True)
    found = both.map_rows(lambda rows: rows.flip(0))
    assert all(torch.equal(vars(found)[name], part) for name, part in vars(turned).items())
    assert Moments.of(q, counted, False).map_rows(lambda rows: rows[:1]).spread_BHGDD is None


def test_nothing_counted_is_zero():
    found = Moments.of(torch.randn(1, 1, 2, 3, 4), torch.zeros(1, 3, dtype=torch.bool), True).rotate_moments(None, 1.0, None)
    assert not found.mean_BHGD.any()
    assert not found.covariance_BHGDD.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotations_are_undone(dtype):
    """Scaled rotary tables too, whose rotations lengthen queries, and those of models in half precision."""
    table = [torch.randn(9, 6), torch.randn(9, 6)]
    for name, tables in (("llama_gqa", [torch.cat([one, one], -1) for one in table]), ("gptj", torch.randn(9, 4))):
        model = make(name, dtype=torch.float64)
        attn = model.model.layers[0].self_attn if name == "llama_gqa" else model.transformer.h[0].attn
        adapter = kvpatch.arch.adapter.adapter_of(attn)
        x, places = torch.randn(2, 3, 5, 12, dtype=torch.float64), torch.randint(0, 9, (2, 1, 5))
        tables = [one.to(dtype) for one in tables] if name == "llama_gqa" else tables.to(dtype)
        turned = adapter.rotate(attn, x, places, tables)
        assert not torch.allclose(turned, x)
        torch.testing.assert_close(adapter.rotate_back(attn, turned, places, tables), x)


def test_what_cannot_be_served_is_refused():
    with pytest.raises(KVPatchError, match=r"'expected_attention' reads queries.*glm its row does not declare"):
        kvpatch.patch(family("glm"), "expected_attention", 0.5)
    with pytest.raises(KVPatchError, match=r"positions='renumbered' does not go with.*positions='original'"):
        kvpatch.patch(make("llama"), "expected_attention", 0.5, positions="renumbered")
    for wrong in ({"future": 0}, {"future": 2.5}, {"eps": -1.0}, {"eps": float("inf")}, {"eps": True}, {"covariance": 1}):
        with pytest.raises(KVPatchError, match=next(iter(wrong))):
            kvpatch.patch(make("llama"), "expected_attention", 0.5, **wrong)
    with pytest.raises(KVPatchError, match=r"needs = \(QueryMoments\(...\),\)"):
        small_context(2, None).view(QueryMoments)
    model, ids = make("llama"), prompt(1, 12)
    past = model(ids, use_cache=True).past_key_values
    with kvpatch.patched(model, "expected_attention", 0.5) as patch, pytest.raises(KVPatchError, match="inside the block"):
        patch.new_cache(past)


def test_a_policy_that_reads_no_queries_makes_no_table(monkeypatch):
    model, ids, fed, made = make("llama"), prompt(1, 30), prompt(1, 3, seed=2), []
    adapter = kvpatch.arch.adapter.adapter_of(model.model.layers[0].self_attn)
    own = type(adapter).rotary_table
    monkeypatch.setattr(type(adapter), "rotary_table", lambda *args: made.append(args[-1]) or own(*args))
    for policy in ("snapkv", "key_diff", "h2o"):
        run(model, ids, fed, policy, 0.5)
    assert not made
    run(model, ids, fed, "expected_attention", 0.5, future=9)
    assert made == [39]


def test_the_newest_rows_of_chunks():
    """Of two texts, whose newest three rows begin before and behind the start."""
    q, k = torch.arange(10.0).view(2, 1, 1, 5, 1), torch.arange(10.0, 20.0).view(2, 1, 5, 1)
    rows = OpenChunks(q, k, torch.tensor([[4, 5, 6, 7, 8], [-1, 2, 3, 4, 5]]), torch.arange(10).view(2, 5))
    found = rows.take_newest(3, torch.tensor([[7], [0]]))
    assert found.positions_BC.tolist() == [[-1, 7, 8], [3, 4, 5]]
    assert found.q_BHGCD.flatten(1).tolist() == [[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]]
    assert found.k_BHCD.flatten(1).tolist() == [[12.0, 13.0, 14.0], [17.0, 18.0, 19.0]]
    assert found.columns_BC.tolist() == [[2, 3, 4], [7, 8, 9]]
    assert rows.take_newest(9, torch.tensor([[0], [0]])).positions_BC.tolist() == rows.positions_BC.tolist()
