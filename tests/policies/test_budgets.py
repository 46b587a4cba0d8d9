"""Budgets: shares, tokens and sizes in bytes."""

import math

import pytest

from kvpatch import KVPatchError
from kvpatch.policies import budgets
from kvpatch.policies.budgets import Budget


def test_sizes():
    units = {"B": 1, "KB": 1000, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1024, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    for unit, size in units.items():
        assert budgets.parse_bytes(f"2{unit}") == 2 * size
        assert budgets.parse_bytes(f" 1.5 {unit.lower()} ") == int(1.5 * size)
    for text in ("2", "GB", "2 XB", "-2GB", "2GB2", "TB"):
        assert budgets.parse_bytes(text) is None
    with pytest.raises(KVPatchError, match="is not a size"):
        budgets.parse_k("0GB")
    assert budgets.share(0.29, 100) == 29
    assert budgets.share(0.5, 7) == 3
    assert budgets.share(7, 3) == 7
    assert budgets.share(1.0, 7) == 7


@pytest.mark.parametrize("k", [0, -1, 0.0, -0.5, 1.0000001, math.nan, True, None, "2 2", [[1]], b"1"])
def test_what_is_no_budget(k):
    with pytest.raises(KVPatchError, match=r"^k"):
        budgets.parse_k(k)


def test_budgets():
    for k in (1, 0.001, 1.0, "1B", 10**9):
        budgets.parse_k(k)
    plain = Budget.parse(0.5, n_layers=3, bytes_per_token=64)
    assert [plain.rules[layer].tokens(n) for layer, n in [(0, 9), (1, 1), (2, 100)]] == [4, 1, 50]
    assert [budgets.parse_k(text) for text in ("25%", " 100 % ", "0.5%", "7", "0.7")] == [0.25, 1.0, 0.005, 7, 0.7]
    for k in ([0.5], [0.5, 0.5, 0.5]):
        with pytest.raises(KVPatchError, match=rf"k has {len(k)} entries, but the model has 2 layers"):
            Budget.parse(k, n_layers=2, bytes_per_token=64)
    assert plain.rules[0].evicts
    assert Budget.parse(1.0, n_layers=1, bytes_per_token=1).rules[0].evicts is False
    assert Budget.parse(1, n_layers=1, bytes_per_token=1).rules[0].evicts is True
    with pytest.raises(KVPatchError, match="128 bytes, beside 256 for its sliding-window layers"):
        Budget.parse("383B", n_layers=3, bytes_per_token=64, bounds=[None, 4, None])
    with pytest.raises(KVPatchError, match="holds no token: one token of this model takes 192 bytes"):
        Budget.parse("191B", n_layers=3, bytes_per_token=64)


@pytest.mark.parametrize(("k", "bounds", "per_layer"), [
    ([1.0, 2], None, (1.0, 2)),
    (["64B", "640B"], None, (1, 10)),
    ("1000B", (None, None, None), (5, 5, 5)),
    ("192B", (None, None, None), (1, 1, 1)),
    # layers that bound themselves are paid first
    ("1000B", (None, 4, None), ((1000 - 4 * 64) // 128,) * 3),
    ("384B", (None, 4, None), (1, 1, 1)),
    ("4KiB", (None, 10, None), ((4096 - 10 * 64) // 128,) * 3),
])  # fmt: skip
def test_budgets_of_layers(k, bounds, per_layer):
    given = {} if bounds is None else {"bounds": bounds}
    assert Budget.parse(k, n_layers=len(per_layer), bytes_per_token=64, **given).per_layer == per_layer


@pytest.mark.parametrize(("value", "bound"), [(0, False), ("7", False), (2**30, True)])
def test_a_count_out_of_range_is_told_the_end_that_it_is_beyond(value, bound):
    with pytest.raises(KVPatchError, match="at least 1") as told:
        budgets.check_count("room", value, "tokens")
    assert ("at most" in str(told.value)) == bound
