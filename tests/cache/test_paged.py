"""Keys and values in an engine's pages: the same tokens, in memory that is not the cache's."""

import functools

import pytest
import torch

import kvpatch
from kvpatch.cache.paged import PagedSlots, first_prompt
from kvpatch.serving.rows import RowPool
from tests.helpers.joined import same_kept
from tests.helpers.serving import prompts
from tests.helpers.tiny import make

LENGTHS = (20, 61, 9, 33)


def paged(cache, pools, pages, device="cpu"):
    """Give each layer of an empty cache pages of its own in a pool."""
    for layer, pool in zip(cache.layers, pools, strict=True):
        layer.storage = functools.partial(first_prompt, pool=pool, table_BN=torch.tensor([pages], device=device))
    return cache


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
def test_rows_in_pages_are_rows(policy, P, options, block):
    """Prompts shorter and longer than the budget, alone and beside each other, while requests come, wait and go."""
    model, texts = make("llama_gqa"), dict(zip("abcd", prompts(LENGTHS), strict=True))
    with kvpatch.patched(model, policy, 12, block=block, **options) as patch, torch.no_grad():
        pages, rows = 32 // P + 1, RowPool()
        pools = [torch.full((16 + 4 * pages, 2, 2, P, 8), torch.nan) for _ in range(2)]
        for pool in pools:
            pool[0] = 0
        alone = {}
        for index, (name, ids) in enumerate(texts.items()):
            own = [*range(1 + index, len(pools[0]), 4)][: pages + index]  # not contiguous, nor equally many
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
        assert not any(bool(pool[0].any()) for pool in pools), "page 0 is nobody's"


def test_rows_join_and_leave_where_they_lie(monkeypatch):
    model, texts = make("llama_gqa"), prompts(LENGTHS)
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        rows, pools = RowPool(), [torch.zeros(9, 2, 2, 13, 8) for _ in range(2)]
        for index, ids in enumerate(texts):
            cache = paged(patch.new_cache(), pools, [index + 1])
            model(torch.tensor([ids]), past_key_values=cache)
            rows.add(str(index), cache)
        monkeypatch.setattr(PagedSlots, "_read_pages", copied)
        for wanted in ("0123", "12", "0123", "3"):
            assert sorted(rows.gather(wanted).names) == sorted(wanted)


def test_pages_that_lie_together_are_read_where_they_lie():
    """In rows that are ordered by their pages, whichever came first; and not if a page between them is another's."""
    model, texts = make("llama_gqa"), prompts(LENGTHS)
    with kvpatch.patched(model, "h2o", 12) as patch, torch.no_grad():
        rows, pools = RowPool(order=int), [torch.zeros(9, 2, 2, 13, 8) for _ in range(2)]
        for page, ids in zip((4, 3, 6, 5), texts, strict=True):
            cache = paged(patch.new_cache(), pools, [page])
            model(torch.tensor([ids]), past_key_values=cache)
            rows.add(str(page), cache)
        for wanted, together in (("3456", True), ("346", False), ("34", True), ("3456", True)):
            here = rows.gather(wanted)
            assert here.names == list(wanted)
            keys, values = here.cache.layers[0].kv.view(12)
            for which, read in enumerate((keys, values)):
                assert torch.equal(read, pools[0][[int(name) for name in wanted], :, which, :12])
                assert (read.untyped_storage().data_ptr() == pools[0].untyped_storage().data_ptr()) == together
            model(torch.tensor([[5]] * len(wanted)), past_key_values=here.cache)


def copied(*told):
    raise AssertionError("keys or values were copied out of the pages")


def test_rows_move_in_the_midst_of_a_prompt_with_their_pages():
    pool, table_BN = torch.zeros(4, 1, 2, 4, 8), torch.tensor([[1], [2], [3]])
    keys, values = torch.rand(3, 1, 4, 8), torch.rand(3, 1, 4, 8)
    rows = torch.tensor([2, 0])
    slots = first_prompt(keys, values, pool, table_BN).map_rows(lambda tensor: tensor[rows], 3, 1).close_columns(4)
    assert slots.table_BN.tolist() == [[3], [1]] and slots.shape == (2, 1, 4, 8)
    assert torch.equal(slots.keys, keys[rows]) and torch.equal(slots.values, values[rows])
    assert torch.equal(pool[3, :, 0], keys[2]) and not pool[2].any()
    all_rows = first_prompt(keys, values, pool, table_BN).close_columns(4)
    assert torch.equal(all_rows.keys, keys)
    moved = all_rows.map_rows(lambda tensor: tensor[1:], 3, 1)  # where the pages of all rows lie is not looked up for fewer
    assert moved.shape == (2, 1, 4, 8) and torch.equal(moved.keys, keys[1:])
