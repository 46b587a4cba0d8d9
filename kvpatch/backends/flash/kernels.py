"""FlashAttention kernels that may be installed, the cases that each takes, and its call.

    flash-attn 3          Hopper; no ALiBi
    flash-attn 4          Hopper and newer (flash_attn.cute); no ALiBi
    cuDNN                 as torch builds it, on Hopper and newer data center GPUs; whole prompts without padding
    flash-attn 2          ALiBi and everything above
    torch's own           FlashAttention 2 as torch builds it for CUDA; no ALiBi

Modules are recognized by the arguments of their functions, not by their names: empty packages of these names exist,
flash_attn 2 contains an early flash_attn.cute that returns no log-sum-exp, and kernels of the Hugging Face hub have names of
their own. Those are used if the process has loaded them, as a model does that is loaded with
attn_implementation="kernels-community/flash-attn3"; nothing is fetched here. Nothing is imported before `kernels` is called.

In a kernel's layout, N counts query heads and T the tokens of all sequences laid end to end.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..device import find_capability
from ..protocol import Case

_LOG = logging.getLogger(__name__)
ANY = range(8, 1000)  # major compute capabilities


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end: the start of each and the end of the last, int32, and the longest length in tokens."""

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Mask:
    """Scale and mask besides the causal one.

    scale: factor of the logits. left: columns that a row sees before its own; None for all. slopes: ALiBi slopes [N], or None.
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
        majors: major compute capabilities of the devices that it runs on.
        head: tells whether it takes the head size of a case.
        fits: tells whether it takes these tensors, under settings that the user may change between calls.
        ragged: ragged(q, k, v, once, starts, used, longest, scale) attends from q [N,G,D], one token per KV head, to the
            first `used` entries of every segment; once: 0 to N, the starts of the tokens; None if the kernel cannot.
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Mask, Packing | None], tuple[Tensor, Tensor]]
    alibi: bool = False
    window: bool = True
    padding: bool = True
    past: bool = True
    gradients: bool = True
    majors: range = ANY
    head: Callable[[Case], bool] = lambda case: True
    fits: Callable[[Tensor, Tensor, Tensor], bool] = lambda q, k, v: True
    ragged: Callable[..., Tensor] | None = None


# ---- packages ----


@dataclass(frozen=True)
class Generation:
    """A generation of FlashAttention, found by the arguments of its two functions.

    arguments: those that tell it from other generations, besides COMMON. asks: argument that asks for the log-sum-exp; None if
    it is always returned. endless: side of a window without a limit. limits: fields of its Kernel.
    """

    arguments: frozenset[str]
    asks: str | None
    endless: int | None = -1
    limits: dict[str, Any] = field(default_factory=dict)

    def find_kernels(self, modules: dict[str, Any]) -> Iterator[Kernel]:
        """Yield a Kernel for each module (`modules`: installed, by name) of this generation; for `kernels`."""
        for name, module in modules.items():
            functions = [getattr(module, function, None) for function in ("flash_attn_func", "flash_attn_varlen_func")]
            if all(callable(f) and self.arguments | COMMON <= set(inspect.signature(f).parameters) for f in functions):
                yield self._make_kernel(name, module)

    def _make_kernel(self, name: str, module: Any) -> Kernel:
        """Return a Kernel that calls a flash-attn module's functions with this generation's arguments; for `find_kernels`."""

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
            """Return a prompt's output and log-sum-exp by the module, in the shapes of Kernel. `_call_kernel` calls it."""
            left = mask.left
            if mask.slopes is not None:
                # Under a causal mask flash-attn 2 adds slope * column, so that its log-sum-exp belongs to other logits and is
                # coarse for large columns. Under a window it adds -slope * distance, as kvpatch does: a window of all tokens.
                longest = k.shape[1] if packing is None else packing.longest
                left = longest - 1 if left is None else min(left, longest - 1)
            options: dict[str, Any] = {
                "softmax_scale": mask.scale,
                "causal": True,
                "window_size": (self.endless, self.endless) if left is None else (left, 0),  # endless: no limit on a side
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }
            if self.asks is not None:  # the argument that asks for the log-sum-exp
                options[self.asks] = True
            if mask.slopes is not None:
                options["alibi_slopes"] = mask.slopes
            if packing is None:
                return module.flash_attn_func(q, k, v, **options)[:2]
            ends = {f"cu_seqlens_{side}": packing.starts for side in "qk"}
            lengths = {f"max_seqlen_{side}": packing.longest for side in "qk"}
            return module.flash_attn_varlen_func(q, k, v, **ends, **lengths, **options)[:2]

        def ragged(
            q: Tensor, k: Tensor, v: Tensor, once: Tensor, starts: Tensor, used: Tensor, longest: int, scale: float
        ) -> Tensor:
            """Return a decode step's output over heads of different lengths, in the shapes of Kernel; for `ragged_step`."""
            ends = {"cu_seqlens_q": once, "cu_seqlens_k": starts, "seqused_k": used}
            lengths = {"max_seqlen_q": 1, "max_seqlen_k": longest}
            out = module.flash_attn_varlen_func(q, k, v, **ends, **lengths, softmax_scale=scale)
            return out if isinstance(out, Tensor) else out[0]

        takes_used = "seqused_k" in inspect.signature(module.flash_attn_varlen_func).parameters
        return Kernel(name, attend, **self.limits, ragged=ragged if takes_used else None)


def _takes_size(case: Case) -> bool:
    """Tell whether flash-attn 4 takes the head size; only Hopper's kernel has all sizes between 128 and 256."""
    major = find_capability()
    return case.head_dim <= 128 or major in (None, 9) or (case.head_dim == 256 and major in (10, 11))


HOPPER, NEWER = range(9, 10), range(9, 1000)
COMMON = frozenset({"softmax_scale", "causal", "window_size", "deterministic"})
THREE = Generation(frozenset({"pack_gqa", "return_attn_probs"}), "return_attn_probs", limits={"majors": HOPPER})
THREE_OF_VLLM = Generation(frozenset({"pack_gqa", "s_aux", "cp_world_size"}), None, limits={"majors": HOPPER})
FOUR = Generation(frozenset({"return_lse"}), "return_lse", endless=None, limits={"majors": NEWER, "head": _takes_size})
TWO = Generation(frozenset({"alibi_slopes", "return_attn_probs"}), "return_attn_probs", limits={"alibi": True})

MODULES = {"flash_attn_interface": "flash-attn-3", "flash_attn.cute": "flash-attn-4", "flash_attn": "flash-attn"}


def _import_installed() -> dict[str, Any]:
    """Import the installed modules of MODULES, when `kernels` first looks for kernels; return them by name and version."""
    modules = {}
    for name, distribution in MODULES.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # flash_attn 2 raises this too for its own flash_attn.cute
            continue
        except Exception as error:  # an extension built for another torch, a compiler that finds no GPU
            _LOG.warning("[kvpatch] %s is installed but cannot be imported (%s); attention goes another way.", name, error)
            continue
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = getattr(module, "__version__", "")
        modules[f"{name} {version}".rstrip()] = module
    return modules


def _list_loaded() -> dict[str, Any]:
    """Return the modules of the Hugging Face hub that this process has loaded by the package `kernels`, by repository."""
    loaded: Any = getattr(sys.modules.get("kernels"), "get_loaded_kernels", tuple)()
    return {kernel.repo_info.repo_id if kernel.repo_info else kernel.metadata.name: kernel.module for kernel in loaded}


# ---- operators ----


def _three_operator(modules: dict[str, Any]) -> Iterator[Kernel]:
    """Yield a Kernel of flash-attn 3's operator: before 2026 the package's functions return no log-sum-exp. modules: unused."""
    operator = getattr(torch.ops.flash_attn_3, "fwd", None)
    needed = {"cu_seqlens_q", "max_seqlen_k", "softmax_scale", "is_causal", "window_size_left", "num_splits"}
    if operator is None or not needed <= {argument.name for argument in operator.default._schema.arguments}:
        return

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """Return a prompt's output and log-sum-exp by the operator, in the shapes of Kernel. `_call_kernel` calls it."""
        options: dict[str, Any] = {"softmax_scale": mask.scale, "is_causal": True, "num_splits": 1}
        if mask.left is not None:
            options |= {"window_size_left": mask.left, "window_size_right": 0}
        if packing is not None:
            options |= {f"cu_seqlens_{side}": packing.starts for side in "qk"}
            options |= {f"max_seqlen_{side}": packing.longest for side in "qk"}
        return torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2]

    yield Kernel("flash_attn_3's operator", attend, gradients=False, majors=HOPPER)


def _find_cudnn(modules: dict[str, Any]) -> Iterator[Kernel]:
    """Yield cuDNN's attention where torch itself prefers it to its flash kernel: on the same GPUs, from the same version.

    torch's sdp_utils.cpp (check_prefer_cudnn_attention) has the version, the GPUs and the variable. `can_use_cudnn_attention`
    says no to one key alone, to deterministic algorithms, and where the user has switched cuDNN off. modules: unused.
    """
    version = torch.backends.cudnn.version()
    if version is None or version <= 91500 or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """Return a whole prompt's output and log-sum-exp by cuDNN, in the shapes of Kernel. `_call_kernel` calls it."""
        inputs = (t.transpose(1, 2) for t in (q, k, v))
        call = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = call(*inputs, None, True, 0.0, True, False, scale=mask.scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Tell whether torch would give these tensors to cuDNN under the user's present settings, as Kernel.fits says."""
        heads_first: list[Any] = [t.transpose(1, 2) for t in (q, k, v)]
        params = torch.backends.cuda.SDPAParams(*heads_first, None, 0.0, True, q.shape[2] != k.shape[2])  # type: ignore[call-arg]
        return torch.backends.cuda.can_use_cudnn_attention(params)

    yield Kernel(
        f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}",
        attend,
        window=False,
        padding=False,
        past=False,  # its causal mask begins at the first key
        majors=range(9, 11),
        head=lambda case: case.head_dim <= 128,
        fits=fits,
    )


def _find_torch(modules: dict[str, Any]) -> Iterator[Kernel]:
    """Yield the flash kernel of torch itself, if this build has one that runs. `kernels` lists it last. modules: unused."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None or not torch.backends.cuda.is_flash_attention_available():
        return
    takes = {argument.name for argument in operator.default._schema.arguments}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packing: Packing | None) -> tuple[Tensor, Tensor]:
        """Return a prompt's output and log-sum-exp by torch's operator, in the shapes of Kernel. `_call_kernel` calls it."""
        starts = None if packing is None else packing.starts
        longest_q, longest_k = (q.shape[1], k.shape[1]) if packing is None else (packing.longest,) * 2
        window = {} if mask.left is None else {"window_size_left": mask.left, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest_q, longest_k, 0.0, True, False, scale=mask.scale, **window
        )[:2]

    def ragged(
        q: Tensor, k: Tensor, v: Tensor, once: Tensor, starts: Tensor, used: Tensor, longest: int, scale: float
    ) -> Tensor:
        """Return a decode step's output over heads of different lengths by torch's operator; `ragged_step` calls it."""
        return torch.ops.aten._flash_attention_forward(
            q, k, v, once, starts, 1, longest, 0.0, False, False, scale=scale, seqused_k=used
        )[0]

    hip = torch.version.hip is not None  # ROCm's kernel returns a log-sum-exp of another shape and has no window
    yield Kernel(
        f"torch's flash kernel (torch {torch.__version__.split('+')[0]})",
        attend,
        window=not hip and {"window_size_left", "window_size_right"} <= takes,
        padding=not hip,
        head=lambda case: case.head_dim <= 192 or not case.gradients,  # larger heads have no backward on small GPUs
        ragged=ragged if "seqused_k" in takes else None,
    )


SOURCES: tuple[Callable[[dict[str, Any]], Iterator[Kernel]], ...] = (
    THREE.find_kernels, THREE_OF_VLLM.find_kernels, _three_operator, FOUR.find_kernels,
    _find_cudnn, TWO.find_kernels, _find_torch,
)  # fmt: skip
_kernels: tuple[Kernel, ...] | None = None
_hub: tuple[str, ...] = ()


def kernels() -> tuple[Kernel, ...]:
    """Return the callable kernels, best first. Searches at the first call, and when the kernels from the Hub have changed."""
    global _kernels, _hub
    loaded = _list_loaded()
    if _kernels is None or tuple(loaded) != _hub:
        modules = {**_import_installed(), **loaded}  # loaded: from the Hub, by the user
        _kernels, _hub = tuple(kernel for source in SOURCES for kernel in source(modules)), tuple(loaded)
    return _kernels
