"""Registers, shared memory, stack and spills of the Triton kernels as compiled for a GPU, without such a GPU.

`python -m tools.bench.kernel_report [sm_90 ...] [name ...]` compiles them, for bfloat16 where a row does not say float32, and
prints a table, for sm_90 if no chip is named; names select rows by their beginning. A row of CALLS names a function of the
backend: it is called on CPU tensors while stand-ins take the place of its module's kernels, and every launch is compiled with
the arguments, warps and stages that it had. No second description of a kernel can go stale. Needs Triton with its NVIDIA
tools, and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from kvpatch.backends.entries import FULL, centre_codecs, codecs
from kvpatch.errors import KVPatchError

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
H, C, Q = 8, 8192, 512  # a layer's KV heads, slots and rows of a prompt
SHAPES = tuple((D, G) for D in (64, 128) for G in (1, 4))
ONE_SHAPE = ((128, 4),)
NARROW_SHAPES = (*SHAPES, (96, 4), (256, 8))
FLOAT, FLOAT_SHAPES = torch.float32, ((64, 4), (128, 4))
Run = Callable[[Any, int, int], object]
ALL = ("sum", "squares", "count", "gumbel", "observed")


@dataclass(frozen=True)
class Call:
    """A function that launches kernels of `module` of the Triton backend; `run` gets the module, D and G."""

    name: str
    module: str
    run: Run
    shapes: Sequence[tuple[int, int]] = SHAPES


@dataclass(frozen=True)
class Row:
    """One kernel as compiled. shared: bytes of a block; stack: bytes of a thread; LOCAL, LDL and STL: bytes and instructions
    of spilled registers; HGMMA, HMMA: tensor core instructions; LDGSTS: copies into shared memory that run ahead; ahead: groups
    of these that the kernel's loop leaves under way when it waits for one."""

    chip: int
    call: str
    kernel: str
    D: int
    G: int
    warps: int
    registers: int
    shared: int
    stack: int
    local: int
    LDL: int
    STL: int
    HGMMA: int
    HMMA: int
    LDGSTS: int
    ahead: int

    @property
    def spills(self) -> bool:
        return any((self.stack, self.local, self.LDL, self.STL))


def _some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def decode_step(
    statistics: tuple[str, ...],
    value: str,
    C: int = C,
    B: int = 1,
    offset: int = 0,
    bits: int = FULL,
    page: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **geometry: Any,
) -> Run:
    """A step whose heads hold different numbers of tokens, with windows protected.

    offset: entries before a tensor in memory, as in a view of stacked layers. bits: of keys and values. page: slots of an
    engine's page, of which a head has one if it has C. sinks_HG: whether there are attention sinks.
    """

    def view(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(math.prod(shape) + offset, dtype=dtype)[offset:].view(shape)

    def run(module: Any, D: int, G: int) -> object:
        state = {name: view(B, H, C, dtype=torch.float32) for name in statistics}
        state["noise"] = view(B, H, C, G, dtype=torch.float32)
        rule = module.Rule(statistics, value=value)
        slot_BH, positions_BHC, newest_B = view(B, H), view(B, H, C), view(B)
        of_slots = centre_codecs(codecs(bits, D, D, dtype), view(B, H, 1, D, dtype=dtype))
        keys, values = (codec.encode(_some(B, H, C, D, dtype=dtype)) for codec in of_slots)
        if page is not None:
            geometry["begin_N"] = view(B * H, *(() if page == C else (-(-C // page),)))
            geometry["page"] = None if page == C else page
        slots = keys, values, positions_BHC, slot_BH, newest_B
        new = (_some(*shape, dtype=dtype) for shape in ((B, H, G, D), (B, H, D), (B, H, D)))
        limits = {"keep_BH": view(B, H), "first_B": view(B), "recent_B": view(B)}
        slopes_HG = torch.zeros(H, G) if geometry.get("sliding") else None
        given = geometry | {"sinks_HG": torch.zeros(H, G) if geometry.get("sinks_HG") else None}
        return module.step(*new, *slots, state, rule, scale=1.0, slopes_HG=slopes_HG, codecs=of_slots, **limits, **given)

    return run


def _prompt(extra: tuple[str, ...], D: int, G: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Queries, keys and values of a prompt, its positions and rows, and the `extra` tensors that its kernels may be given."""
    shapes = {"slopes_HG": (H, G), "sinks_HG": (H, G), "noise_BHTG": (1, H, Q, G), "lse_BHGQ": (1, H, G, Q)}
    qkv = [_some(*shape, dtype=dtype) for shape in ((1, H, G, Q, D), (1, H, Q, D), (1, H, Q, D))]
    places = [torch.zeros(1, H, Q, dtype=torch.long), torch.zeros(1, Q, dtype=torch.long)]
    return qkv, places, {name: torch.ones(shape) for name, shape in shapes.items() if name in extra}


def _forward(*extra: str, values: bool = True, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Run:
    """A prompt's attention, or its normalizers alone. extra: tensors to pass besides."""

    def run(module: Any, D: int, G: int) -> object:
        (q_BHGQD, k_BHTD, v_BHTD), places, tensors = _prompt(extra, D, G, dtype)
        return module.attend(q_BHGQD, k_BHTD, v_BHTD if values else None, *places, scale=1.0, **tensors, **options)

    return run


def _deaths() -> dict[str, Tensor]:
    return {"deaths_BHT": torch.zeros(1, H, Q, dtype=torch.int32)}


def _backward(*extra: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Run:
    """The gradients of a replay's attention. extra: tensors to pass besides."""

    def run(module: Any, D: int, G: int) -> object:
        qkv, places, tensors = _prompt(extra, D, G, dtype)
        attended = *_deaths().values(), qkv[0], torch.zeros(1, H, G, Q), qkv[0]
        return module.gradients(*qkv, *places, *attended, scale=1.0, **tensors, **options)

    return run


def _columns(names: tuple[str, ...], *extra: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Run:
    """A prompt's statistics. extra: tensors to pass besides."""

    def run(module: Any, D: int, G: int) -> object:
        (q_BHGQD, k_BHTD, _), places, tensors = _prompt(extra, D, G, dtype)
        lse_BHGQ, weights = torch.zeros(1, H, G, Q), {"scale": 1.0, "keys_BHQ": torch.ones(1, H, Q)}
        return module.column_statistics(q_BHGQD, k_BHTD, *places, lse_BHGQ, names, **weights, **tensors, **options)

    return run


CALLS = (
    Call("decode", "decode", decode_step(("sum", "squares"), "mean"), (*SHAPES, (256, 8), (128, 48))),
    Call("decode float32", "decode", decode_step(("sum",), "sum", dtype=FLOAT), ((64, 32), (128, 64), (256, 32))),
    Call("decode gumbel", "decode", decode_step(("gumbel",), "gumbel", tau=1.5), ONE_SHAPE),
    Call("decode all", "decode", decode_step(ALL, "count", tau=1.5, sliding=1000), ((128, 1), (128, 8))),
    Call("decode cap", "decode", decode_step(("sum", "squares"), "mean", softcap=50.0), ((128, 2), (256, 2))),
    Call("decode sinks", "decode", decode_step(("sum", "squares"), "mean", sinks_HG=True), ((64, 8),)),
    Call("decode cap sinks 4 bits", "decode", decode_step(("sum",), "sum", softcap=50.0, sinks_HG=True, bits=4), ONE_SHAPE),
    Call("decode one page", "decode", decode_step(("sum", "squares"), "mean", page=C), ONE_SHAPE),
    Call("decode pages", "decode", decode_step(("sum", "squares"), "mean", page=16), (*SHAPES, (256, 8))),
    Call("decode odd pages", "decode", decode_step(ALL, "count", page=7, tau=1.5, sliding=1000), ((128, 8),)),
    *(
        Call(f"decode {bits} bits", "decode", decode_step(("sum", "squares"), "mean", bits=bits), NARROW_SHAPES)
        for bits in (8, 4)
    ),
    Call("columns", "columns", _columns(("sum",)), (*SHAPES, (256, 2))),
    Call("columns squares", "columns", _columns(("sum", "squares")), ONE_SHAPE),
    Call("columns count", "columns", _columns(("count",)), ONE_SHAPE),
    Call("columns cap window", "columns", _columns(("sum",), softcap=50.0, sliding=1000), ((128, 4), (256, 2))),
    Call("columns ALiBi noise tau", "columns", _columns(("sum",), "slopes_HG", "noise_BHTG", tau=1.5), ((64, 1), (128, 1))),
    Call("columns float32", "columns", _columns(("sum", "squares"), dtype=FLOAT), FLOAT_SHAPES),
    Call("forward", "forward", _forward(holes=False), (*SHAPES, (256, 2))),
    Call("forward noise", "forward", _forward("noise_BHTG", holes=False), (*SHAPES, (256, 2))),
    Call("forward noise tau", "forward", _forward("noise_BHTG", tau=1.5), ONE_SHAPE),
    Call("forward ALiBi noise padding", "forward", _forward("slopes_HG", "noise_BHTG"), ((64, 1), (128, 1))),
    Call("forward cap window", "forward", _forward(softcap=50.0, sliding=1000), ((128, 4), (256, 2))),
    Call("forward cap noise", "forward", _forward("noise_BHTG", softcap=50.0), ((128, 4), (256, 2))),
    Call("forward sinks window", "forward", _forward("sinks_HG", sliding=128), ((64, 8),)),
    Call("forward sinks noise", "forward", _forward("sinks_HG", "noise_BHTG"), ((64, 8),)),
    Call("forward float32", "forward", _forward(holes=False, dtype=FLOAT), FLOAT_SHAPES),
    Call("forward ALiBi noise padding float32", "forward", _forward("slopes_HG", "noise_BHTG", dtype=FLOAT), FLOAT_SHAPES),
    Call("replay", "forward", _forward(**_deaths(), holes=False), (*SHAPES, (256, 2))),
    Call("replay window padding", "forward", _forward(**_deaths(), sliding=1000), ((128, 4), (256, 2))),
    Call("replay ALiBi", "forward", _forward("slopes_HG", **_deaths(), holes=False), ((64, 1), (128, 1))),
    Call("replay float32", "forward", _forward(**_deaths(), dtype=FLOAT), FLOAT_SHAPES),
    Call("replay gradients", "backward", _backward(holes=False), (*SHAPES, (96, 4), (256, 2))),
    Call("replay gradients window padding", "backward", _backward(sliding=1000), ((128, 4), (256, 2))),
    Call("replay gradients ALiBi", "backward", _backward("slopes_HG", holes=False), ((64, 1), (128, 1))),
    Call("replay gradients float32", "backward", _backward(dtype=FLOAT), FLOAT_SHAPES),
    Call("rows", "forward", _forward(values=False, holes=False), (*SHAPES, (256, 2))),
    Call("rows noise", "forward", _forward("noise_BHTG", "lse_BHGQ", values=False, holes=False), (*SHAPES, (256, 2))),
    Call("rows noise tau", "forward", _forward("noise_BHTG", values=False, tau=1.5), ONE_SHAPE),
    Call("rows noise float32", "forward", _forward("noise_BHTG", "lse_BHGQ", values=False, dtype=FLOAT), FLOAT_SHAPES),
)


@dataclass(frozen=True)
class Chip:
    """Stands for the driver of a GPU that is not there: Triton compiles for it."""

    number: int

    def get_current_device(self) -> int:
        return self.number  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)


@dataclass(frozen=True)
class _Noted:
    """Stands for a kernel and notes its launches."""

    kernel: triton.JITFunction
    launches: list[tuple[triton.JITFunction, tuple, dict]]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_call(call: Call, D: int, G: int, chip: int = 90, **options: Any) -> list[tuple[str, Any]]:
    """What `call` would start on sm_`chip`: names of kernels, and the kernels compiled. options: of Triton's, for all."""
    module = importlib.import_module(f"kvpatch.backends.triton.{call.module}")
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, triton.JITFunction)}
    if not kernels:
        raise KVPatchError("Triton's interpreter is on, which compiles nothing: unset TRITON_INTERPRET.")
    found: list[tuple[triton.JITFunction, tuple, dict]] = []
    before = {name: vars(module)[name] for name in (*kernels, "ELSEWHERE") if name in vars(module)}
    chosen_for = {"ELSEWHERE": divmod(chip, 10)} if "ELSEWHERE" in before else {}
    try:
        vars(module).update({name: _Noted(kernel, found) for name, kernel in kernels.items()} | chosen_for)
        call.run(module, D, G)
    finally:
        vars(module).update(before)
    triton.runtime.driver.set_active(Chip(chip))
    return [(kernel.__name__, kernel.warmup(*args, grid=(1,), **kwargs | options)) for kernel, args, kwargs in found]


def measure(chip: int, call: str, D: int, G: int, kernel: str, binary: Any) -> Row:
    """Count what cuobjdump shows of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        usage, code = (
            subprocess.run([str(TOOL), what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise KVPatchError(f"cuobjdump printed no resource usage but {usage!r}: Triton {triton.__version__} is not known here.")
    registers, stack, local = map(int, found.groups())
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in ("LDL", "STL", "HGMMA", "HMMA", "LDGSTS")}
    shared, warps = binary.metadata.shared, binary.metadata.num_warps
    ahead = max(map(int, re.findall(r"async_wait [^{]*\{num = (\d+)", binary.asm["ttgir"])), default=0)
    return Row(chip, call, kernel, D, G, warps, registers, shared, stack, local, **counts, ahead=ahead)


def rows(names: Sequence[str] = (), chips: Sequence[int] = (90,)) -> list[Row]:
    """Compile and measure the calls whose names begin with one of `names` (all, if there are none)."""
    if not TOOL.exists():
        raise KVPatchError(f"{TOOL} is missing: install a Triton wheel that has its NVIDIA tools.")
    calls = [call for call in CALLS if not names or call.name.startswith(tuple(names))]
    if not calls:
        raise KVPatchError(f"{', '.join(names)} names no row: use the beginning of {', '.join(call.name for call in CALLS)}.")
    found = []
    for chip, call in product(chips, calls):
        for D, G in call.shapes:
            found += [measure(chip, call.name, D, G, *compiled) for compiled in compile_call(call, D, G, chip)]
    return found


def main(words: Sequence[str]) -> None:
    chips = [int(word[3:]) for word in words if re.fullmatch(r"sm_\d+", word)]
    names = [word for word in words if not re.fullmatch(r"sm_\d+", word)]
    columns = list(Row.__dataclass_fields__)
    table = [columns] + [[str(getattr(row, name)) for name in columns] for row in rows(names, chips or (90,))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
