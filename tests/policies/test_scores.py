"""Scores: the values of each in a context, and what each says of itself."""

import itertools
from dataclasses import dataclass

import pytest
import torch

import kvpatch
from kvpatch.attention import compress
from kvpatch.backends import torch_backend
from kvpatch.policies import POLICIES, DeviationScope, Policy, RangeScope, Score, content, scores
from kvpatch.policies.context import EvictionContext, Limits, NewTokens
from kvpatch.policies.needs import (
    Calibrated,
    ChunkAttention,
    LastQueries,
    LastUses,
    NoisySums,
    QueryMoments,
    SecondReading,
    WindowAttention,
)
from tests.helpers.contexts import small_context
from tests.helpers.running import kept, run
from tests.helpers.tiny import left_pad, make, prompt
from tests.policies.test_noise import drawn


def test_declarations():
    """Declarations decide what is computed for a score; all of them in one table."""
    said = {
        name: (
            one.needs.rows, one.needs.statistics, one.needs.protects, one.score.signed, one.score.is_weight,
            one.score.kernel_source, one.needs.fresh,
            max((need.width for need in one.needs if isinstance(need, WindowAttention)), default=0),
        )
        for name, one in POLICIES.items()
    }  # fmt: skip
    assert said["random"] == ("none", (), 0, False, False, None, False, 0)
    assert said["window"] == said["streaming_llm"] == ("none", (), 0, False, False, "recency", False, 0)
    assert said["dilated_window"] == ("none", (), 0, True, False, None, False, 0)
    assert said["key_attention"] == said["h2o"] == ("all", ("sum",), 0, False, True, "sum", False, 0)
    assert said["scissorhands"] == ("all", ("count",), 0, False, True, "count", False, 0)
    assert said["tova"] == ("window", (), 0, False, True, None, False, 1)
    assert said["roco"] == ("all", ("sum", "squares"), 0, False, True, "mean", False, 0)
    assert said["keyformer"] == ("all", ("gumbel",), 0, False, True, "gumbel", False, 0)
    assert said["snapkv"] == said["adakv"] == ("window", (), 32, False, True, None, False, 32)
    assert said["key_norm"] == said["key_diff"] == ("none", (), 0, True, False, None, False, 0)
    assert said["cur"] == ("none", (), 0, False, True, None, False, 0)
    assert said["lag_kv"] == ("none", (), 0, False, False, None, False, 0)
    assert said["expected_attention"] == said["leverage"] == ("none", (), 0, False, True, None, False, 0)
    assert said["raas"] == ("window", (), 0, False, False, None, False, 1)

    def which(asked):
        return [name for name, policy in POLICIES.items() if asked(policy)]

    assert which(lambda p: p.needs.alone) == [
        "key_diff", "lag_kv", "leverage", "compactor", "expected_attention", "r_kv", "tri_attention", "vase",
    ]  # fmt: skip
    assert which(lambda p: p.needs.find(QueryMoments)) == ["expected_attention"]
    assert which(lambda p: p.needs.lookahead is not None) == ["leverage", "compactor", "expected_attention"]
    assert which(lambda p: p.needs.find(ChunkAttention)) == ["compactor"]
    assert which(lambda p: p.needs.find(Calibrated)) == ["q_filter", "duo", "learned", "tri_attention"]
    assert which(lambda p: p.needs.find(LastUses)) == ["raas", "lazy"]
    assert which(lambda p: p.needs.find(LastQueries)) == ["r_kv", "vase"]
    assert which(lambda p: p.needs.find(SecondReading)) == ["kvzip", "kvzip_plus"]
    assert which(lambda p: p.entry_by_position) == ["keyformer", "raas", "lazy"]
    assert which(lambda p: p.stores) == [
        "keyformer", "key_norm", "cur", "compactor", "q_filter", "learned", "raas", "lazy", "kvzip", "kvzip_plus",
    ]  # fmt: skip
    assert [POLICIES[name].needs.protects for name in ("r_kv", "vase")] == [8, 64]
    assert scores.Last(heads="each").kernel_source == "observed"
    for kind, resample in itertools.product(("gumbel", "gaussian", "constant", "none"), (False, True)):
        drawn_anew = resample and kind in ("gumbel", "gaussian")
        assert POLICIES["keyformer"].with_options(noise=kind, resample=resample).needs.fresh == drawn_anew
    windows = which(lambda p: p.needs.protects and p.needs.find(WindowAttention))
    assert [POLICIES[name].schedule for name in windows] == ["prompt"] * 10
    folds = {name: need.join for name in windows if (need := POLICIES[name].needs.find(WindowAttention)).fold}
    assert folds == {"dropkv": "sum", "defensive_snapkv": "max", "layer_defensive": "max"}


def test_values():
    context = small_context(2, None)
    context.state |= {name: torch.rand(1, 1, 4) for name in ("count", "gumbel", "key_norm")}
    context.state["observed"] = torch.rand(1, 2, 4)
    assert torch.equal(scores.Accumulated().value(context), context.state["sum"])
    assert torch.equal(scores.AccumulatedQuantized().value(context), context.state["count"] / 2)
    assert torch.equal(scores.Mean().value(context), context.mean)
    assert torch.equal(scores.GumbelSoftmax().value(context), context.state["gumbel"])
    assert torch.equal(content.KeyNorm().value(context), -context.state["key_norm"])
    assert torch.equal(scores.Last(heads="".join("each")).value(context), context.state["observed"])
    assert scores.Recency().value(context).tolist() == [[[0.0, 3.0, 5.0, 9.0]]]
    # the lattice by recency, behind all others by recency
    ranked = scores.DilatedRecency().value(context)[0, 0]
    assert ranked.argsort().tolist() == [1, 2, 3, 0]
    ranked = scores.DilatedRecency(dilation=2).value(context)[0, 0]
    assert ranked.argsort().tolist() == [2, 0, 1, 3]


def test_temperatures_move_linearly_and_stop():
    score = NoisySums(tau=(1.0, 3.0), generation_length=8)
    assert [score.temperature(step, None) for step in (0, 2, 8, 20)] == [1.0, 1.5, 3.0, 3.0]
    assert [score.temperature(step, 4) for step in (0, 1, 4, 9)] == [1.0, 1.5, 3.0, 3.0]
    steps, span = torch.tensor([0.0, 1.0, 4.0, 9.0]), torch.tensor(4.0)
    assert score.temperature(steps, span).tolist() == [1.0, 1.5, 3.0, 3.0]
    assert NoisySums(tau=(2.0, 2.0)).temperature(steps, span) == 2.0
    assert POLICIES["h2o"].needs.temperature(5, 9) == POLICIES["window"].needs.temperature(5, 9) == 1.0
    assert POLICIES["keyformer"].needs.temperature(256, None) == 2.0


def test_noise_is_noted_where_it_is_drawn_once():
    keys, positions = torch.zeros(1, 2, 3, 4), torch.arange(3)[None]
    for kind, resample in itertools.product(("gumbel", "gaussian", "constant", "none"), (False, True)):
        noted = NoisySums(noise=kind, resample=resample).entry(NewTokens(keys, keys, positions, 2, 0, 0))
        assert list(noted) == [] if kind == "none" or (resample and kind != "constant") else ["noise"]
        assert all(one.shape == (1, 2, 3, 2) for one in noted.values())
    new = NewTokens(keys, keys, positions, 2, 0, 0)
    one, other = (NoisySums(noise=name).entry(new) for name in ("gumbel", "".join("gumbel")))
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
        context = EvictionContext(
            layer=0, seed=0, positions_BHT=places[given][None, None], newest_B11=torch.tensor([[[21]]]),
            recent_B11=torch.tensor([[[21]]]), state={"observed": tail[..., given]}, limits=limits, group=1, sliding=None,
            empty=empty,
        )  # fmt: skip
        return scores.ObservationWindow(window=2, kernel=kernel, pooling=pooling).value(context)[0, 0], given

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
    context = small_context(1, None)
    context.positions_BHT = context.positions_BHT.expand(1, 3, 4)
    got = scores.Random().value(context)
    want = [[drawn(0, 0, head, 9, key) for key in (0, 3, 5, 9)] for head in range(3)]
    torch.testing.assert_close(got[0].double(), torch.tensor(want, dtype=torch.float64), atol=1e-7, rtol=0)


def test_scores_below_zero_are_in_order():
    """A user's own score may be negative: its order is kept, and it is never taken for an empty slot."""

    @dataclass(frozen=True)
    class Oldest(Score):
        def value(self, context):
            return -context.positions_BHT.float() - 0.5

    policy = kvpatch.Policy("oldest", Oldest())
    model, ids, fed = make("llama_gqa"), prompt(2, 30), prompt(2, 5, seed=2)
    for mask in (None, left_pad(ids, [30, 20])):
        _, cache = run(model, ids, fed, policy, 7, mask)
        assert kept(cache) == [[[list(range(7))] * 2] * 2] * 2


def test_the_last_row_s_attention_is_added_up_by_position_where_heads_hold_other_tokens():
    """Also where no two heads hold the same one, so that there are as many positions as slots; -1 is an empty slot."""
    context = small_context(1, None)
    context.aligned = False
    for positions, want in (
        ([[0, 2, 4], [1, 3, 5]], [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]),
        ([[0, 2, 4], [4, 3, 0]], [[33.0, 2.0, 12.0], [12.0, 16.0, 33.0]]),
        ([[0, 2, -1], [2, 1, 0]], [[33.0, 10.0, None], [10.0, 16.0, 33.0]]),
    ):
        context.positions_BHT = torch.tensor([positions])
        context.state = {"observed": torch.tensor([[[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]])}
        got = scores.Last().value(context)[0].flatten().tolist()
        assert [(2 * a, b) for a, b in zip(got, itertools.chain(*want), strict=True) if b is not None and 2 * a != b] == []


@pytest.mark.parametrize("scope", [DeviationScope(recent=2, protected=4), RangeScope(ranges=4, recent=2)], ids=repr)
def test_heads_hold_other_tokens_where_a_scope_ranks_their_own(scope):
    """Then slots of one number are of different tokens, whose attention the score must not add up."""
    calls = []

    class Noted(scores.Last):
        def value(self, context):
            calls.append((context.positions_BHT.clone(), context.state["observed"].clone(), super().value(context)))
            return calls[-1][2]

    run(make("llama"), prompt(1, 20), prompt(1, 4, seed=2), Policy("mine", Noted(), scope), 9)
    for positions, last, value in (row for call in calls for row in zip(*call, strict=True)):
        want = torch.zeros(32).scatter_add_(0, positions.flatten(), last.flatten()) / len(positions)
        torch.testing.assert_close(value, want[positions])


@pytest.mark.parametrize("policy", ["dropkv", "defensive_snapkv"])
def test_a_window_in_several_blocks_of_rows(policy, monkeypatch):
    found = []
    monkeypatch.setattr(compress, "_warn_of_scores", lambda call, value: found.append(value.clone()))
    for entries in (torch_backend.CPU_BLOCK, 1):  # all rows at once, and 64: 128 queries of a group of two
        monkeypatch.setattr(torch_backend, "CPU_BLOCK", entries)
        model = make("llama_gqa")
        with torch.no_grad(), kvpatch.patched(model, policy, 90, window=80):
            model(prompt(1, 100))
    at_once, in_blocks = found[: len(found) // 2], found[len(found) // 2 :]
    torch.testing.assert_close(in_blocks, at_once)
