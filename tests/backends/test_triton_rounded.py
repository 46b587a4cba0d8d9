"""Decode kernels over keys and values of 8 or 4 bits: beside the naive twin, and what torch writes.

As in test_triton_decode.py, bfloat16 waits for a GPU.
"""

import math

import pytest
import torch

from tests.backends import on_triton  # noqa: F401 # isort: skip
from kvpatch.backends.entries import centre_codecs, codecs
from kvpatch.backends.protocol import Case
from kvpatch.backends.triton import triton_backend
from tests.backends.test_triton_decode import (
    BF16,
    F16,
    F32,
    SIX_HEADS,
    THREE_HEADS,
    Rule,
    close,
    filled,
    follow,
    launch,
    rule,
    sinks,
    slopes,
    token,
)  # fmt: skip
from tests.helpers.marks import slow_but

NARROW = pytest.mark.parametrize("bits", [8, 4])
CASES = {
    "one block": (rule("sum"), {"C": 63, "G": 4}),
    "two segments of head size 80": (rule("mean"), {"C": 129, "D": 80, "splits": 2, "dtype": F16}),
    "groups that pieces cut, head size 96": (rule("observed"), {"C": 70, "D": 96, "splits": 3, "dtype": F16}),
    "head size 128": (rule("mean", ("sum", "squares")), {"C": 200, "D": 128, "H": 1, "G": 4, "splits": 3, "dtype": F16}),
    "head size 256, float32": (rule("count"), {"C": 40, "D": 256, "splits": 2, "steps": 2}),
    "a head of 16": (rule("sum"), {"C": 20, "D": 16, "B": 2}),
    "noise and a window": (rule("gumbel"), {"C": 63, "sliding": 20, "splits": 3, "tau": 1.3}),
    "alibi": (rule("mean", ("sum",)), {"C": 90, "G": 4, "slopes": slopes(2, 4), "splits": 2, "dtype": F16}),
    "cap and sinks": (rule("mean"), {"C": 70, "softcap": 4.0, "sinks": sinks(2, 2), "splits": 3, "dtype": F16}),
    "holes": (rule("sum"), {"B": 2, "C": 20, "used": [19, 12, 3, 17], "keep": torch.tensor([[19, 12], [6, 18]]), "steps": 5}),
    "ragged": (rule("mean"), dict(SIX_HEADS, splits=3, D=128, dtype=F16)),
    "ragged, filling": (rule("sum", ("sum",)), dict(THREE_HEADS, keep=torch.tensor([[5, 22, 9]]), steps=4, D=80)),
    "appending, nothing seen": (Rule(evicts=False), {"C": 40, "used": [4, 30], "splits": 2}),
}  # fmt: skip


@pytest.mark.sampled(2)
@NARROW
@pytest.mark.parametrize("name", slow_but(("one block", "ragged, filling"), CASES))
def test_follows_the_twin(name, bits):
    asked, options = CASES[name]
    assert follow(asked, bits=bits, **options) == 0, "these seeds leave no victim too close to call"


@pytest.mark.gpu  # the interpreter multiplies the bits of bfloat16 as integers
@NARROW
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_bfloat16_follows_the_twin(D, bits):
    assert follow(rule("mean"), C=300, D=D, G=4, dtype=BF16, splits=3, bits=bits) == 0


def written(k_BHD, v_BHD, bits, centre=None):
    """The entries that the kernels write for new tokens, and those that torch writes. centre: of the keys [B,H,1,D]."""
    (B, H, D), rng = k_BHD.shape, torch.Generator().manual_seed(0)
    slots = filled(B, H, 1, D, 3, k_BHD.dtype, rng)
    both = codecs(bits, D, D, k_BHD.dtype)
    if centre is not None:
        both = centre_codecs(both, centre)
    slots.keys, slots.values = (codec.encode(t) for codec, t in zip(both, (slots.keys, slots.values), strict=True))
    at, q = slots.slot.clone()[..., None, None], token(B, H, 1, D, k_BHD.dtype, rng)[0]
    launch((q, k_BHD, v_BHD), slots, Rule(evicts=False), scale=1.0, codecs=both)
    found = (t.take_along_dim(at, 2)[:, :, 0] for t in (slots.keys, slots.values))
    return tuple(found), tuple(codec.encode(x[:, :, None])[:, :, 0] for codec, x in zip(both, (k_BHD, v_BHD), strict=True))


@NARROW
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("D", [8, 24, 40, 64, 72, 80, 96, 112, 128, 160, 256])
def test_a_new_token_is_rounded_as_torch_rounds_it(D, dtype, bits):
    """To the last byte; ties go to even codes, and groups of equal numbers keep them."""
    if triton_backend.reason("decode", Case("cuda", dtype, D, bits=bits)) is not None:
        pytest.skip("left to torch")
    k, v = (torch.randn(1, 3, D, generator=torch.Generator().manual_seed(D + seed)).to(dtype) * 3 for seed in (0, 1))
    k[0, 1], v[0, 1] = 0.1, (torch.arange(D) % 2**bits) / 2
    v[0, 1, :2] = torch.tensor([0.0, 2.0**bits - 1])
    mine, theirs = written(k, v, bits)
    for got, want in zip(mine, theirs, strict=True):
        assert torch.equal(got, want)


@NARROW
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("D", [24, 64, 96])
def test_a_new_key_is_rounded_around_its_head_s_centre(D, dtype, bits):
    """To the last byte; a key that is the centre stays it."""
    (k, v), rng = (token(2, 3, 1, D, dtype, torch.Generator().manual_seed(seed))[1] for seed in (0, 1)), torch.Generator()
    centre = torch.randn(2, 3, 1, D, generator=rng.manual_seed(2)).to(dtype) * 100
    k = k + centre[:, :, 0]
    k[1, 2] = centre[1, 2, 0]
    mine, theirs = written(k, v, bits, centre)
    for got, want in zip(mine, theirs, strict=True):
        assert torch.equal(got, want)
    both = centre_codecs(codecs(bits, D, D, dtype), centre)
    assert torch.equal(both[0].decode(mine[0][:, :, None])[1, 2], centre[1, 2])


@NARROW
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_stay_so(bad, bits):
    """In the group of such a number, and in no other."""
    k, v = torch.arange(128.0).view(1, 2, 64) + 0.5, torch.ones(1, 2, 64)
    k[0, 0, 40] = bad
    (entry, _), _ = written(k, v, bits)
    got = codecs(bits, 64, 64, F32)[0].decode(entry)
    assert not got[0, 0, 32:].isfinite().any() and got[0, 0, :32].isfinite().all() and got[0, 1].isfinite().all()


@NARROW
def test_attention_sees_the_rounded_token(bits):
    """A head that holds nothing but the new token returns its value as it was written."""
    rng = torch.Generator().manual_seed(0)
    slots, new = filled(2, 2, 4, 64, 1, F32, rng), token(2, 2, 4, 64, F32, rng)
    both = codecs(bits, 64, 64, F32)
    slots.keys, slots.values = (codec.encode(t) for codec, t in zip(both, (slots.keys, slots.values), strict=True))
    out = launch(new, slots, rule("sum"), scale=0.125, tau=1.5, codecs=both)
    close(out, both[1].cached(new[2])[:, :, None].expand_as(out), 1e-6, "output")


def test_entries_whose_scales_are_not_aligned_are_left_to_torch():
    def why(dtype, D, bits):
        return triton_backend.reason("decode", Case("cuda", dtype, D, bits=bits))

    assert why(BF16, 128, 8) is why(BF16, 128, 4) is why(F32, 64, 4) is why(F16, 37, 16) is None
    assert "37 numbers of 8 bits" in why(F16, 37, 8) and "66 numbers of 4 bits" in why(F16, 66, 4)
    assert "full" not in str(triton_backend.reason("statistics", Case("cuda", F16, 64, bits=8)))


@NARROW
def test_the_operator_of_compiled_steps_knows_bits_cap_and_sinks(bits):
    """It gets tensors and plain values, and must read the same entries."""
    rng = torch.Generator().manual_seed(0)
    centre = torch.randn(1, 2, 1, 64, generator=rng)
    both, outs = centre_codecs(codecs(bits, 64, 64, F32), centre), []
    start, new = filled(1, 2, 2, 64, 20, F32, rng), [t.contiguous() for t in token(1, 2, 2, 64, F32, rng)]
    for operator in (False, True):
        slots = start.copy()
        slots.keys, slots.values = (codec.encode(t) for codec, t in zip(both, (slots.keys, slots.values), strict=True))
        tensors = slots.keys, slots.values, slots.positions, slots.slot, slots.newest
        if operator:
            plain = None, None, 3.0, sinks(2, 2), *(None,) * 6, 1.0, bits, centre
            outs.append(triton_backend.compiled_step(*new, *tensors, [], "", "", "", 1.0, "recency", 0.1, *plain))
        else:
            outs.append(launch(new, slots, Rule(value="recency"), scale=0.1, softcap=3.0, sinks=sinks(2, 2), codecs=both))
    assert torch.equal(*outs)
