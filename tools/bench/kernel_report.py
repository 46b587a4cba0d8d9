"""Registers, shared memory, stack and spills of the Triton kernels as compiled for an sm_90 GPU, without such a GPU.

`python -m tools.bench.kernel_report [name ...]` compiles them for bfloat16 and prints a table; names select rows by
their beginning. A row of CALLS names a function of the backend: it is called on CPU tensors while stand-ins record the launches
of its module's kernels, and every launch is compiled with the arguments, warps and stages that it had. No second description
of a kernel can go stale. Needs Triton with its NVIDIA tools, and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpatch.errors import KVPatchError

SM_90 = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
H, C, Q = 8, 2048, 512  # a layer's KV heads, slots and rows of a prompt; only their divisibility by 16 matters
SHAPES = tuple((D, G) for D in (64, 128) for G in (1, 4))
ONE_SHAPE = ((128, 4),)


@dataclass(frozen=True)
class Call:
    """A function that launches kernels of `module` of the Triton backend; `run` gets the module, D and G."""

    name: str
    module: str
    run: Callable[[Any, int, int], object]
    shapes: Sequence[tuple[int, int]] = SHAPES


@dataclass(frozen=True)
class Row:
    """One kernel as compiled. shared: bytes of a block; stack: bytes of a thread; LOCAL, LDL and STL: bytes and instructions
    of spilled registers; HGMMA, HMMA: tensor core instructions; LDGSTS: copies into shared memory that run ahead."""

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

    @property
    def spills(self) -> bool:
        return any((self.stack, self.local, self.LDL, self.STL))


def _some(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _decode(statistics: tuple[str, ...], value: str, **geometry: Any) -> Callable[[Any, int, int], object]:
    """A step whose heads hold different numbers of tokens, with windows protected."""

    def run(module: Any, D: int, G: int) -> object:
        state = {name: torch.zeros(1, H, C) for name in statistics} | {"noise": torch.zeros(1, H, C, G)}
        sizes = {name: torch.zeros(1, dtype=torch.long) for name in ("first_B", "recent_B")}
        rule = module.Rule(statistics, value=value)
        slot_BH, positions_BHC = torch.zeros(1, H, dtype=torch.long), torch.zeros(1, H, C, dtype=torch.long)
        slots = _some(1, H, C, D), _some(1, H, C, D), positions_BHC, slot_BH, torch.zeros(1, dtype=torch.long)
        new = _some(1, H, G, D), _some(1, H, D), _some(1, H, D)
        return module.step(*new, *slots, state, rule, scale=1.0, keep_BH=slot_BH, **sizes, **geometry)

    return run


def _forward(*extra: str, values: bool = True, **options: Any) -> Callable[[Any, int, int], object]:
    """A prompt's attention, or its normalizers alone. extra: tensors to pass besides."""

    def run(module: Any, D: int, G: int) -> object:
        positions_BHT, rows_BQ = torch.zeros(1, H, Q, dtype=torch.long), torch.zeros(1, Q, dtype=torch.long)
        known = {"slopes_HG": (H, G), "sinks_HG": (H, G), "noise_BHTG": (1, H, Q, G), "lse_BHGQ": (1, H, G, Q)}
        tensors = {name: torch.ones(known[name]) for name in extra}
        q_BHGQD, k_BHTD = _some(1, H, G, Q, D), _some(1, H, Q, D)
        v_BHTD = _some(1, H, Q, D) if values else None
        return module.attend(q_BHGQD, k_BHTD, v_BHTD, positions_BHT, rows_BQ, scale=1.0, **tensors, **options)

    return run


def _columns(names: tuple[str, ...], **options: Any) -> Callable[[Any, int, int], object]:
    """A prompt's statistics."""

    def run(module: Any, D: int, G: int) -> object:
        positions_BHT, rows_BQ = torch.zeros(1, H, Q, dtype=torch.long), torch.zeros(1, Q, dtype=torch.long)
        lse_BHGQ, keys_BHQ = torch.zeros(1, H, G, Q), torch.ones(1, H, Q)
        q_BHGQD, k_BHTD = _some(1, H, G, Q, D), _some(1, H, Q, D)
        return module.column_statistics(
            q_BHGQD, k_BHTD, positions_BHT, rows_BQ, lse_BHGQ, names, scale=1.0, keys_BHQ=keys_BHQ, **options
        )

    return run


CALLS = (
    Call("decode", "decode", _decode(("sum", "squares"), "mean")),
    Call("decode gumbel", "decode", _decode(("gumbel",), "gumbel", tau=1.5), ONE_SHAPE),
    Call("decode count window", "decode", _decode(("count",), "count", sliding=1000), ONE_SHAPE),
    Call("columns", "columns", _columns(("sum",))),
    Call("columns squares", "columns", _columns(("sum", "squares")), ONE_SHAPE),
    Call("columns count", "columns", _columns(("count",)), ONE_SHAPE),
    Call("columns cap", "columns", _columns(("sum",), softcap=50.0), ONE_SHAPE),
    Call("forward", "forward", _forward(holes=False)),
    Call("forward noise", "forward", _forward("noise_BHTG", holes=False)),
    Call("forward ALiBi noise padding", "forward", _forward("slopes_HG", "noise_BHTG"), ((64, 1), (128, 1))),
    Call("forward cap window", "forward", _forward(softcap=50.0, sliding=1000), ONE_SHAPE),
    Call("forward sinks window", "forward", _forward("sinks_HG", sliding=128), ((64, 8),)),
    Call("rows", "forward", _forward(values=False, holes=False)),
    Call("rows noise", "forward", _forward("noise_BHTG", "lse_BHGQ", values=False, holes=False)),
    Call("rows noise tau", "forward", _forward("noise_BHTG", values=False, tau=1.5), ONE_SHAPE),
)


class _Noted:
    """Stands for a kernel and notes the arguments of its launches."""

    def __init__(self, kernel: triton.JITFunction, launches: list[tuple[triton.JITFunction, tuple, dict]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def launches(call: Call, D: int, G: int) -> list[tuple[triton.JITFunction, tuple, dict]]:
    """What `call` would start: kernels with their arguments and options."""
    module = importlib.import_module(f"kvpatch.backends.triton.{call.module}")
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, triton.JITFunction)}
    if not kernels:
        raise KVPatchError("Triton's interpreter is on, which compiles nothing: unset TRITON_INTERPRET.")
    found: list[tuple[triton.JITFunction, tuple, dict]] = []
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Noted(kernel, found))
        call.run(module, D, G)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return found


def compiled(kernel: triton.JITFunction, args: tuple, kwargs: dict) -> Any:
    """The kernel for sm_90, specialised to its arguments as a launch would."""
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in options}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    aligned: dict[tuple[int, ...], list] = {}
    for param in kernel.params:
        value, at = given.get(param.name, param.default), (param.num,)
        whole = isinstance(value, int) and not isinstance(value, bool) and not param.do_not_specialize
        if param.is_constexpr or value is None or (whole and value == 1):
            signature[param.name], constants[at] = "constexpr", value
            continue
        signature[param.name] = _type(value)
        if isinstance(value, Tensor) or (whole and value % 16 == 0):
            aligned[at] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=SM_90, options=options)


def _type(value: object) -> str:
    """Triton's name for the type of a launch's argument."""
    if isinstance(value, Tensor):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.bool: "i1"}
        return f"*{names[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    return "i32" if isinstance(value, int) else "fp32"


def measure(call: str, D: int, G: int, kernel: str, binary: Any) -> Row:
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
    return Row(call, kernel, D, G, warps, registers, shared, stack, local, **counts)


def rows(names: Sequence[str] = ()) -> list[Row]:
    """Compile and measure the calls whose names begin with one of `names` (all, if there are none)."""
    if not TOOL.exists():
        raise KVPatchError(f"{TOOL} is missing: install a Triton wheel that has its NVIDIA tools.")
    calls = [call for call in CALLS if not names or call.name.startswith(tuple(names))]
    if not calls:
        raise KVPatchError(f"{', '.join(names)} names no row: use the beginning of {', '.join(call.name for call in CALLS)}.")
    found = []
    for call in calls:
        for D, G in call.shapes:
            for kernel, args, kwargs in launches(call, D, G):
                found.append(measure(call.name, D, G, kernel.__name__, compiled(kernel, args, kwargs)))
    return found


def main(names: Sequence[str]) -> None:
    columns = list(Row.__dataclass_fields__)
    table = [columns] + [[str(getattr(row, name)) for name in columns] for row in rows(names)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
