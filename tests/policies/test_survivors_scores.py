"""Small laws of options, scores and scopes, written down because the code could be changed without them (mutation testing)."""

import inspect
import itertools
import math

import pytest
import torch

from kvpatch import KVPatchError
from kvpatch.policies import POLICIES, Policy, scores
from kvpatch.policies.allocation import Adaptive, Pyramid
from kvpatch.policies.budgets import Budget
from kvpatch.policies.context import Limits, Moment
from kvpatch.policies.scopes import DeviationScope, Scope, protect_tensor
from kvpatch.policies.selection import TwoStage
from tests.policies.test_survivors import drawn, small_moment

# ---- options, of every part ----

NOT_NUMBERS = [True, "0.5", None, math.nan]
OPTIONS = [  # part, option, what is refused, what is just allowed
    (Adaptive, "floor", [*NOT_NUMBERS, -0.01, 1.01, 2], [0, 1, 0.0, 1.0, 0.5]),
    (Pyramid, "beta", [*NOT_NUMBERS, 0, 0.99, math.inf, -1], [1, 1.0, 20, 1e9]),
    (TwoStage, "alpha", [*NOT_NUMBERS, -0.01, 1.01, 2], [0, 1, 0.5]),
    (TwoStage, "eps", [*NOT_NUMBERS, -0.01, 1.01, 2], [0, 1, 1e-9]),
    (TwoStage, "norm", [True, 0, 3, "1", None], [1, 2]),
    (scores.DilatedRecency, "dilation", [-1, 1.0, "1", None], [0, 1, 50]),
    (scores.Last, "heads", ["all", None, 1], ["layer", "each"]),
    (scores.ObservationWindow, "window", [0, -1, 1.0, "3", None], [1, 2, 1000]),
    (scores.ObservationWindow, "kernel", [0, -1, 2, 6, 3.0, "3", None], [1, 3, 7]),
    (scores.ObservationWindow, "pooling", ["min", "", 1, False], ["max", "avg", None]),
    (scores.GumbelSoftmax, "noise", ["uniform", None, ""], ["gumbel", "gaussian", "constant", "none"]),
    (scores.GumbelSoftmax, "tau", [(1.0,), (0.0, 1.0), (1.0, -1.0), 1.0, (1.0, 2.0, 3.0), None], [(1, 2), [0.5, 0.5]]),
    (scores.GumbelSoftmax, "generation_length", [0, -1, 1.5, "9", None], [1, 9]),
    (scores.GumbelSoftmax, "damping", [-0.01, 1.01, math.nan], [0.0, 1.0, 0.5]),
    (Scope, "sinks", [-1, 1.0, "4", None, True], [0, 1, 100]),
    (Scope, "recent", [*NOT_NUMBERS, -1, -0.1, 1.01], [0, 1, 0.0, 1.0, 100]),
    (Scope, "turns", ["every", None, 1], ["all", "each", "first"]),
    (Scope, "protect", ["x", 1.5, [[1], [1, 2]], torch.zeros(2), torch.zeros(1, 1, 1).bool(), torch.zeros(2, 2).long()],
     [[True, False], [[True], [False]], [3, 4], 5, torch.tensor([1], dtype=torch.int32)]),
    (DeviationScope, "protected", [*NOT_NUMBERS, -1, -0.1, 1.01], [0, 1, 0.0, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("part", "option", "refused", "allowed"), OPTIONS, ids=[f"{p.__name__}-{o}" for p, o, _, _ in OPTIONS])
def test_options(part, option, refused, allowed):
    for value in allowed:
        part(**{option: value}).check()
    for value in refused:
        with pytest.raises(KVPatchError, match=f"^{option}="):
            part(**{option: value}).check()


def test_a_share_above_one_is_told_as_tokens():
    with pytest.raises(KVPatchError, match=r"recent=12\.5 is more than the whole budget; write 12 for 12 tokens"):
        Scope(recent=12.5).check()


@pytest.mark.parametrize("part", ["score", "over_layers", "over_heads", "selection"])
def test_parts_that_may_be_missing(part):
    Policy("mine", **{"score": scores.Recency(), part: None})


def test_a_policy_has_a_scope():
    with pytest.raises(KVPatchError, match="scope"):
        Policy("mine", scores.Recency(), scope=None)


PARTS = {part for part, *_ in OPTIONS} | {Budget, Policy, scores.Score, *scores.Score.__subclasses__()}


@pytest.mark.parametrize("part", sorted(PARTS, key=str))
def test_a_policy_is_data(part):
    """Frozen and comparable: two policies with the same parts are one, and nobody changes one in use."""
    assert part.__dataclass_params__.frozen
    assert part.__dataclass_params__.eq


def test_protected_tokens_as_a_tensor():
    assert protect_tensor([True, False]).dtype == torch.bool
    assert protect_tensor([[True], [False]]).shape == (2, 1)
    assert protect_tensor([0, 3]).tolist() == [0, 3]
    ids = protect_tensor(torch.tensor(5, dtype=torch.int32))
    assert (ids.dtype, ids.tolist()) == (torch.int64, [5])


# ---- what each score is, of a moment ----


def test_temperatures_move_linearly_and_stop():
    score = scores.GumbelSoftmax(tau=(1.0, 3.0), generation_length=8)
    assert [score.temperature(step, None) for step in (0, 2, 8, 20)] == [1.0, 1.5, 3.0, 3.0]
    assert [score.temperature(step, 4) for step in (0, 1, 4, 9)] == [1.0, 1.5, 3.0, 3.0]
    steps, span = torch.tensor([0.0, 1.0, 4.0, 9.0]), torch.tensor(4.0)
    assert score.temperature(steps, span).tolist() == [1.0, 1.5, 3.0, 3.0]
    assert scores.GumbelSoftmax(tau=(2.0, 2.0)).temperature(steps, span) == 2.0
    assert scores.Score().temperature(5, 9) == 1.0
    assert scores.Score().decay == 1.0


def test_declarations():
    """What a score says of itself decides what is computed for it; all of it, in one table."""
    said = {
        name: (one.rows, one.statistics, one.protects_tail, one.signed, one.is_weight, one.stored, one.fresh, one.tail)
        for name, one in ((n, p.score) for n, p in POLICIES.items()) if one is not None
    }  # fmt: skip
    assert said["random"] == ("none", (), False, False, True, None, False, 0)
    assert said["window"] == said["streaming_llm"] == ("none", (), False, False, False, "recency", False, 0)
    assert said["dilated_window"] == ("none", (), False, True, False, None, False, 0)
    assert said["key_attention"] == said["h2o"] == ("all", ("sum",), False, False, True, "sum", False, 0)
    assert said["scissorhands"] == ("all", ("count",), False, False, True, "count", False, 0)
    assert said["tova"] == ("tail", (), False, False, True, None, False, 1)
    assert said["roco"] == ("all", ("sum",), False, False, True, "mean", False, 0)
    assert said["keyformer"] == ("all", ("gumbel",), False, False, True, "gumbel", False, 0)
    assert said["snapkv"] == said["adakv"] == ("tail", (), True, False, True, None, False, 32)
    assert said["key_norm"] == ("none", (), False, True, False, None, False, 0)
    assert scores.Last(heads="each").stored == "tail"
    for kind, resample in itertools.product(("gumbel", "gaussian", "constant", "none"), (False, True)):
        assert scores.GumbelSoftmax(noise=kind, resample=resample).fresh == (resample and kind in ("gumbel", "gaussian"))
    assert [p.schedule for p in POLICIES.values() if p.score and p.score.protects_tail] == ["prompt"] * 6
    assert [name for name, p in POLICIES.items() if p.score and p.score.entry_by_position] == ["keyformer"]
    entries = {scores.Score.entry, scores.GumbelSoftmax.entry, scores.KeyNorm.entry}
    assert [inspect.signature(entry).parameters["first"].default for entry in entries] == [0] * 3


def test_values():
    moment = small_moment(2, None)
    moment.state |= {name: torch.rand(1, 1, 4) for name in ("count", "gumbel", "key_norm")}
    moment.state["tail"] = torch.rand(1, 2, 4)
    assert torch.equal(scores.Accumulated().value(moment), moment.state["sum"])
    assert torch.equal(scores.AccumulatedQuantized().value(moment), moment.state["count"] / 2)
    assert torch.equal(scores.Mean().value(moment), moment.mean)
    assert torch.equal(scores.GumbelSoftmax().value(moment), moment.state["gumbel"])
    assert torch.equal(scores.KeyNorm().value(moment), -moment.state["key_norm"])
    assert torch.equal(scores.Last(heads="".join("each")).value(moment), moment.state["tail"])
    assert scores.Recency().value(moment).tolist() == [[[0.0, 3.0, 5.0, 9.0]]]
    # the lattice by recency, behind all others by recency
    ranked = scores.DilatedRecency().value(moment)[0, 0]
    assert ranked.argsort().tolist() == [1, 2, 3, 0]
    ranked = scores.DilatedRecency(dilation=2).value(moment)[0, 0]
    assert ranked.argsort().tolist() == [2, 0, 1, 3]


def test_noise_is_noted_where_it_is_drawn_once():
    keys, positions = torch.zeros(1, 2, 3, 4), torch.arange(3)[None]
    for kind, resample in itertools.product(("gumbel", "gaussian", "constant", "none"), (False, True)):
        noted = scores.GumbelSoftmax(noise=kind, resample=resample).entry(keys, positions, 2, 0, 0)
        assert list(noted) == [] if kind == "none" or (resample and kind != "constant") else ["noise"]
        assert all(one.shape == (1, 2, 3, 2) for one in noted.values())
    one, other = (scores.GumbelSoftmax(noise=name).entry(keys, positions, 2, 0, 0) for name in ("gumbel", "".join("gumbel")))
    assert torch.equal(one["noise"], other["noise"])


@pytest.mark.parametrize("pooling", ["max", "avg", None])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_pooling_over_neighbours(pooling, kernel):
    """In slots of any order, with empty ones: neighbours are those that are held, and the window's own tokens are none."""
    order = torch.tensor([4, 0, 6, 2, 7, 1, 5, 3])
    tail = torch.rand(1, 1, 8, generator=torch.Generator().manual_seed(3))
    places = torch.tensor([10, 11, 14, 15, 17, 20, 21, -1])  # the last two real ones are the window
    limits = Limits.of([(0, 0, 0, 0, 2, 0)], torch.device("cpu"))

    def value(empty):
        given = order if empty else torch.arange(7)
        moment = Moment(
            layer=0, seed=0, positions_BHS=places[given][None, None], newest_B11=torch.tensor([[[21]]]),
            recent_B11=torch.tensor([[[21]]]), state={"tail": tail[..., given]}, limits=limits, group=1, sliding=None,
            empty=empty,
        )  # fmt: skip
        return scores.ObservationWindow(window=2, kernel=kernel, pooling=pooling).value(moment)[0, 0], given

    want = []
    for i in range(5):
        near = [tail[0, 0, j].item() for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < 5]
        want.append({"max": max(near), "avg": sum(near) / kernel, None: tail[0, 0, i].item()}[pooling])
    for empty in (False, True):
        got, given = value(empty)
        for slot, i in enumerate(given.tolist()):
            if i < 5:
                assert got[slot].item() == pytest.approx(want[i], abs=1e-6)


def test_random_scores_belong_to_the_newest_token_and_the_head():
    moment = small_moment(1, None)
    moment.positions_BHS = moment.positions_BHS.expand(1, 3, 4)
    got = scores.Random().value(moment)
    want = [[drawn(0, 0, head, 9, key) for key in (0, 3, 5, 9)] for head in range(3)]
    torch.testing.assert_close(got[0].double(), torch.tensor(want, dtype=torch.float64), atol=1e-7, rtol=0)


# ---- what is protected ----


def _limits(scope, score=scores.Recency(), budget=10, n=30, own=(), fixed=0, rows=30):  # noqa: B008
    return scope.limits(budget, n, own, score, fixed, rows)


def test_limits_of_a_scope():
    """first, newest, prompt, deviation, tail, nominal; clamped inside the budget in that order."""
    window = scores.ObservationWindow(window=4)
    assert _limits(Scope()) == (0, 0, 0, 0, 0, 0)
    assert _limits(Scope(sinks=4, recent=3)) == (4, 3, 0, 0, 0, 7)
    assert _limits(Scope(sinks=4, recent=0.5)) == (4, 5, 0, 0, 0, 9)
    assert _limits(Scope(sinks=40, recent=5)) == (10, 0, 0, 0, 0, 10)
    assert _limits(Scope(sinks=4, recent=50)) == (4, 6, 0, 0, 0, 10)
    assert _limits(Scope(sinks=4), own=[2, 9, 20]) == (4, 0, 0, 0, 0, 6)
    assert _limits(Scope(sinks=9), own=[2, 9, 20]) == (8, 0, 0, 0, 0, 10)
    assert _limits(Scope(sinks=10), own=[20, 21]) == (8, 0, 0, 0, 0, 10)
    assert _limits(Scope(recent=3), window) == (0, 4, 0, 0, 4, 4)
    assert _limits(Scope(recent=6), window) == (0, 6, 0, 0, 4, 6)
    assert _limits(Scope(), window, budget=3) == (0, 3, 0, 0, 3, 3)
    assert _limits(Scope(), window, rows=2) == (0, 2, 0, 0, 2, 2)
    assert _limits(Scope(sinks=2), scores.Last(), rows=9) == (2, 0, 0, 0, 1, 2)
    # kept outside the budget: what lies below `fixed`
    assert _limits(Scope(sinks=4, recent=3), fixed=12) == (12, 3, 12, 0, 0, 3)
    assert _limits(Scope(sinks=20, recent=9), fixed=12) == (20, 2, 12, 0, 0, 10)
    assert _limits(Scope(sinks=40), fixed=30) == (30, 0, 30, 0, 0, 0)
    assert _limits(Scope(), own=[2, 9, 20], fixed=9) == (9, 0, 9, 0, 0, 2)
    roco = DeviationScope(recent=3, protected=0.5)
    assert _limits(roco) == (0, 3, 0, 5, 0, 8)
    assert _limits(DeviationScope(recent=8, protected=0.5)) == (0, 8, 0, 2, 0, 10)
    _limits(Scope(), own=list(range(10)))
    with pytest.raises(KVPatchError, match="marks 11 tokens of a prompt of 30, but the budget is 10: raise k to at least 11"):
        _limits(Scope(), own=list(range(11)))
