"""Triton for tests: its interpreter where there is no GPU. To be imported before anything that defines a kernel."""

import os
from functools import partial

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is made
pytest.importorskip("triton")

from tests.backends import triton_twins  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
HALF = torch.float16
make, tail = partial(triton_twins.make, device=DEVICE), partial(triton_twins.tail, device=DEVICE)
