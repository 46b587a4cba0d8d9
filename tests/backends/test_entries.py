"""Rounded entries: the oracle's numbers, the bytes that are counted, and blocks instead of a whole layer at once."""

import copy
import math

import pytest
import torch

from kvpatch.backends import entries
from kvpatch.backends.entries import EXACT, Rounded, codecs, dot, mix
from kvpatch.backends.entry_sizes import count_entry_bytes
from tests.oracle import reference

HALVES = (torch.float16, torch.bfloat16)
SIZES = (1, 2, 5, 16, 32, 37, 64, 80)


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("D", SIZES)
def test_numbers_are_the_oracle_s(D, bits):
    x = numbers(2, 3, 7, D)
    for codec in codecs(bits, D, D, x.dtype):
        want = [reference.rounded(row, bits, D // codec.groups)[0] for row in x.view(-1, D)]
        got = codec.decode(codec.encode(x))
        assert got.dtype == x.dtype
        torch.testing.assert_close(got.view(-1, D), torch.stack(want), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_narrow_dtypes_are_as_near_as_their_steps(bits, dtype):
    """Half a step, and what rounding the scale adds at the far end of a group; each number is one of the model's dtype."""
    x = numbers(50, 64, dtype=dtype) + 3
    for codec in codecs(bits, 64, 64, dtype):
        got = codec.cached(x)
        groups = x.double().unflatten(-1, (codec.groups, -1))
        step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**bits - 1)
        error = (got.double().unflatten(-1, (codec.groups, -1)) - groups).abs()
        eps = torch.finfo(dtype).eps
        assert got.dtype == dtype and bool((error <= step * (0.5 + 2**bits * eps) + 8 * eps).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_ties_go_to_even_codes(bits):
    top = 2**bits - 1
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, float(top)])
    assert Rounded(bits, 5, 1, x.dtype).cached(x).tolist() == [0, 0, 2, 2, top]


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_numbers_stay_and_numbers_that_are_none_stay_so(bits):
    codec = Rounded(bits, 8, 2, torch.float32)
    assert codec.cached(torch.full((8,), 0.1)).tolist() == torch.full((8,), 0.1).tolist()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.arange(8.0)
        x[2] = bad
        got = codec.cached(x)
        assert not bool(got[:4].isfinite().all()) and bool(got[4:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("D", SIZES)
def test_an_entry_has_the_bytes_that_are_counted(D, bits, dtype):
    made = [codec.encode(numbers(3, D, dtype=dtype)) for codec in codecs(bits, D, D, dtype)]
    assert all(one.dtype == torch.uint8 for one in made)
    assert sum(one.shape[-1] for one in made) == count_entry_bytes(bits, D, D, dtype.itemsize)
    groups = next(count for count in range(1, D + 1) if D % count == 0 and D // count <= 32)
    assert count_entry_bytes(bits, D, D, dtype.itemsize) == 2 * math.ceil(D * bits / 8) + 2 * (groups + 1) * dtype.itemsize
    assert count_entry_bytes(16, D, D, dtype.itemsize) == 2 * D * dtype.itemsize


def test_a_head_of_128_in_half_precision():
    """The sizes that docs/options name: 512 bytes, 276, 148."""
    assert [count_entry_bytes(bits, 128, 128, 2) for bits in (16, 8, 4)] == [512, 276, 148]


@pytest.mark.parametrize("bits", [8, 4])
def test_entries_are_rows_that_can_lie_anywhere(bits):
    """Views whose first byte is at any offset, as segments of a ragged layer begin."""
    codec = Rounded(bits, 6, 1, torch.float32)
    rows = codec.encode(numbers(9, 6, dtype=torch.float32))
    packed = torch.zeros(rows.numel() + 3, dtype=torch.uint8)
    packed[3:] = rows.flatten()
    assert torch.equal(codec.decode(packed[3:].view(9, -1)), codec.decode(rows))
    assert torch.equal(codec.decode(rows[4:5]), codec.decode(rows)[4:5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_products_are_those_of_the_unpacked_numbers(bits, dtype, monkeypatch):
    """However few columns are unpacked at a time."""
    q, p = numbers(2, 3, 4, 16, dtype=dtype), numbers(2, 3, 4, 21, dtype=dtype, seed=1)
    k, v = numbers(2, 3, 21, 16, dtype=dtype, seed=2), numbers(2, 3, 21, 16, dtype=dtype, seed=3)
    of_k, of_v = codecs(bits, 16, 16, dtype)
    x, y = q.double() @ of_k.cached(k).double().mT, p.double() @ of_v.cached(v).double()
    for block in (1, 5 * 2 * 3 * 16, 1 << 18):
        monkeypatch.setattr(entries, "CPU_BLOCK", block)
        loose = {"atol": 0.2, "rtol": 0.02} if dtype in HALVES else {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(dot(q, of_k.encode(k), of_k).double(), x, **loose)
        out = mix(p, of_v.encode(v), of_v, dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), y, **loose)


def test_full_precision_is_no_rounding():
    x = numbers(3, 5)
    assert codecs(16, 5, 5, x.dtype) == copy.deepcopy(EXACT)  # caches are copied with their codecs
    assert all(codec.encode(x) is x and codec.decode(x) is x for codec in EXACT)
