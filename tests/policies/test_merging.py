"""Changed values of kept tokens: gradients, rounded entries, options; the oracle has the values."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch.policies import Merge, Refit, refitting
from kvpatch.policies.merging import Kept
from tests.helpers.counting import Largest
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

    def attend_to_slots(self, q, k, v, positions, index, kept):
        x = torch.einsum("bhgwd,bhtd->bhgwt", q, k)
        real = (positions >= 0)[:, None, None]
        x_kept = x.take_along_dim(index[:, :, None, None], -1).masked_fill(~kept[:, :, None, None], -torch.inf)
        lse = x_kept.logsumexp(-1).masked_fill(~real, torch.inf)
        return x.softmax(-1) @ v[:, :, None] * real[..., None], lse

    def weigh_slots(self, q, k, positions, index, lse):
        return (torch.einsum("bhgwd,bhtd->bhgwt", q, k) - lse[..., None]).exp()


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
    q, positions = layer.asked.q_BHGWD, layer.asked.positions_BW
    outputs, lse = layer.attend_to_slots(q, k, v, positions, KEPT.index_BHK, KEPT.real_BHK)
    x = layer.weigh_slots(q, KEPT.gather(k), positions, KEPT.index_BHK, lse) * KEPT.real_BHK[:, :, None, None]
    left = x @ values[:, :, None] - outputs
    before = x @ KEPT.gather(v)[:, :, None] - outputs
    assert (x.mT @ left).sum(2).abs().max() < 1e-5 < 1e-2 < (x.mT @ before).sum(2).abs().max()


@pytest.mark.parametrize("what", ["nothing is evicted", "nothing was read again", "no query sees a kept token"])
def test_values_that_stay(what):
    layer, kept, (k, v) = Layer(), KEPT, entries()
    if what == "nothing is evicted":
        every = torch.arange(9).expand(1, 2, 9)
        kept = Kept(every, every >= 0, every != 7)
    elif what == "nothing was read again":
        layer.notes = {}
    else:
        layer.asked.positions_BW = torch.full((1, 5), -1)
    assert torch.equal(Refit().values(k, v, kept, layer), kept.gather(v))


def test_tokens_of_equal_keys_change_alike():
    """X has equal columns there: the ridge shares out what they lack."""
    layer, (k, v) = Layer(), entries()
    k = torch.stack([*k.unbind(2)[:3], k[:, :, 4], *k.unbind(2)[4:]], 2)  # token 3 as token 4
    change = Refit(ridge=1e-6).values(k, v, KEPT, layer) - KEPT.gather(v)
    assert change.isfinite().all()
    torch.testing.assert_close(change[:, 0, 1], change[:, 0, 2])


def test_of_some_kept_tokens_at_a_time(monkeypatch):
    """The same values to rounding whatever the blocks, of queries and of kept tokens."""
    layer, (k, v) = Layer(), entries()
    want = Refit().values(k, v, KEPT, layer)
    for size in (1, 45, 80, 170):  # 1 query and 1 token; 1 and 2; 2 and 4; 4 and 8
        monkeypatch.setattr(refitting, "_CPU_BLOCK", size)
        torch.testing.assert_close(Refit().values(k, v, KEPT, layer), want)


@pytest.mark.parametrize("kept", [20, 200])
def test_a_fit_holds_blocks_however_many_tokens_a_head_keeps(kept, monkeypatch):
    """No tensor is larger than a block, the entries, or a matrix of the queries' size: queries x kept tokens is."""
    model, ids, made, block = make("llama_gqa"), prompt(1, 240), Largest(), 1 << 12
    (T, D), H, G, N = (240, 8), 2, 2, 2 * 40
    own = Refit.values

    def values(*given):
        with made:
            return own(*given)

    monkeypatch.setattr(refitting, "_CPU_BLOCK", block)
    monkeypatch.setattr(Refit, "values", values)
    with torch.no_grad(), kvpatch.patched(model, "refit(snapkv)", kept, queries=40):
        cache = model(ids).past_key_values
    assert cache.layers[0].kv.sizes == (D, D)
    assert N * N < made.numel <= max(block, H * T * D, H * G * T, H * N * N) < H * N * 200


@dataclass(frozen=True)
class Unsound(Refit):
    """Finds no finite values in the second head."""

    def values(self, k_BHTD, v_BHTD, kept, layer):
        values = super().values(k_BHTD, v_BHTD, kept, layer)
        values[:, 1, 0] = torch.nan
        return values


def test_a_head_without_finite_values_keeps_its_own_and_is_counted(tmp_path):
    model, ids, held = make("llama_gqa"), prompt(2, 40), {}
    refit = kvpatch.refit("snapkv")
    for name, policy in (("base", "snapkv"), ("refit", refit), ("unsound", replace(refit, merging=Unsound()))):
        with torch.no_grad(), kvpatch.patched(model, policy, 12) as patch:
            cache = model(ids).past_key_values
            held[name] = [layer.kv.numbers(layer.columns_used)[1] for layer in cache.layers]
            patch.save_cache(cache, tmp_path / name)
            report, loaded = patch.report(), kvpatch.Report.of(patch.load_cache(tmp_path / name))
    for base, fit, unsound in zip(*held.values(), strict=True):
        assert torch.equal(unsound[:, 0], fit[:, 0]) and torch.equal(unsound[:, 1], base[:, 1])
        assert not torch.equal(unsound[:, 0], base[:, 0])
    assert report.unfitted == report.to_dict()["unfitted"] == 2 * 2  # rows, layers
    assert "left as they were in 4 heads" in str(report)
    assert kvpatch.Report.of(cache.clone()).unfitted == loaded.unfitted == 4


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
        assert all(layer.need_notes == {} for layer in cache.layers)
    base = policy[6:-1]
    with torch.no_grad(), kvpatch.patched(model, base, 12):
        plain = model(ids).past_key_values
    assert cache.nbytes == plain.nbytes
    for mine, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(mine.positions, other.positions)
        (k, v), (k0, v0) = (layer.kv.numbers(layer.columns_used) for layer in (mine, other))
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
