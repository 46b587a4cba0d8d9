"""The variable-length flash-attention call over ragged heads: its arguments by an emulation, its result on a GPU."""

import pytest
import torch
from tiny import force, make, prompt

import kvpatch
from kvpatch.backends import varlen
from kvpatch.backends.torch_backend import Geometry, Keys, step
from kvpatch.ragged import Extents

SIZES = [7, 30, 12, 12, 19, 3]


def ragged(dtype, device):
    """Queries, keys and extents of 2 rows, 3 KV heads and groups of 2; two slots behind each head's own are junk."""
    generator = torch.Generator().manual_seed(0)
    extents = Extents([n + 3 for n in SIZES], SIZES, torch.device(device))
    k, v = (torch.randn(extents.rows, 16, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(2, 3, 2, 16, generator=generator).to(device, dtype)
    positions = torch.full((2, 3, extents.width), -1)
    for n, size in enumerate(SIZES):
        positions.view(6, -1)[n, : size + 1] = torch.arange(size + 1)
    return q, Keys(k, v, positions.to(device), True, 0, False, extents, grown=1), extents


def emulate(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, seqused_k):
    """FlashAttention's contract for packed sequences: q [total_q, heads, D], k and v [total_k, KV heads, D]."""
    assert cum_q.dtype == cum_k.dtype == seqused_k.dtype == torch.int32
    assert (max_q, dropout, causal, debug) == (1, 0.0, False, False)
    assert cum_k.diff().min() >= 0
    assert int(seqused_k.max()) <= max_k
    out = torch.empty_like(q)
    for i, n in enumerate(seqused_k.tolist()):
        rows, keys = slice(cum_q[i], cum_q[i + 1]), slice(cum_k[i], cum_k[i] + n)
        x = torch.einsum("qhd,khd->hqk", q[rows], k[keys].expand(-1, q.shape[1], -1)) * scale
        out[rows] = torch.einsum("hqk,khd->qhd", x.softmax(-1), v[keys].expand(-1, q.shape[1], -1))
    return out, None, None, None, None


def test_every_head_is_a_sequence(monkeypatch):
    q, keys, extents = ragged(torch.float64, "cpu")
    want, _ = step(q, keys, torch.full((2, 1, 1), 31), Geometry(0.3, None, None), False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", emulate)
    got = varlen.step(q, keys.k_BHTD, keys.v_BHTD, extents, 1, 0.3)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_the_call_fits_the_operator():
    """The kernel needs a GPU; its shape function does not."""
    q, keys, extents = ragged(torch.float16, "meta")
    extents = Extents([n + 3 for n in SIZES], SIZES, torch.device("cpu"))
    order, starts, filled = (tensor.to("meta") for tensor in extents.sequences())
    out = torch.ops.aten._flash_attention_forward(
        q.flatten(0, 1), keys.k_BHTD[:, None], keys.v_BHTD[:, None], torch.empty(7, dtype=torch.int32, device="meta"),
        starts, 1, 31, 0.0, False, False, scale=0.3, seqused_k=filled,
    )[0]  # fmt: skip
    assert out.shape == (6, 2, 16)


def test_a_refusal_is_said_once_and_changes_nothing(monkeypatch, caplog):
    q, keys, extents = ragged(torch.float64, "cpu")
    want, _ = step(q, keys, torch.full((2, 1, 1), 31), Geometry(0.3, None, None), False)
    monkeypatch.setattr(varlen, "_refused", [])
    monkeypatch.setattr(varlen, "serves", lambda q: not varlen._refused)
    for _ in range(2):  # torch's own kernel refuses CPU tensors
        got, _ = step(q, keys, torch.full((2, 1, 1), 31), Geometry(0.3, None, None), False)
        assert torch.equal(want, got)
    assert caplog.text.count("goes head by head") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    q, keys, extents = ragged(torch.bfloat16, "cuda")
    got = varlen.step(q, keys.k_BHTD, keys.v_BHTD, extents, 1, 0.3)
    assert got is not None
    wide, exact, _ = ragged(torch.bfloat16, "cuda")
    exact.k_BHTD, exact.v_BHTD = exact.k_BHTD.float(), exact.v_BHTD.float()
    want, _ = step(wide.float(), exact, torch.full((2, 1, 1), 31, device="cuda"), Geometry(0.3, None, None), False)
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=0)
    model, ids = make("llama_gqa", dtype=torch.bfloat16).cuda(), prompt(1, 60).cuda()
    with kvpatch.patched(model, "adakv", 0.4, window=5):
        logits, _ = force(model, ids, prompt(1, 5, seed=2).cuda())
    assert torch.isfinite(logits).all()
