"""Earlier keys, which all rows see: attention to them and to the rows' own, and the greatest probability that each receives."""

import math
from dataclasses import replace

import pytest
import torch

from tests.backends.on_triton import DEVICE  # isort: skip
from kvpatch.backends import torch_backend
from kvpatch.backends.protocol import Geometry, Keys
from kvpatch.backends.triton import triton_backend

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


@pytest.mark.parametrize("columns", [[2], [0, 3], [1, 2], [4, 5], [*range(Q)]], ids=str)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("backend", [torch_backend, triton_backend])
def test_what_any_rows_give_to_each_key(backend, holes, columns, monkeypatch):
    """Each row sees the keys up to its own, wherever it lies in the prompt: a need may ask for any (PromptRead.attention)."""
    monkeypatch.setattr(torch_backend, "CPU_BLOCK", 2 * G)  # a block a row
    q, keys, rows = case(holes)
    p = logits(q, keys).softmax(-1).nan_to_num(0.0) * (rows >= 0)[:, None, None, :, None]
    want = p[:, :, :, columns].sum((2, 3)) / G
    if backend is triton_backend:
        pytest.importorskip("triton")
        q, keys = (
            q.float().to(DEVICE),
            replace(keys, k_BHTD=keys.k_BHTD.float().to(DEVICE), v_BHTD=keys.v_BHTD.float().to(DEVICE)),
        )
        keys.positions_BHT, rows = keys.positions_BHT.to(DEVICE), rows.to(DEVICE)
    got = backend.window_sums(q[:, :, :, columns], keys, rows[:, columns], Geometry(SCALE, None, None))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)
    if backend is torch_backend and columns == [4, 5]:
        last = backend.window_sums(q[:, :, :, columns], keys, rows[:, columns], Geometry(SCALE, None, None), last=True)
        torch.testing.assert_close(last, want)


def test_a_row_that_sees_no_key_joins_as_nothing():
    out, lse = torch.ones(3, 2), torch.tensor([0.5, -math.inf, -math.inf])
    more, its_lse = torch.full((3, 2), 3.0), torch.tensor([-math.inf, 0.25, -math.inf])
    joined, total = torch_backend.join_parts((out, lse), (more, its_lse))
    assert joined.tolist() == [[1, 1], [3, 3], [0, 0]]
    assert total.tolist() == [0.5, 0.25, -math.inf]
