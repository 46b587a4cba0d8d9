"""The table of budgets by mass: a fixed budget beside each, of as many tokens."""

import pytest

import kvpatch
from tools.evaluation import mass


@pytest.fixture(scope="module")
def reader():
    return mass.questions()


def test_a_row_has_both_measures(reader):
    assert list(mass.rows({"answers": reader}, {"snapkv": ((0.7,), {})})) == [("snapkv", "0.7", "0.917", "1.000")]


def test_what_nothing_evicts_does_not_count(reader):
    generated = reader.text.ids_BT.shape[1] - reader.text.n
    assert generated > 0
    for policy, schedule in (("snapkv", "prompt"), ("h2o", "both")):
        assert reader.held(kvpatch.get_policy(policy).with_options(schedule), 40) == 40
