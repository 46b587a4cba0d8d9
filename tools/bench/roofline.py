"""What a machine allows at best, measured: how many bytes and multiplications per second, and what follows for a model.

A generated token must read every weight and every key and value that is kept; a prompt must be multiplied with every weight,
and each query with the keys it sees. The times below are therefore lower bounds: launches, softmax, norms, scores and all
else that a model does are not in them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .models import timed

ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """The best that was measured: bytes per second from memory, and floating-point operations per second of a matmul."""

    bytes_per_s: float
    flops_per_s: float

    def line(self) -> dict[str, float]:
        """For JSON: GB/s and GFLOP/s."""
        return {"GB/s": round(self.bytes_per_s / 1e9, 2), "GFLOP/s": round(self.flops_per_s / 1e9, 1)}


def ceilings(device: str = "cpu", dtype: torch.dtype = torch.float32, small: bool = False) -> Ceilings:
    """Measure `device` with the threads that torch uses now, in some seconds; `small`: sizes that try the code only."""
    return _measured(device, dtype, small, torch.get_num_threads())


@cache
def _measured(device: str, dtype: torch.dtype, small: bool, threads: int) -> Ceilings:
    width = 256 if small else 2048 if device == "cpu" else 8192
    x = torch.ones(width, width, device=device, dtype=dtype)
    flops_per_s = 2 * width**3 / fastest(lambda: torch.mm(x, x), device)
    size = (4 << 20) if small else (512 << 20) if device == "cpu" else (4 << 30)
    return Ceilings(bandwidth(device, dtype, size), flops_per_s)


def bandwidth(device: str, dtype: torch.dtype, size: int) -> float:
    """Bytes per second over buffers of `size` bytes, which should be larger than any cache.

    They are read alone (a sum), copied, and combined (a + 2 b); the fastest of these counts.
    """
    a, b, out = (torch.ones(size // dtype.itemsize, device=device, dtype=dtype) for _ in range(3))
    moved = {
        size: a.sum,
        2 * size: lambda: out.copy_(a),
        3 * size: lambda: torch.add(a, b, alpha=2, out=out),
    }
    return max(nbytes / fastest(work, device) for nbytes, work in moved.items())


def fastest(work: Callable[[], Any], device: str) -> float:
    """Seconds of the fastest of a few rounds, after one that does not count: of the CPU, or until a GPU is done."""
    times = [timed(work, device)[1] for _ in range(ROUNDS + 1)]
    return max(min(times[1:]), 1e-9)


# ---- models ----


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one token reads: all, but of an input embedding that is no output layer only a row."""
    into, out = model.get_input_embeddings(), model.get_output_embeddings()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    tied = out is not None and out.weight is into.weight
    return total if tied else total - into.weight.numel() * into.weight.element_size()


def decode_ms(model: PreTrainedModel, kv_bytes: float, ceilings: Ceilings) -> float:
    """The least time of one generated token per row, in ms; kv_bytes: keys and values of all rows."""
    return 1000 * (weight_bytes(model) + kv_bytes) / ceilings.bytes_per_s


def prompt_ms(
    model: PreTrainedModel, n: int, ceilings: Ceilings, batch: int = 1, budget: int | None = None, block: int = 0
) -> float:
    """The least time of a prompt of `n` tokens, in ms: only the last token's logits are wanted, and no key of the future.

    With a `budget` of tokens, a block of `block` tokens sees the budget and itself.
    """
    last = model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not last]
    seen = n * (n + 1) // 2
    if budget is not None:
        seen = sum(min(budget, t - t % block) + t % block + 1 for t in range(n))
    width, layers = model.get_input_embeddings().embedding_dim, model.config.num_hidden_layers  # heads x head size
    flops = 2 * n * sum(linear) + 2 * last.weight.numel() + 4 * width * layers * seen
    return 1000 * batch * flops / ceilings.flops_per_s


def beside(ms: float, bound: float, ceilings: Ceilings) -> dict[str, Any]:
    """What a JSON line says of a time `ms`: its lower bound, how many times that it takes, and the ceilings."""
    return {"roof_ms": bound, "roof_ratio": ms / bound, "ceilings": ceilings.line()}
