"""Budgets over layers and over heads."""

import itertools

import pytest
import torch

from kvpatch.policies import budgets, selection
from kvpatch.policies.allocation import Adaptive
from kvpatch.policies.parallel import Parallel
from kvpatch.policies.slopes import split_budget
from tests.helpers.contexts import orders
from tests.oracle import reference_selection


@pytest.mark.parametrize("n_layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("budget", [1, 2, 5, 40, 1001])
@pytest.mark.parametrize("beta", [1, 2.5, 20])
def test_pyramids(n_layers, budget, beta):
    for least, most in itertools.product([1, 2, 33], [None, budget, budget + 1, budget + budget // 2 + 1, 10 * budget]):
        got = split_budget(beta, budget, n_layers, least, most)
        assert list(got) == reference_selection.pyramid(budget, n_layers, beta, least - 1, most), (least, most)
        assert sum(got) == budget * n_layers


@pytest.mark.parametrize("floor", [0, 0.2, 0.5, 1, 1.0])
@pytest.mark.parametrize("budgets_B", [[3, 5], [1, 8], [4, 4]])
def test_adaptive_counts(floor, budgets_B):
    order, fixed = orders(), torch.tensor([[0, 0, 0], [1, 0, 2]])
    empty = torch.zeros_like(order, dtype=torch.bool)
    empty[0, 1, [2, 5]] = True
    order = order.masked_fill(empty, selection.FIRST)
    for nominal, holes in itertools.product([[0, 0], [2, 1]], [None, empty]):
        keys = order if holes is None else order.masked_fill(holes, selection.FIRST)
        least_B = torch.tensor([Adaptive(floor).least(*of) for of in zip(budgets_B, nominal, strict=True)])
        total = fixed.sum(-1, keepdim=True) + 3 * torch.tensor(budgets_B)[:, None]
        got = Adaptive(floor).counts(keys, fixed + least_B[:, None], total)
        for b in range(2):
            least = [max(budgets.share(float(floor), budgets_B[b]), nominal[b]) + f for f in fixed[b].tolist()]
            held = [[v for v in order[b, h].tolist() if v > selection.FIRST] for h in range(3)]
            own = [sorted(held[h], reverse=True)[: least[h]] for h in range(3)]
            rest = sorted((v for h in range(3) for v in held[h] if v not in own[h]), reverse=True)
            total = int(fixed[b].sum()) + 3 * budgets_B[b]
            more = rest[: max(total - sum(map(len, own)), 0)]
            if sum(map(len, own)) <= total:
                assert got[b].tolist() == [len(own[h]) + sum(v in held[h] for v in more) for h in range(3)]


def test_a_process_has_its_part_of_the_heads():
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    parts = [Parallel(3, rank).select_numbers(rows) for rank in range(3)]
    assert parts == [[[1, 2], [7, 8]], [[3, 4], [9, 10]], [[5, 6], [11, 12]]]


def test_equal_entries_go_to_the_lower_head():
    order = torch.tensor([[[3, 9], [3, 9], [3, 9]]])
    got = Adaptive(0).counts(order, torch.zeros(1, 3, dtype=torch.long), torch.tensor([[3]]))
    assert got.tolist() == [[1, 1, 1]]
    order = torch.tensor([[[3, 5], [3, 5], [3, 5]]])
    assert Adaptive(0).counts(order, torch.tensor([[1, 0, 0]]), torch.tensor([[4]])).tolist() == [[2, 1, 1]]
