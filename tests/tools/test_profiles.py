"""Profiles beside fixed policies at equal bytes: what the table of docs/guides/memory.md is made of."""

import numpy as np
import pytest
import torch

import kvpatch
from kvpatch.evaluation.divergence import Comparison
from tests.helpers.tiny import make, prompt
from tools.evaluation import profiles
from tools.evaluation.stats import Bootstrap

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_a_fixed_policy_gets_the_fewest_bytes_that_are_enough():
    model = make("llama_gqa", dtype=torch.float64)
    comparisons = [Comparison(model, prompt(1, 46, seed=seed), 40) for seed in (1, 2)]
    own = [one.figures(kvpatch.get_policy("h2o"), (0.5, 0.3)) for one in comparisons]
    draws = Bootstrap([("a", "a")] * 2)
    policies = {name: kvpatch.get_policy(name) for name in ("h2o", "window", "lazy")}
    found = {one.name: one for one in profiles.beside(comparisons, own, policies, draws)}
    assert set(found) == {"h2o", "window"}, "lazy holds more whatever its k"
    for name, one in found.items():
        figures = [full.figures(policies[name], one.k) for full in comparisons]
        less = comparisons[0].figures(policies[name], one.k - 1 / profiles.STEPS)
        assert figures[0].nbytes >= own[0].nbytes > less.nbytes
        assert one.kl == pytest.approx(np.mean([each.kl for each in figures]))
        assert one.share == pytest.approx(figures[0].nbytes / comparisons[0].nbytes)
        assert one.more.mean == pytest.approx(one.kl - np.mean([each.kl for each in own]))


def test_windows_are_measured_twice():
    found = profiles.fixed()
    assert found["snapkv window=8"].options()["window"] == 8 and found["snapkv"].options()["window"] == 32
    assert "h2o window=8" not in found and "full" not in found and "q_filter" not in found


def test_no_piece_is_tuned_on_and_measured():
    for made in (profiles.source, profiles.questions):
        reading = made()
        own = {tuple(ids[0].tolist()) for ids, _ in reading.own}
        assert own.isdisjoint(tuple(ids[0].tolist()) for ids, _ in reading.others)
        assert {ids.shape for ids, _ in (*reading.own, *reading.others)} == {reading.own[0][0].shape}
