"""Caches whose heads follow the text, or have budgets of their own: long texts, and all that is done to a cache."""

import json

import pytest
import torch

import kvpatch
from kvpatch import Mass, Share, Threshold
from kvpatch.cache.modes import Moving
from kvpatch.policies import Policy, RangeScope
from kvpatch.policies.scores import Mean
from tests.helpers.running import kept, uneven
from tests.helpers.tiny import force, left_pad, make, prompt, sound

pytestmark = pytest.mark.usefixtures("no_gradients")
N = 40
BUDGETS = {
    "share": ("h2o", Share(0.4), {}),
    "mass": ("h2o", Mass(0.9), {"recent": 4}),
    "bounded mass": ("roco", Mass(0.9, floor=6, ceiling=0.7), {}),
    "threshold": ("tova", Threshold(0.02), {"recent": 4}),
    "table": ("h2o", [[6, 25], [1.0, 14]], {}),
}
every_budget = pytest.mark.parametrize("name", BUDGETS)


def patched(name, model):
    policy, k, options = BUDGETS[name]
    return kvpatch.patched(model, policy, k, **options)


@every_budget
def test_a_long_text(name):
    """Buffers follow the heads: check_invariants() bounds what stands empty after each step."""
    model, ids, fed = make("llama_gqa"), prompt(2, N), prompt(2, 90, seed=2)
    with patched(name, model) as patch:
        logits, cache = force(model, ids, fed, left_pad(ids, [N, 23]))
        report = patch.report()
    assert torch.isfinite(logits).all()
    assert isinstance(cache.layers[0].mode, Moving) == (name != "table")
    assert torch.equal(report.held(), torch.stack([cache.held(layer) for layer in range(2)]))
    if name == "share":
        assert cache.held(0).tolist() == [[52, 52], [45, 45]]  # of 130 and 113 tokens
    else:
        assert len(cache.held(0).unique()) > 1
    assert json.loads(json.dumps(report.to_dict()))["held"] == [layer.tolist() for layer in report.held()]
    assert str(BUDGETS[name][1]) in str(report) or name == "table"


def test_generate_with_beams():
    model, ids = make("llama_gqa"), prompt(2, N)
    for name in BUDGETS:
        with patched(name, model):
            out = model.generate(ids, max_new_tokens=12, num_beams=2, do_sample=False, pad_token_id=0)
        assert out.shape[1] > N


def test_no_room_is_taken_for_asked_for_after_a_file(tmp_path):
    """Slots of heads that have shrunk were taken for room=, of which forget() and concatenate() want none."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", Mass(0.9), recent=2) as patch:
        for seed in range(3):
            cache = patch.new_cache()
            model(prompt(2, 60 + 40 * seed, seed=seed), past_key_values=cache)
            for t in range(5 * seed):
                model(prompt(2, 1, seed=t), past_key_values=cache)
            patch.save_cache(cache, tmp_path / "cache")
            again = patch.load_cache(tmp_path / "cache")
            assert again.plans.static_room is None and kept(again) == kept(cache)
            again.forget([(3, 9)])
            sound(again)


def test_ragged_heads_grow_and_give_back():
    """Heads that differ much lie in segments of their own, whose slots are packed anew as they grow and shrink."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(2, 200), prompt(2, 60, seed=2)
    mask = left_pad(ids, [200, 40])
    for policy, k in (("key_attention", Mass(0.5)), ("roco", Threshold(0.003))):
        options = {"recent": 2, "protected": 0} if policy == "roco" else {}
        with kvpatch.patched(model, policy, k, **options):
            before = uneven(force(model, ids, fed[:, :1], mask)[1])
            held, slots = before.held(0), sum(before.layers[0].kv.capacities())
            _, cache = force(model, ids, fed, mask)
        assert not torch.equal(cache.held(0), held)
        assert sum(uneven(cache).layers[0].kv.capacities()) != slots


def test_a_head_never_loses_more_than_it_may():
    """The rows of a text give a mass of one each; so what a head holds is known from its sums alone."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, N), prompt(1, 60, seed=2)
    for share in (0.6, 0.9):
        with kvpatch.patched(model, "key_attention", Mass(share)):
            cache = force(model, ids, fed)[1]
        for layer in cache.layers:
            held = layer.state["sum"].masked_fill(layer.positions < 0, 0.0).sum(-1) / 2  # query heads of a group
            torch.testing.assert_close(held + layer.lost_BH1[..., 0] / 2, torch.full_like(held, float(N + 60)))
            assert (held >= share * (N + 60) - 1e-9).all()
            least = layer.state["sum"].masked_fill(layer.positions < 0, 1e9).amin(-1) / 2
            assert (held - least < share * (N + 60)).all()  # as few as that takes


REFUSED = [
    ("window", Mass(0.9), {}, "takes scores for weights, but the score of policy 'window' is none"),
    ("key_norm", Threshold(0.1), {}, "takes scores for weights"),
    ("random", Mass(0.9), {"schedule": "prompt"}, "takes scores for weights"),
    ("h2o", Mass(0.9), {}, "recent=0.5 is a share of the budget.*give tokens, such as recent=32, or add a ceiling"),
    ("roco", Threshold(0.1), {}, "protected=0.5 is a share of the budget.*give tokens, such as protected=32"),
    (
        Policy("wide", Mean(), RangeScope()),
        Threshold(0.1),
        {},
        "ranges=0.25 is a share of the budget.*tokens, such as ranges=32",
    ),
    ("tova", Mass(0.9), {}, "measured anew at each step: use schedule='prompt'"),
    ("adakv", Mass(0.9), {}, "divides one number of tokens over layers or heads"),
    ("pyramidkv", Threshold(0.1), {}, "divides one number of tokens over layers or heads"),
    ("critical_snapkv", Mass(0.9), {}, "selects by more than its score"),
    ("h2o", Share(0.5), {"every": 4}, "leave every=4 out"),
    ("h2o", Share(0.5), {"schedule": "decode"}, "schedule='decode' keeps the prompt whole: give schedule='both'"),
    ("h2o", [[4, 4, 4], [4, 4]], {}, r"k=\[4, 4, 4\]: a list of length 3 for a layer that has 2 KV heads"),
    ("h2o", [[4, 4]], {}, "k has 1 entries, but the model has 2 layers"),
    ("h2o", [[4, "2GiB"], [4, 4]], {}, r"k\[0\]\[1\]='2GiB' is a size in bytes"),
    ("h2o", [[4, 0], [4, 4]], {}, r"k\[0\]\[1\]=0 tokens keeps nothing"),
    ("h2o", [[], [4, 4]], {}, r"k\[0\] is empty: give k\[layer\]\[head\]"),
    ("adakv", [[4, 4], [4, 4]], {}, "divides a budget over the heads itself"),
    ("pyramidkv", [[4, 4], [4, 4]], {}, "k is a list, but policy 'pyramidkv' divides one budget over the layers"),
    ("h2o", [[4, 4], [4, 4]], {"every": 5}, "every=5 evicts more tokens at once than the budget of 4 keeps"),
]


@pytest.mark.parametrize(
    ("policy", "k", "options", "message"), REFUSED, ids=[f"{getattr(p, 'name', p)}-{k}-{o}" for p, k, o, _ in REFUSED]
)
def test_refused(policy, k, options, message):
    model = make("llama_gqa")
    with pytest.raises(kvpatch.KVPatchError, match=message):
        kvpatch.patch(model, policy, k, **options)


@pytest.mark.parametrize("make_it", [
    lambda: Mass(0.0), lambda: Mass(-0.5), lambda: Share(-0.5), lambda: Share(True), lambda: Share("0.5"),
    lambda: Mass(1.5), lambda: Mass("0.9"), lambda: Mass(True), lambda: Mass(float("nan")),
    lambda: Mass(0.9, floor=0), lambda: Mass(0.9, floor=None), lambda: Mass(0.9, ceiling="1GiB"),
    lambda: Mass(0.9, floor=9, ceiling=8), lambda: Share(0), lambda: Share(1.01), lambda: Share(0.5, of="text"),
    lambda: Threshold(-0.1), lambda: Threshold(float("inf")), lambda: Threshold("1"), lambda: Threshold(True),
])  # fmt: skip
def test_numbers_out_of_range(make_it):
    with pytest.raises(kvpatch.KVPatchError, match=r"^(Mass|Share|Threshold)\(.*(give|exchange|is not a share|keeps nothing)"):
        make_it()


@pytest.mark.parametrize("k", [Mass(1.0), Share(1.0), [[1.0, 1.0], [1.0, 1.0]]], ids=str)
def test_all_of_it_never_evicts(k):
    model, ids, fed = make("llama_gqa"), prompt(2, 20), prompt(2, 6, seed=2)
    want = force(model, ids, fed)[0]
    with kvpatch.patched(model, "key_attention", k):
        logits, cache = force(model, ids, fed)
    torch.testing.assert_close(logits, want)
    assert cache.held(0).tolist() == [[26, 26]] * 2


def test_tables_of_numpy_and_torch():
    model, table = make("llama_gqa"), torch.tensor([[4, 9], [7, 5]])
    for k in (table, table.numpy(), table.tolist(), [table[0], (7, 5)]):
        with kvpatch.patched(model, "h2o", k) as patch:
            cache = force(model, prompt(1, 30), prompt(1, 2))[1]
            assert "layer by layer: [4 tokens, 9 tokens], [7 tokens, 5 tokens]" in str(patch.report())
        assert [cache.held(layer).tolist() for layer in range(2)] == [[[4, 9]], [[7, 5]]]


def test_the_fewest_tokens_that_a_head_may_keep():
    assert [Share(0.05).tokens(n) for n in (1, 10, 60)] == [1, 1, 3]
    assert [Threshold(0.1).least(n) for n in (1, 2, 9)] == [1, 1, 1]
    assert [Mass(0.9).least(n) for n in (1, 9)] == [1, 1]
    assert [Mass(0.9, floor=0.5).least(n) for n in (1, 9)] == [1, 4]
    assert Mass(0.9, floor=6, ceiling=0.5).least(8) == 4
