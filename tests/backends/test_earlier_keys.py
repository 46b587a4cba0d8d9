"""Earlier keys, which all rows see: attention to them and to the rows' own, and the greatest probability that each receives."""

import math

import pytest
import torch

from kvpatch.backends import torch_backend
from kvpatch.backends.protocol import Geometry, Keys

B, H, G, Q, PAST, D, SCALE = 2, 2, 3, 6, 9, 4, 0.7


def case(holes):
    """Queries, keys and rows; with holes every head has empty slots of its own, and one row of the batch is padded."""
    numbers = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, H, *n, D, generator=numbers, dtype=torch.float64) for n in ((G, Q), (PAST + Q,), (PAST + Q,)))
    rows = torch.arange(PAST, PAST + Q).repeat(B, 1)
    positions = torch.arange(PAST + Q).repeat(B, H, 1)
    if holes:
        positions[..., :PAST][torch.rand(B, H, PAST, generator=numbers) < 0.4] = -1
        positions[0, 1, :PAST] = -1
        positions[1, :, PAST : PAST + 2] = -1
        rows[1, :2] = -1
    return q, Keys(k, v, positions, holes, PAST, ordered=False), rows


def logits(q, keys, cap=None):
    """x[b,h,g,r,i], -inf where a row does not see a key."""
    x = torch.einsum("bhgrd,bhid->bhgri", q, keys.k_BHTD) * SCALE
    x = x if cap is None else cap * torch.tanh(x / cap)
    seen = torch.arange(PAST + Q) <= PAST + torch.arange(Q)[:, None]
    return x.masked_fill(~(seen & (keys.positions_BHT >= 0)[:, :, None, None]), -math.inf)


@pytest.mark.parametrize("holes", [False, True])
def test_attention_to_earlier_and_own_keys_is_joined(holes):
    q, keys, rows = case(holes)
    out, lse = torch_backend.attend(q, keys, rows, Geometry(SCALE, None, None))
    x = logits(q, keys)
    sees = x.isfinite().any(-1)
    want = torch.einsum("bhgri,bhid->bhgrd", x.softmax(-1), keys.v_BHTD)
    torch.testing.assert_close(out[sees], want[sees])
    torch.testing.assert_close(lse[sees].double(), x.logsumexp(-1)[sees], atol=1e-5, rtol=0)
    assert out.isfinite().all()


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_greatest_probability_of_each_earlier_key(holes, cap, weighted, monkeypatch):
    monkeypatch.setattr(torch_backend, "_size_blocks", lambda *_: (1, 4))
    q, keys, rows = case(holes)
    factors = torch.rand(B, Q, dtype=torch.float64) + 0.5 if weighted else None
    x = logits(q, keys, cap)
    want = x.softmax(-1).nan_to_num(0.0) * (rows >= 0)[:, None, None, :, None]
    want = (want if factors is None else want * factors[:, None, None, :, None]).amax(3)[..., :PAST]
    for lse in (None, x.logsumexp(-1)):
        got = torch_backend.find_greatest(q, keys, rows, Geometry(SCALE, None, None, cap), lse, factors)
        torch.testing.assert_close(got, want)


def test_a_row_that_sees_no_key_joins_as_nothing():
    out, lse = torch.ones(3, 2), torch.tensor([0.5, -math.inf, -math.inf])
    more, its_lse = torch.full((3, 2), 3.0), torch.tensor([-math.inf, 0.25, -math.inf])
    joined, total = torch_backend.join_parts((out, lse), (more, its_lse))
    assert joined.tolist() == [[1, 1], [3, 3], [0, 0]]
    assert total.tolist() == [0.5, 0.25, -math.inf]
