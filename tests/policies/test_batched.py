"""Rows of objects whose tensors all have the batch first."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvpatch.policies.batched import Batched


@dataclass(frozen=True)
class Inner(Batched):
    place_B: Tensor
    name: str = "inner"


@dataclass
class Outer(Batched):
    one_BT: Tensor
    missing_BT: Tensor | None = None
    pair: tuple[Tensor, Tensor] | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    layers: list[Tensor | None] = field(default_factory=list)
    inner: Inner | None = None
    waits: tuple[int, ...] = (1, 2)


def sample():
    rows = torch.arange(3)
    return Outer(rows[:, None] * 10, None, (rows + 1, rows + 2), {"sum": rows + 3}, [rows + 4, None], Inner(rows + 5))


@pytest.mark.parametrize("index", [[2, 0], [0, 0, 1, 1], []])
def test_every_tensor_changes_and_nothing_else_does(index):
    one, at = sample(), torch.tensor(index, dtype=torch.long)
    new = one.map_rows(lambda tensor: tensor[at])
    assert new.one_BT.flatten().tolist() == [10 * row for row in index]
    assert [part.tolist() for part in new.pair] == [[row + 1 for row in index], [row + 2 for row in index]]
    assert new.sums["sum"].tolist() == [row + 3 for row in index] and new.layers[0].tolist() == [row + 4 for row in index]
    assert new.inner.place_B.tolist() == [row + 5 for row in index] and new.inner.name == "inner"
    assert new.missing_BT is None and new.layers[1] is None and new.waits == (1, 2)
    assert one.one_BT.flatten().tolist() == [0, 10, 20] and one.inner.place_B.tolist() == [5, 6, 7], "the original is unchanged"


def test_in_place():
    one = sample()
    own = one.inner
    one.change_rows(lambda tensor: tensor[:1])
    assert len(one.one_BT) == len(one.pair[1]) == len(one.sums["sum"]) == len(one.inner.place_B) == 1
    assert len(own.place_B) == 3, "whoever else holds the inner object keeps its rows"
