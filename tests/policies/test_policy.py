"""Policies are data: their options, their parts, and what follows from them."""

import dataclasses
import math

import pytest
import torch

from kvpatch import KVPatchError
from kvpatch.cache.settings import CacheSettings
from kvpatch.cli.compare_view import find_changes
from kvpatch.policies import Policy, adaptive, critical, get_policy, global_topk, scores
from kvpatch.policies.allocation import Adaptive
from kvpatch.policies.budgets import Budget
from kvpatch.policies.scopes import DeviationScope, Scope
from kvpatch.policies.selection import TwoStage
from kvpatch.policies.slopes import Pyramid

NOT_NUMBERS = [True, "0.5", None, math.nan]
OPTIONS = [  # part, option, what is refused, what is just allowed
    (Adaptive, "floor", [*NOT_NUMBERS, -0.01, 1.01, 2], [0, 1, 0.0, 1.0, 0.5]),
    (Pyramid, "beta", [*NOT_NUMBERS, 0, 0.99, math.inf, -1], [1, 1.0, 20, 1e9]),
    (TwoStage, "alpha", [*NOT_NUMBERS, -0.01, 1.01, 2], [0, 1, 0.5]),
    (TwoStage, "eps", [*NOT_NUMBERS, -0.01, 1.01, 2], [0, 1, 1e-9]),
    (TwoStage, "norm", [True, 0, 3, "1", None], [1, 2]),
    (scores.DilatedRecency, "dilation", [-1, 1.0, "1", None], [0, 1, 50]),
    (scores.Last, "heads", ["all", None, 1], ["layer", "each"]),
    (scores.Accumulated, "scores", ["some", None, 2, True], ["all", "sampled"]),
    (scores.GumbelSoftmax, "scores", ["some", None, 2], ["all", "sampled"]),
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
    (Scope, "quota", ["x", 1.5, 3, [], [[1], [1, 2]], torch.zeros(2), torch.zeros(1, 1, 1).long(), [(0, 2)] * 2, [(True, 2)]],
     [[(0, 1)], [[3, 5], [0, 3]], ((0, 1),), [0, -1, 1], torch.tensor([[0], [1]]), "messages"]),
    (DeviationScope, "protected", [*NOT_NUMBERS, -1, -0.1, 1.01], [0, 1, 0.0, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("part", "option", "refused", "allowed"), OPTIONS, ids=[f"{p.__name__}-{o}" for p, o, _, _ in OPTIONS])
def test_options(part, option, refused, allowed):
    def check(value):
        one = part(**{option: value})
        for checked in (one, *getattr(one, "needs", ())):  # as a policy does
            checked.check()

    for value in allowed:
        check(value)
    for value in refused:
        with pytest.raises(KVPatchError, match=f"^{option}="):
            check(value)


def test_a_share_above_one_advises_a_number_of_tokens():
    with pytest.raises(KVPatchError, match=r"recent=12\.5 is more than the whole budget; write 12 for 12 tokens"):
        Scope(recent=12.5).check()


@pytest.mark.parametrize("part", ["over_layers", "over_heads", "selection"])
def test_parts_that_may_be_missing(part):
    Policy("mine", **{"score": scores.Recency(), part: None})


@pytest.mark.parametrize("part", ["score", "scope"])
def test_parts_that_every_policy_has(part):
    with pytest.raises(KVPatchError, match=f"{part}=None"):
        Policy("mine", **{"score": scores.Recency(), part: None})


PARTS = {part for part, *_ in OPTIONS} | {Budget, Policy, scores.Score, *scores.Score.__subclasses__()}


@pytest.mark.parametrize("part", sorted(PARTS, key=str))
def test_a_policy_is_data(part):
    """Frozen and comparable: two policies with the same parts are one, and nobody changes one in use."""
    assert part.__dataclass_params__.frozen
    assert part.__dataclass_params__.eq


@pytest.mark.parametrize("name", ["raas", "lazy", "tri_attention", "r_kv", "vase"])
@pytest.mark.parametrize("combine", ["merged", "chunked", "refit", "adaptive", "global_topk"])
def test_a_combination_without_a_schedule_advises_none(combine, name):
    """The words are not those that name a schedule which the other part refuses."""
    base = get_policy(name)
    shares = combine in ("adaptive", "global_topk")
    if shares and base.schedule == "both":
        assert get_policy(f"{combine}({name})").schedule == "both"
    elif shares and "both" in base.score.schedules:
        advice = rf"Give {combine}\(kvpatch.get_policy\('{name}'\).with_options\(schedule='both'\)\)"
        with pytest.raises(KVPatchError, match=advice):
            get_policy(f"{combine}({name})")
        function = {"adaptive": adaptive, "global_topk": global_topk}[combine]
        assert function(base.with_options(schedule="both")).schedule == "both"
    else:
        with pytest.raises(KVPatchError, match=f"'{combine}_{name}' has no schedule: .* such as 'h2o'"):
            get_policy(f"{combine}({name})")


def test_who_remembers_generated_tokens():
    assert get_policy("h2o").remembers is False
    assert dataclasses.replace(get_policy("h2o"), schedule="prompt").remembers is True


def test_heads_that_hold_the_same_tokens():
    for name, aligned in {"tova": True, "h2o": True, "adaptive(tova)": False, "critical(tova)": False, "adakv": False}.items():
        assert get_policy(name).aligned is aligned


def test_parts_that_share_an_option_s_name_are_both_said():
    """One value of two would let a cache go on under another policy, and leave an option out of saved settings."""
    name = "critical(expected_attention)"
    policies = [critical(get_policy("expected_attention").with_options(eps=eps)) for eps in (0.0, 0.01)]
    assert [one.options()["eps"] for one in policies] == [(0.0, 1e-4), (0.01, 1e-4)]
    first, second = (CacheSettings(one, Budget.parse(8, n_layers=1, bytes_per_token=1)) for one in policies)
    assert list(first.list_differences(second)) == [("the policy's eps", [0.0, 1e-4], [0.01, 1e-4])]
    alike = get_policy(name).with_options(eps=1e-4)
    assert alike.options()["eps"] == 1e-4 and find_changes(name, alike) == {"eps": 1e-4}
