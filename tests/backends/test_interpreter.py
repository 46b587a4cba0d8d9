"""The kernels' tests would see a read or write outside a kernel's tensors."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs kernels itself"),
    pytest.mark.skipif(not hasattr(interpreter, "_interpreter"), reason="this Triton's interpreter is left as it is"),
]


@triton.jit
def copy_kernel(into, out_of, read, written, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(into + at, tl.load(out_of + at, mask=at < read, other=0.0), mask=at < written)


@pytest.mark.parametrize(("read", "written"), [(5, 5), (5, 4), (0, 5), (6, 5), (5, 6), (8, 8)])
def test_a_kernel_stays_within_its_tensors(read, written):
    """A view has five entries here, and its memory eight."""
    into, out_of = torch.zeros(8), torch.arange(8.0) + 1
    if max(read, written) <= 5:
        copy_kernel[(1,)](into[:5], out_of[:5], read, written, 8)
        assert torch.equal(into[:written], torch.where(torch.arange(written) < read, out_of[:written], 0.0))
    else:
        with pytest.raises(InterpreterError, match=r"copy_kernel (reads|writes) \d of \d entries outside its tensors"):
            copy_kernel[(1,)](into[:5], out_of[:5], read, written, 8)
