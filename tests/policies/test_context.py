"""The eviction context: limits of rows, and means over the queries that saw a key."""

import torch

from kvpatch.policies.context import Limits, accumulator
from kvpatch.policies.scopes import DeviationScope
from tests.helpers.contexts import small_context


def test_limits():
    rows = [(1, 2, 0, 4, 0, 6), (0, 0, 0, 4, 1, 2)]
    one = Limits.of(rows, torch.device("cpu"))
    names = ("first", "newest", "prompt", "deviation", "observed", "nominal")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        assert getattr(one, name).shape == (2, 1, 1)
        assert getattr(one, name).flatten().tolist() == list(column)
    assert (one.any_first, one.any_newest, one.any_prompt, one.deviation_count) == (True, True, False, 4)
    other = Limits.of([(0, 0, 7, 5, 0, 0)], torch.device("cpu"))
    both = Limits.cat([one, other])
    assert (both.any_first, both.any_newest, both.any_prompt, both.deviation_count) == (True, True, True, None)
    assert both.prompt.flatten().tolist() == [0, 0, 7]
    assert Limits.cat([one, one]).deviation_count == 4
    assert Limits.of([rows[0], (0, 0, 0, 3, 0, 0)], torch.device("cpu")).deviation_count is None
    swapped = one.map_rows(lambda tensor: tensor.flip(0))
    assert swapped.first.flatten().tolist() == [0, 1]
    assert (swapped.any_first, swapped.deviation_count) == (True, 4)


def test_rows_and_means():
    assert small_context(1, None).aligned
    assert accumulator(torch.float16) == accumulator(torch.bfloat16) == accumulator(torch.float32) == torch.float32
    assert accumulator(torch.float64) == torch.float64
    context = small_context(1, None)
    assert context.rows_seen.flatten().tolist() == [10.0, 7.0, 5.0, 1.0]
    torch.testing.assert_close(context.mean.flatten(), torch.tensor([0.6, 3 / 7, 0.4, 1.0]))
    assert context.rows_seen is context.rows_seen
    assert context.mean is context.mean
    grouped = small_context(2, 6)
    assert grouped.rows_seen.flatten().tolist() == [6.0, 6.0, 5.0, 1.0]
    torch.testing.assert_close(grouped.mean.flatten(), torch.tensor([0.5, 0.25, 0.2, 0.5]))
    # variances .8 - .36, 2/7 - (3/7)^2, .3 - .16 and 0
    assert DeviationScope(recent=0).mask(context).flatten().tolist() == [True, False, True, False]
    context.positions_BHT, context.empty = torch.tensor([[[-1, 3, 5, 9]]]), True  # what stands in an empty slot does not count
    assert DeviationScope(recent=0).mask(context).flatten().tolist() == [False, True, True, False]
    context = small_context(1, None)  # nor do tokens that are kept outside the budget
    context.limits = Limits.of([(0, 0, 3, 2, 0, 0)], torch.device("cpu"))
    assert DeviationScope(recent=0).mask(context).flatten().tolist() == [False, True, True, False]
