"""FlashAttention kernels that may be installed, the cases that each takes, and its call.

    flash_attn 2.x        ALiBi and everything below
    flash_attn.cute 4.x   Hopper and newer; no ALiBi
    torch's own           FlashAttention 2 as torch builds it for CUDA; no ALiBi

They are recognized by the arguments of their functions, not by their names: empty packages of these names exist, and
flash_attn 2 contains an early flash_attn.cute that returns no log-sum-exp. Nothing is imported before `kernels` is called.

In a kernel's layout, N counts query heads and T the tokens of all sequences laid end to end.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..protocol import Case

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end: the start of each and the end of the last, int32, and the longest length in tokens."""

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Mask:
    """Scale and mask besides the causal one.

    Attributes:
        scale: factor of the logits.
        left: columns that a row sees before its own; None for all.
        slopes: ALiBi slopes [N], or None.
    """

    scale: float
    left: int | None
    slopes: Tensor | None


@dataclass(frozen=True)
class Kernel:
    """Kernel of one package, and the cases that it takes.

    Attributes:
        name: with version.
        attend: attend(q, k, v, mask, packing) takes [B,Q,N,D], or [T,N,D] with a packing, and returns the output in that
            layout and the log-sum-exp [B,N,Q], or [N,T].
        alibi, window, padding, past, gradients: whether it takes cases with these properties.
        capability: least compute capability of the device, major number.
        head: tells whether it takes the head size of a case.
        ragged: ragged(q, k, v, once, starts, used, longest, scale) attends from q [N,G,D], one token per KV head, to the
            first `used` entries of every segment; None if the kernel cannot.
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Mask, Packing | None], tuple[Tensor, Tensor]]
    alibi: bool = False
    window: bool = True
    padding: bool = True
    past: bool = True
    gradients: bool = True
    capability: int = 8
    head: Callable[[Case], bool] = lambda case: True
    ragged: Callable[..., Tensor] | None = None


COMMON = ("softmax_scale", "causal", "window_size", "deterministic")
_kernels: tuple[Kernel, ...] | None = None


def kernels() -> tuple[Kernel, ...]:
    """Return the kernels that can be called here, best first; the search runs once."""
    global _kernels
    if _kernels is None:
        _kernels = tuple(kernel for kernel in (_flash_attn(), _cute(), _torch()) if kernel is not None)
    return _kernels


def _load(name: str, wanted: set[str]) -> Any:
    """Import a module; returns it if its two attention functions take the arguments `wanted`, else None."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:  # flash_attn 2 raises this too for its own flash_attn.cute
        return None
    except Exception as error:  # an extension built for another torch, a compiler that finds no GPU
        _LOG.warning("[kvpatch] %s is installed but cannot be imported (%s); attention goes another way.", name, error)
        return None
    functions = [getattr(module, function, None) for function in ("flash_attn_func", "flash_attn_varlen_func")]
    fits = all(callable(f) and wanted <= set(inspect.signature(f).parameters) for f in functions)
    return module if fits else None


def _flash_attn() -> Kernel | None:
    module = _load("flash_attn", {*COMMON, "alibi_slopes", "return_attn_probs"})
    if module is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
        left = mask.left
        if mask.slopes is not None:
            # Under a causal mask the kernel adds slope * column, so that its log-sum-exp belongs to other logits and is
            # coarse for large columns. Under a window it adds -slope * distance, as kvpatch does: pass a window of all tokens.
            longest = k.shape[1] if packing is None else packing.longest
            left = longest - 1 if left is None else min(left, longest - 1)
        options = {
            "softmax_scale": mask.scale,
            "causal": True,
            "window_size": (-1 if left is None else left, 0),
            "alibi_slopes": mask.slopes,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "return_attn_probs": True,  # without dropout: the log-sum-exp alone
        }
        if packing is None:
            return module.flash_attn_func(q, k, v, **options)[:2]
        starts, longest = packing.starts, packing.longest
        return module.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **options)[:2]

    return Kernel(f"flash_attn {getattr(module, '__version__', '2')}", attend, alibi=True)


def _cute() -> Kernel | None:
    module = _load("flash_attn.cute", {*COMMON, "return_lse"})
    if module is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
        options = {
            "softmax_scale": mask.scale,
            "causal": True,
            "window_size": (mask.left, None if mask.left is None else 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "return_lse": True,
        }
        if packing is None:
            return module.flash_attn_func(q, k, v, **options)
        ends = {f"cu_seqlens_{side}": packing.starts for side in "qk"}
        longest = {f"max_seqlen_{side}": packing.longest for side in "qk"}
        return module.flash_attn_varlen_func(q, k, v, **ends, **longest, **options)

    def ragged(
        q: Tensor, k: Tensor, v: Tensor, once: Tensor, starts: Tensor, used: Tensor, longest: int, scale: float
    ) -> Tensor:
        ends = {"cu_seqlens_q": once, "cu_seqlens_k": starts, "seqused_k": used, "max_seqlen_q": 1, "max_seqlen_k": longest}
        return module.flash_attn_varlen_func(q, k, v, **ends, softmax_scale=scale)[0]

    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        version = "4"
    takes_used = "seqused_k" in inspect.signature(module.flash_attn_varlen_func).parameters
    name = f"flash_attn.cute {version}"
    return Kernel(name, attend, capability=9, head=_cute_head, ragged=ragged if takes_used else None)


def _cute_head(case: Case) -> bool:
    """Tell whether the head size is taken; only Hopper's kernel has all sizes between 128 and 256."""
    major = capability()
    return case.head_dim <= 128 or major in (None, 9) or (case.head_dim == 256 and major in (10, 11))


def _torch() -> Kernel | None:
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None or not torch.backends.cuda.is_flash_attention_available():
        return None
    takes = {argument.name for argument in operator.default._schema.arguments}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
        starts = None if packing is None else packing.starts
        longest_q, longest_k = (q.shape[1], k.shape[1]) if packing is None else (packing.longest,) * 2
        window = {} if mask.left is None else {"window_size_left": mask.left, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest_q, longest_k, 0.0, True, False, scale=mask.scale, **window
        )[:2]

    def ragged(
        q: Tensor, k: Tensor, v: Tensor, once: Tensor, starts: Tensor, used: Tensor, longest: int, scale: float
    ) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, once, starts, 1, longest, 0.0, False, False, scale=scale, seqused_k=used
        )[0]

    hip = torch.version.hip is not None  # ROCm's kernel returns a log-sum-exp of another shape and has no window
    return Kernel(
        f"torch's flash kernel (torch {torch.__version__.split('+')[0]})",
        attend,
        window=not hip and {"window_size_left", "window_size_right"} <= takes,
        padding=not hip,
        head=lambda case: case.head_dim <= 192 or not case.gradients,  # larger heads have no backward on small GPUs
        ragged=ragged if "seqused_k" in takes else None,
    )


def capability() -> int | None:
    """Return the device's major compute capability, or None without a device."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
