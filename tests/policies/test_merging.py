"""Changed values of kept tokens: gradients, rounded entries, options; the oracle has the values."""

from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch.policies import Merge, Refit
from kvpatch.policies.merging import Kept
from tests.helpers.tiny import make, prompt

NUMBERS = torch.Generator().manual_seed(0)
KEPT = Kept(
    torch.tensor([[[0, 3, 4, 8], [1, 2, 6, 6]]]),
    torch.tensor([[[True] * 4, [True] * 3 + [False]]]),
    torch.arange(9).expand(1, 2, 9) != 7,
)


class Layer:
    """A layer of nine tokens, which five queries ask; the last is padding."""

    def __init__(self) -> None:
        self.asked = SimpleNamespace(
            q_BHGWD=torch.randn(1, 2, 2, 5, 4, generator=NUMBERS, dtype=torch.float64),
            positions_BW=torch.tensor([[9, 10, 11, 12, -1]]),
        )
        self.notes = {"asked": self.asked}

    def weigh(self, q, k, positions, kept):
        x = torch.einsum("bhgwd,bhtd->bhgwt", q, k)
        own = x.masked_fill(~kept[:, :, None, None], -torch.inf)
        real = (positions >= 0)[:, None, None, :, None]
        return x.softmax(-1) * real, own.softmax(-1) * real


def entries():
    return (torch.randn(1, 2, 9, 4, generator=NUMBERS, dtype=torch.float64, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize("merging", [Merge(), Refit(), Refit(ridge=0.01)], ids=str)
def test_gradients_are_those_of_the_formula(merging):
    layer = Layer()
    assert torch.autograd.gradcheck(lambda k, v: merging.values(k, v, KEPT, layer)[KEPT.real_BHK], tuple(entries()))


def test_a_refit_without_ridge_gives_what_attention_gave_where_it_can():
    """Four values a head and eight queries: the least squares' residual has no part that the kept values could give."""
    layer, (k, v) = Layer(), entries()
    values = Refit(ridge=1e-7).values(k, v, KEPT, layer)
    everything, own = layer.weigh(layer.asked.q_BHGWD, k, layer.asked.positions_BW, KEPT.stays_BHT)
    x = own.gather(-1, KEPT.index_BHK[:, :, None, None].expand(1, 2, 2, 5, 4)) * KEPT.real_BHK[:, :, None, None]
    left = x @ values[:, :, None] - everything @ v[:, :, None]
    before = x @ KEPT.gather(v)[:, :, None] - everything @ v[:, :, None]
    assert (x.mT @ left).sum(2).abs().max() < 1e-5 < 1e-2 < (x.mT @ before).sum(2).abs().max()


@pytest.mark.parametrize("what", ["nothing is evicted", "nothing was read again", "no number"])
def test_values_that_stay(what):
    layer, kept, (k, v) = Layer(), KEPT, entries()
    if what == "nothing is evicted":
        every = torch.arange(9).expand(1, 2, 9)
        kept = Kept(every, every >= 0, every != 7)
    elif what == "nothing was read again":
        layer.notes = {}
    else:
        layer.asked.q_BHGWD[0, 0, 0, 0] = torch.nan
    values = Refit().values(k, v, kept, layer)
    heads = slice(0, 1) if what == "no number" else slice(None)
    assert torch.equal(values[:, heads], kept.gather(v)[:, heads])
    assert what != "no number" or not torch.equal(values[:, 1], kept.gather(v)[:, 1])


@pytest.mark.parametrize("given", [0, -0.1, True, "0.5", None, float("nan"), float("inf")])
def test_what_is_no_ridge(given):
    with pytest.raises(kvpatch.KVPatchError, match=r"ridge=.* must be a number above 0"):
        kvpatch.refit("h2o", ridge=given)


def test_a_policy_changes_values_in_one_way():
    with pytest.raises(kvpatch.KVPatchError, match="changes values by Merge already"):
        kvpatch.refit("merged(h2o)")
    assert kvpatch.refit("refit(h2o)", ridge=2).merging.ridge == 2


@pytest.mark.parametrize("policy", ["refit(kvzip)", "refit(snapkv)"])
def test_nothing_of_a_refit_stays_but_the_values(policy):
    """Neither queries nor another dtype; below the budget all is as unpatched."""
    model, ids = make("llama_gqa"), prompt(1, 40)
    with torch.no_grad(), kvpatch.patched(model, policy, 12, queries=8):
        cache = model(ids).past_key_values
        assert all(layer.notes == {} for layer in cache.layers)
    base = policy[6:-1]
    with torch.no_grad(), kvpatch.patched(model, base, 12):
        plain = model(ids).past_key_values
    assert cache.nbytes == plain.nbytes
    for mine, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(mine.positions, other.positions)
        (k, v), (k0, v0) = (layer.kv.numbers(layer.used) for layer in (mine, other))
        assert torch.equal(k, k0) and v.dtype == v0.dtype and not torch.allclose(v, v0)
    want = model(ids).logits
    with torch.no_grad(), kvpatch.patched(model, policy, 1.0):
        assert torch.equal(model(ids).logits, want)


def test_what_is_rounded_is_the_merged_value():
    """A pass that computes gradients attends to the same numbers as one that does not."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(2, 40)
    with kvpatch.patched(model, "merged(h2o)", 12, block=9, bits=8):
        with torch.no_grad():
            want = model(ids).logits
        torch.testing.assert_close(model(ids).logits, want)


@pytest.mark.parametrize("given", [-0.1, 1.5, 2, True, "0.5", None, float("nan")])
def test_what_is_no_cosine(given):
    with pytest.raises(kvpatch.KVPatchError, match=r"threshold=.* must be a cosine in \[0, 1\]"):
        kvpatch.merged("h2o", threshold=given).check()


@pytest.mark.parametrize("given", [0, 0.0, 0.5, 1, 1.0])
def test_what_is_a_cosine(given):
    assert kvpatch.merged("h2o", threshold=given).merging.threshold == given


def test_refitted_texts_are_kept_copied_and_asked_again(tmp_path):
    """A prefix, a file, a clone and a second turn all find the refitted values."""
    model, ids, question = make("llama_gqa"), prompt(1, 40), prompt(1, 6, seed=1)
    with torch.no_grad(), kvpatch.patched(model, "refit(kvzip)", 0.3, queries=16) as patch:
        cache = model(ids).past_key_values
        patch.save_cache(cache, tmp_path / "text")
        want = model(question, past_key_values=cache.clone()).logits
        assert torch.equal(model(question, past_key_values=patch.load_cache(tmp_path / "text")).logits, want)
        assert torch.equal(model(question, past_key_values=patch.prefix(ids)).logits, want)
    with torch.no_grad(), kvpatch.patched(model, "kvzip", 0.3):
        assert not torch.allclose(model(question, past_key_values=model(ids).past_key_values).logits, want)
