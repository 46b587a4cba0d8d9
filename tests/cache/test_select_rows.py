"""EvictingCache.select_rows: some rows of a batch as a cache of their own, without a copy of the others."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from tests.helpers.faults import contents, differences
from tests.helpers.tiny import force, left_pad, make, prompt, sound

pytestmark = pytest.mark.usefixtures("no_gradients")
CASES = [
    ("llama_gqa", "h2o", 0.5, {}), ("llama_gqa", "keyformer", 0.4, {}), ("llama_gqa", "roco", 8, {"block": 6}),
    ("llama_gqa", "tova", 26, {}), ("llama_gqa", "snapkv", 0.4, {"window": 3}), ("llama_gqa", "adakv", 0.4, {"window": 3}),
    ("llama_gqa", "critical(adaptive(h2o))", 0.4, {}), ("llama_gqa", "keyformer", 0.4, {"shared": True}),
    ("llama_gqa", "full", 1.0, {}), ("mistral_sliding", "h2o", 0.5, {}), ("gpt2", "h2o", 0.5, {}), ("mpt", "roco", 0.4, {}),
]  # fmt: skip


def steps(model, cache, fed):
    out = []
    for t in range(fed.shape[1]):
        out.append(model(fed[:, t : t + 1], past_key_values=cache).logits)
        sound(cache)
    return torch.cat(out, 1)


@pytest.mark.parametrize(("name", "policy", "k", "options"), CASES, ids=[f"{n}-{p}-{o}" for n, p, _, o in CASES])
def test_a_row_goes_on_as_it_would_alone(name, policy, k, options):
    model, ids, fed = make(name), prompt(3, 24), prompt(3, 10, seed=2)
    with kvpatch.patched(model, policy, k, **options):
        _, cache = force(model, ids, fed[:, :4])
        twin = cache.clone()
        rows = [2, 0]
        apart = cache.select_rows(rows)
        sound(apart)
        assert not differences(contents(cache), contents(twin)), "the cache itself is as it was"
        got, others = steps(model, apart, fed[rows, 4:]), steps(model, cache, fed[:, 4:])
        assert torch.equal(others, steps(model, twin, fed[:, 4:])), "and goes on so"
        for place, row in enumerate(rows):
            alone, one = force(model, ids[row : row + 1], fed[row : row + 1])
            torch.testing.assert_close(got[place], alone[0, 5:], atol=3e-5, rtol=0)
            for layer in range(2):
                held = (sorted(p for p in head if p >= 0) for head in apart.positions(layer)[place].tolist())
                assert list(held) == [sorted(p for p in head if p >= 0) for head in one.positions(layer)[0].tolist()]


def test_the_longest_row_stays_behind():
    """Of a padded batch, of a joined cache, and after that of a row that leaves again."""
    model, ids, fed = make("llama_gqa"), prompt(2, 36), prompt(2, 8, seed=2)
    with kvpatch.patched(model, "h2o", 0.4):
        _, padded = force(model, ids, fed[:, :2], left_pad(ids, [36, 12]))
        _, long = force(model, ids[:1], fed[:1, :2])
        _, short = force(model, ids[1:, 24:], fed[1:, :2])
        alone, one = force(model, ids[1:, 24:], fed[1:])
        for whole in (padded, EvictingCache.concatenate([long, short])):
            apart = whole.select_rows(1)
            assert apart.nbytes <= short.nbytes * 1.3 < whole.nbytes / 2
            joined = EvictingCache.concatenate([apart])
            got = torch.cat([model(fed[1:, t : t + 1], past_key_values=joined).logits for t in range(2, 8)], 1)
            torch.testing.assert_close(got[0], alone[0, 3:], atol=3e-5, rtol=0)
            assert joined.held(0).tolist() == one.held(0).tolist()


@pytest.mark.parametrize(
    ("policy", "k", "options"),
    [
        ("h2o", kvpatch.Mass(0.9), {"recent": 2}),
        ("h2o", kvpatch.Threshold(1.0), {"recent": 2}),
        ("adaptive(h2o)", 20, {"every": 8}),
        ("h2o", 60, {}),
    ],
)
def test_slots_that_another_row_of_the_same_length_needed_go_with_it(policy, k, options):
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k, **options) as patch:
        for seed in range(3):
            cache = patch.new_cache()
            model(prompt(2, 50 if k == 60 else 60 + 40 * (seed % 2), seed=seed), past_key_values=cache)
            if k == 60:
                cache.forget([(2, 14)], row=0)
            for row in range(2):
                sound(cache.select_rows(row))


@pytest.mark.parametrize("every", [1, 3])
def test_the_row_with_the_most_steps_to_its_budget_leaves(every, tmp_path):
    """The steps until all heads evict were those of a row that is gone: such a cache contradicts itself, also in a file."""
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 9, seed=2)
    mask = left_pad(ids, [40, 6])
    with kvpatch.patched(model, "tova", 0.5, schedule="decode", every=every) as patch:
        _, cache = force(model, ids, fed[:, :2], mask)
        apart = cache.select_rows(1)
        apart.check_invariants()
        assert 0 < apart.layers[0].mode.steps_until_full < cache.layers[0].mode.steps_until_full
        cache.batch_select_indices(torch.tensor([1]))
        cache.check_invariants()
        patch.save_cache(cache, tmp_path / "cache")
        alone, one = force(model, ids[1:, 34:], fed[1:])
        for left in (cache, apart, patch.load_cache(tmp_path / "cache")):
            mask_1T = torch.cat([mask[1:], torch.ones(1, 2, dtype=torch.long)], 1)
            for t in range(2, 9):
                mask_1T = torch.cat([mask_1T, torch.ones(1, 1, dtype=torch.long)], 1)
                at = mask_1T.sum(1, keepdim=True) - 1
                got = model(fed[1:, t : t + 1], attention_mask=mask_1T, position_ids=at, past_key_values=left).logits
                sound(left)
                torch.testing.assert_close(got[0, 0], alone[0, t + 1], atol=3e-5, rtol=0)
            assert left.held(0).tolist() == one.held(0).tolist()


class OnAnotherDevice(TorchFunctionMode):
    """Indices that no tensor takes before they are moved to where it lies."""

    def __init__(self, indices):
        self.indices = indices

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to and args[0] is self.indices:
            return args[0].clone()
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and any(one is self.indices for one in args[1]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
        return func(*args, **kwargs)


@pytest.mark.parametrize("method", ["select_rows", "batch_select_indices"])
def test_indices_are_moved_to_each_layer(method):
    """A layer may lie on another GPU; of the rows' adapters and of a prompt in pieces the host has numbers, too."""
    model, indices = make("llama_gqa"), torch.tensor([2, 0])
    with kvpatch.patched(model, "h2o", 0.5):
        cache = model(prompt(3, 20)).past_key_values
        want = cache.positions(0)[indices]
        with OnAnotherDevice(indices):
            got = getattr(cache, method)(indices) or cache
        assert torch.equal(got.positions(0), want)


def test_the_others_are_not_copied(monkeypatch):
    model, ids = make("llama_gqa"), prompt(8, 60)
    with kvpatch.patched(model, "h2o", 0.5):
        cache = model(ids).past_key_values
        copied, deepcopy = [], torch.Tensor.__deepcopy__
        monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda self, memo: copied.append(self.nbytes) or deepcopy(self, memo))
        apart = cache.select_rows(torch.tensor([3]))
    assert sum(copied) < cache.layers[0].kv.keys[0].nbytes, "less than one row's keys"
    assert apart.nbytes == cache.nbytes // 8
    for mine, theirs in zip(apart.layers, cache.layers, strict=True):
        for one, other in ((mine.kv.keys, theirs.kv.keys), (mine.positions, theirs.positions)):
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        assert mine.limits is apart.layers[0].limits, "so that layers can be stacked"


@pytest.mark.parametrize(("rows", "words"), [
    ([], r"rows=\[\] is a list: give"), ([3], r"names row 3.*rows 0 to 1"), ([0.5], r"rows has dtype torch\.float32"),
    (["a"], r"rows=\['a'\] is a list: give"), ([[0], [0, 1]], "is a list: give"), ([2**70], "is a list: give"),
    (torch.tensor([False, False]), r"select_rows would leave no row"), ("0", r"rows='0' is a str: give"),
    (torch.tensor([True]), r"mask of 1 rows, but the cache has 2"),
])  # fmt: skip
def test_what_are_no_rows(rows, words):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = model(prompt(2, 20)).past_key_values
        before = contents(cache)
        with pytest.raises(KVPatchError, match=words):
            cache.select_rows(rows)
        assert not differences(contents(cache), before)
        with pytest.raises(KVPatchError, match=r"The cache is empty"):
            patch.new_cache().select_rows([0])
        assert cache.select_rows(torch.tensor([False, True])).held(0).tolist() == cache.held(0)[1:].tolist()
