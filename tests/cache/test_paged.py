"""Keys and values in an engine's pages: the same tokens, in memory that is not the cache's."""

import functools

import pytest
import torch

import kvpatch
from kvpatch.cache.paged import PagedSlots, divide_pages, first_prompt
from kvpatch.serving.rows import RowPool
from tests.helpers.joined import same_kept
from tests.helpers.serving import prompts
from tests.helpers.tiny import make

LENGTHS = (20, 61, 9, 33)


def paged(cache, pools, pages, device="cpu"):
    """Give each layer of an empty cache pages of its own in a pool."""
    for layer, pool in zip(cache.layers, pools, strict=True):
        strips = divide_pages([pages], 2, torch.device(device))
        layer.storage = functools.partial(first_prompt, pool=pool, strips=strips)
    return cache


def pool_of(pages, P, device="cpu", fill=0.0):
    """The pages of a layer of two heads, as strips; page 0 is nobody's and empty."""
    pool = torch.full((2, pages * 2, P, 8), fill, device=device)
    pool[:, :2] = 0
    return pool


def test_bytes_of_rows_are_those_of_their_pages():
    pool = pool_of(9, 4)
    rows = [PagedSlots(pool, divide_pages(pages, 2, pool.device), 4) for pages in ([[1, 2, 3], [4]], [[1, 2, 3]], [[4]])]
    assert rows[0].nbytes == rows[1].nbytes + rows[2].nbytes == 4 * 2 * 2 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("policy", "P", "options"),
    [
        ("h2o", 13, {}),
        ("tova", 5, {}),
        ("snapkv", 8, {"window": 4}),
        ("critical_snapkv", 8, {"window": 4}),
        ("key_diff", 13, {}),
    ],
)
@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("apart", [1, 4])
def test_rows_in_pages_are_rows(policy, P, options, block, apart):
    """Prompts shorter and longer than the budget, alone and beside each other, while requests come, wait and go.

    apart: pages of a row follow each other, or have other rows' between them.
    """
    model, texts = make("llama_gqa"), dict(zip("abcd", prompts(LENGTHS), strict=True))
    with kvpatch.patched(model, policy, 12, block=block, **options) as patch, torch.no_grad():
        pages, rows = 32 // P + 1, RowPool()
        pools = [pool_of(16 + 4 * pages, P, fill=torch.nan) for _ in range(2)]
        alone = {}
        for index, (name, ids) in enumerate(texts.items()):
            first = 1 + index * (1 if apart > 1 else pages + 3)
            own = [*range(first, 16 + 4 * pages, apart)][: pages + index]  # not equally many
            cache = paged(patch.new_cache(), pools, own)
            alone[name] = patch.new_cache()
            for one in (cache, alone[name]):
                model(torch.tensor([ids]), past_key_values=one)
            assert all(isinstance(layer.kv, PagedSlots) for layer in cache.layers)
            rows.add(name, cache)
        for step, wanted in enumerate(("abcd", "db", "c", "acd", "abcd", "ab", "dcba", "dcba", "abcd", "a", "bc")):
            here = rows.gather(wanted)
            assert all(isinstance(layer.kv, PagedSlots) for layer in here.cache.layers)
            fed = torch.tensor([[5 + 7 * step + ord(name) % 13] for name in here.names])
            logits = model(fed, past_key_values=here.cache).logits[:, -1]
            for row, name in enumerate(here.names):
                own = model(fed[row : row + 1], past_key_values=alone[name]).logits[0, -1]
                assert torch.allclose(logits[row], own, atol=1e-5), (step, name)
                same_kept(here.cache, row, alone[name])
        assert not any(bool(pool[:, :2].any()) for pool in pools), "page 0 is nobody's"


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_a_row_needs_no_more_pages_than_its_tokens_fill(policy):
    """Short texts beside a long one, in pages for their own tokens alone; and without it, no wider than these."""
    options = {"window": 4} if policy == "snapkv" else {}
    model, lengths, new, P = make("llama_gqa"), (9, 61, 14, 5), 7, 4
    with kvpatch.patched(model, policy, 24, **options) as patch, torch.no_grad():
        rows, pools, alone, page = RowPool(order=int), [pool_of(40, P, fill=torch.nan) for _ in range(2)], {}, 1
        for ids in prompts(lengths):
            slots = min(24, len(ids)) + new if policy == "snapkv" else min(24 + 1, len(ids) + new)
            own = [*range(page, page + -(-slots // P))]
            cache, alone[str(page)] = paged(patch.new_cache(), pools, own), patch.new_cache()
            for one in (cache, alone[str(page)]):
                model(torch.tensor([ids]), past_key_values=one)
            rows.add(str(page), cache)
            page = own[-1] + 1
        names = [*alone]
        for step in range(new):
            here = rows.gather(names if step < 4 else [name for name in names if name != names[1]])
            fed = torch.tensor([[5 + step]] * len(here.names))
            logits = model(fed, past_key_values=here.cache).logits[:, -1]
            for row, name in enumerate(here.names):
                own = model(fed[:1], past_key_values=alone[name]).logits[0, -1]
                assert torch.allclose(logits[row], own, atol=1e-5), (step, name)
                same_kept(here.cache, row, alone[name])
        assert here.cache.layers[0].kv.width <= -(-(14 + new) // P) * P
        assert not any(bool(pool[:, :2].any()) for pool in pools), "page 0 is nobody's"


def test_rows_join_and_leave_where_they_lie(monkeypatch):
    model, texts = make("llama_gqa"), prompts(LENGTHS)
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        rows, pools = RowPool(), [pool_of(9, 13) for _ in range(2)]
        for index, ids in enumerate(texts):
            cache = paged(patch.new_cache(), pools, [index + 1])
            model(torch.tensor([ids]), past_key_values=cache)
            rows.add(str(index), cache)
        monkeypatch.setattr(PagedSlots, "_read_strips", copied)
        for wanted in ("0123", "12", "0123", "3"):
            assert sorted(rows.gather(wanted).names) == sorted(wanted)


def test_where_pages_lie_is_known_without_the_device():
    """How many pages the rows have, and if those of all rows follow each other, as rows go, come and change places."""
    strips = divide_pages([[1, 2], [3, 4], [5], [8, 7]], 2, torch.device("cpu"))
    slots = first_prompt(torch.rand(4, 2, 4, 8), torch.rand(4, 2, 4, 8), torch.zeros(2, 20, 4, 8), strips).close_columns(4)
    outside = "meta"  # whoever asks it for a number raises
    slots.strips_BHN, slots.pool = slots.strips_BHN.to(outside), slots.pool.to(outside)
    for rows, most, together in (([0, 1], 8, slice(2, 10)), ([1, 0], 8, None), ([2], 4, slice(10, 12)), ([0, 2], 8, None)):
        some = slots.map_rows(lambda tensor, rows=rows: tensor[rows], 4, 2)
        assert (some.most, some._together) == (most, together)
    assert slots.map_rows(lambda tensor: tensor[[3]], 4, 2)._together is None, "its second page lies before its first"
    parts = slots.map_rows(lambda tensor: tensor[:1], 4, 2), slots.map_rows(lambda tensor: tensor[1:3], 4, 2)
    joined = parts[0].join_in_place([parts[1]], 4)
    assert (joined.most, joined._together) == (8, None)


@pytest.mark.parametrize(("P", "each"), [(13, 1), (5, 3)])
def test_pages_that_lie_together_are_read_where_they_lie(P, each):
    """In rows that are ordered by their pages, whichever came first; and not if a page between them is another's."""
    model, texts = make("llama_gqa"), prompts(LENGTHS)
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        rows, pools = RowPool(order=int), [pool_of(1 + 8 * each, P) for _ in range(2)]
        for name, ids in zip((4, 3, 6, 5), texts, strict=True):
            cache = paged(patch.new_cache(), pools, [*range(1 + name * each, 1 + (name + 1) * each)])
            model(torch.tensor([ids]), past_key_values=cache)
            rows.add(str(name), cache)
        for wanted, together in (("3456", True), ("346", False), ("34", True), ("3456", True)):
            here = rows.gather(wanted)
            assert here.names == list(wanted)
            for read, pool in zip(here.cache.layers[0].kv.view(12), pools[0], strict=True):
                for row, name in enumerate(wanted):
                    own = pool[2 + int(name) * 2 * each :][: 2 * each].view(2, each * P, 8)
                    assert torch.equal(read[row], own[:, :12])
                assert (read.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()) == together
            model(torch.tensor([[5]] * len(wanted)), past_key_values=here.cache)


def copied(*told):
    raise AssertionError("keys or values were copied out of the pages")


def test_pages_divided_among_heads():
    """Pages that follow each other are one piece for each head; others are one for each page; strip 0 fills up."""
    strips = divide_pages([[3, 4, 5], [7, 9], [6]], 2, torch.device("cpu"))
    assert strips.index_BHN.tolist() == [[[6, 7, 8], [9, 10, 11]], [[14, 18, 0], [15, 19, 0]], [[12, 0, 0], [13, 0, 0]]]
    assert strips.run == 1
    for pages, run in (([[1, 2], [5, 6]], 2), ([[1, 2, 3], [5, 6]], 2), ([[4], [1, 2]], 1), ([[2, 1]], 1)):
        assert divide_pages(pages, 2, torch.device("cpu")).run == run


def test_rows_move_in_the_midst_of_a_prompt_with_their_pages():
    pool, strips = torch.zeros(2, 4, 4, 8), divide_pages([[1], [2], [3]], 1, torch.device("cpu"))
    keys, values = torch.rand(3, 1, 4, 8), torch.rand(3, 1, 4, 8)
    rows = torch.tensor([2, 0])
    slots = first_prompt(keys, values, pool, strips).map_rows(lambda tensor: tensor[rows], 3, 1).close_columns(4)
    assert slots.strips_BHN.tolist() == [[[3]], [[1]]] and slots.shape == (2, 1, 4, 8)
    assert torch.equal(slots.keys, keys[rows]) and torch.equal(slots.values, values[rows])
    assert torch.equal(pool[0, 3], keys[2, 0]) and not pool[:, 2].any()
    all_rows = first_prompt(keys, values, pool, strips).close_columns(4)
    assert torch.equal(all_rows.keys, keys)
    moved = all_rows.map_rows(lambda tensor: tensor[1:], 3, 1)  # where the pages of all rows lie is not looked up for fewer
    assert moved.shape == (2, 1, 4, 8) and torch.equal(moved.keys, keys[1:])
