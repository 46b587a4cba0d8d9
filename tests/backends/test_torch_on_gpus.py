"""How the torch backend calls attention on a GPU, seen without one: on tensors that have shapes but no data."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpatch.backends import torch_backend
from kvpatch.backends.protocol import Geometry, Keys
from tests.helpers.marks import slow_but


@pytest.fixture
def calls(monkeypatch):
    """Calls of scaled_dot_product_attention as (q, k, mask or None, enable_gqa)."""
    found = []

    def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        assert k.shape == v.shape and (attn_mask is None) == is_causal
        assert enable_gqa == (q.shape[1] != k.shape[1])
        found.append((q, k, attn_mask))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return found


def attend(B, H, G, Q, D=64, dtype=torch.float32, device="meta", alibi=False, sliding=None, past=0, **geometry):
    with FakeTensorMode():
        q = torch.empty(B, H, G, Q, D, device=device, dtype=dtype)
        k, v = (torch.empty(B, H, past + Q, D, device=device, dtype=dtype) for _ in "kv")
        rows = torch.arange(past, past + Q, device=device).expand(B, Q)
        positions = torch.arange(past + Q, device=device).expand(B, H, past + Q)
        slopes = torch.ones(H, G, device=device) if alibi else None
        keys = Keys(k, v, positions, False, past, ordered=True)
        out, _ = torch_backend.attend(q, keys, rows, Geometry(1.0, slopes, sliding, **geometry))
        assert out.shape == q.shape


def test_a_batch_with_alibi_is_attended_in_few_calls(calls):
    """Batch 16, 4096 tokens, 32 heads: 16 to 32 times fewer than with masks sized for a CPU."""
    attend(16, 32, 1, 4096, 128, torch.bfloat16, alibi=True)
    sizes = [mask.numel() for _, _, mask in calls]
    assert len(calls) <= 70 and max(sizes) <= torch_backend.DEVICE_BLOCK
    assert sum(q.shape[2] for q, _, _ in calls) == 4096
    assert [k.shape[2] for _, k, _ in calls] == torch.tensor([q.shape[2] for q, _, _ in calls]).cumsum(0).tolist()
    calls.clear()
    attend(1, 32, 1, 4096, 128, device="cpu", sliding=4000)
    assert max(mask.numel() for _, _, mask in calls) <= torch_backend.MASK_BLOCK


MASKED = [*product(("cpu", "meta"), ({}, {"past": 5000}, {"sliding": 300}, {"alibi": True, "past": 77}))]


@pytest.mark.parametrize(("device", "how"), slow_but([("cpu", {}), *MASKED[4:]], MASKED))
def test_masks_are_as_large_as_allowed(calls, device, how):
    attend(4, 8, 1, 9000, device=device, **{"sliding": 8000, **how})
    allowed = torch_backend.MASK_BLOCK if device == "cpu" else torch_backend.DEVICE_BLOCK
    sizes = [mask.numel() for _, _, mask in calls]
    assert max(sizes) <= allowed and (len(sizes) == 1 or min(sizes[:-1]) > 0.9 * allowed)


FUSED = ("can_use_flash_attention", "can_use_cudnn_attention", "can_use_efficient_attention")


@pytest.mark.parametrize("taken_by", [None, *FUSED])
@pytest.mark.parametrize("how", [{}, {"sliding": 20}, {"past": 7}, {"alibi": True}])
def test_groups_are_expanded_where_no_fused_kernel_takes_them(calls, monkeypatch, how, taken_by):
    """Else torch would compute all logits at once."""
    asked = []

    def answer(name):
        return lambda params: asked.append((params.enable_gqa, params.is_causal, params.attn_mask)) or name == taken_by

    for name in FUSED:
        monkeypatch.setattr(torch.backends.cuda, name, answer(name))
    attend(2, 4, 3, 64, **how)
    heads = {k.shape[1] for _, k, _ in calls}
    assert heads == ({12} if taken_by is None else {4})
    assert asked[0][:2] == (True, not how) and (asked[0][2] is None) == (not how)


def test_groups_are_as_they_are_elsewhere(calls, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: 1 / 0)
    attend(2, 12, 1, 64)
    attend(2, 4, 3, 64, device="cpu", sliding=20)
    assert {k.shape[1] for _, k, _ in calls} == {12, 4}


@pytest.mark.slow
def test_logits_of_a_special_layer_are_bounded_too(monkeypatch):
    blocks = []
    real = torch_backend.mask_blocks

    def recorded(*args):
        for block in real(*args):
            blocks.append(block)
            yield block

    monkeypatch.setattr(torch_backend, "mask_blocks", recorded)
    attend(8, 8, 4, 4096, softcap=30.0)
    assert max((stop - start) * stop for start, stop in blocks) * 8 * 32 * torch_backend.LOGITS <= torch_backend.DEVICE_BLOCK
    assert len(blocks) < 200 and blocks[-1][1] == 4096
