"""Scores of keys and values, on contexts small enough to count by hand."""

import torch

from kvpatch.policies.content import KeyDiff, LagKV
from kvpatch.policies.context import EvictionContext, Limits
from kvpatch.policies.needs import Held
from tests.helpers.contexts import reading


def of_tokens(k_TD, v_TD, positions, sinks):
    """A context of one head whose slots hold these tokens."""
    held = torch.tensor(k_TD)[None, None], torch.tensor(v_TD)[None, None]
    newest, limits = torch.tensor([[[max(positions)]]]), Limits.of([(sinks, 0, 0, 2, 0, 0)], torch.device("cpu"))
    return EvictionContext(
        layer=0, seed=0, positions_BHT=torch.tensor([[positions]]), newest_B11=newest, recent_B11=newest, state={},
        limits=limits, group=1, sliding=None, empty=-1 in positions, needs=(Held(),), layer_read=reading(held=held),
    )  # fmt: skip


# one sink, two whole partitions of two tokens, a token behind them: the first partition alone is ranked, the rest has 1
KEYS = [[9.0, 9.0], [1.0, 13.0], [2.0, 20.0], [1.0, 10.0], [2.0, 20.0], [7.0, 0.0]]


def test_partitions_by_hand():
    context = of_tokens(KEYS, KEYS, [0, 1, 2, 3, 4, 5], sinks=1)
    # scaled by the next partition, token 1 is (0, 0.3), which deviates, and token 2 (1, 1)
    assert LagKV(lag=2).value(context)[0, 0].tolist() == [1.0, 0.5, 0.0, 1.0, 1.0, 1.0]


def test_slots_in_any_order_and_empty_ones():
    order = [4, 0, 5, 2, 1, 3]
    keys = [KEYS[i] for i in order[:3]] + [[50.0, -50.0]] + [KEYS[i] for i in order[3:]]
    context = of_tokens(keys, keys, [4, 0, 5, -1, 2, 1, 3], sinks=1)
    score = LagKV(lag=2).value(context)[0, 0]
    assert [score[i].item() for i in (1, 5, 4, 6, 0, 2)] == [1.0, 0.5, 0.0, 1.0, 1.0, 1.0]


def test_heads_of_different_lengths():
    """The second head holds fewer partitions, which end where its slots do."""
    context = of_tokens([*KEYS, *KEYS[-2:]], [*KEYS, *KEYS[-2:]], [0, 1, 2, 3, 4, 5, 6, 7], sinks=2)
    first, more = KEYS[1:] + KEYS[2:5], [2, 3, 4, 5, 6, 7, 8, 9]  # without sinks
    both = (torch.stack([context.view(Held)[0][0, 0], torch.tensor(first)])[None],) * 2
    context.layer_read = reading(held=both)
    context.positions_BHT = torch.stack([context.positions_BHT[0, 0], torch.tensor(more)])[None]
    score = LagKV(lag=2).value(context)[0]
    assert score[0].tolist()[:2] == [1.0, 1.0] and score[0].tolist()[6:] == [1.0, 1.0]
    assert sorted(score[0, 2:6].tolist()) == [0.0, 0.0, 0.5, 0.5]
    assert sorted(score[1].tolist()) == [0.0] * 3 + [0.5] * 3 + [1.0] * 2


def test_fewer_than_two_partitions_are_ranked_by_age():
    context = of_tokens(KEYS[:4], KEYS[:4], [0, 1, 2, 3], sinks=1)
    assert LagKV(lag=2).value(context)[0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    whole = of_tokens(KEYS[:5], KEYS[:5], [0, 1, 2, 3, 4], sinks=1)
    assert LagKV(lag=2).value(whole)[0, 0].tolist() == [1.0, 0.5, 0.0, 1.0, 1.0]


def test_a_channel_that_is_constant_in_the_next_partition_is_0():
    first, following = [[2.0, 20.0, 7.0], [1.0, 13.0, 8.0]], [[1.0, 10.0, 7.0], [2.0, 20.0, 7.0]]
    context = of_tokens(first + following, first + following, [0, 1, 2, 3], sinks=0)
    assert LagKV(lag=2).value(context)[0, 0].tolist() == [0.5, 0.0, 1.0, 1.0]  # scaled: (1, 1, 0) and (0, 0.3, 0)


def test_likeness_to_the_mean_direction_by_hand():
    keys = [[5.0, 0.0], [0.0, 0.1], [2.0, 0.0]]  # directions (1, 0), (0, 1), (1, 0), whose sum is along (2, 1)
    score = KeyDiff().value(of_tokens(keys, keys, [0, 1, 2], sinks=0))[0, 0]
    torch.testing.assert_close(score, -torch.tensor([2.0, 1.0, 2.0]) / 5**0.5)
    score = KeyDiff().value(of_tokens([*keys, [-9.0, 9.0]], [*keys, [0.0, 0.0]], [0, 1, 2, -1], sinks=0))[0, 0, :3]
    torch.testing.assert_close(score, -torch.tensor([2.0, 1.0, 2.0]) / 5**0.5)
