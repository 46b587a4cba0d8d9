"""The decode kernels as compiled for GPUs: no spills, shared memory that a chip has, tensor cores, and copies that run ahead.

In processes of their own, because here Triton's interpreter may be on, which compiles nothing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tools.bench.kernel_report import CALLS, TOOL

SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have
# rows of each chip (all but 89, 90 are wide); benchmarks/decode-kernels.txt has all, and a wide case compiles all of one
NAMES = {
    80: ("decode gumbel", "decode pages", "decode sinks"),
    89: ("decode all", "decode float32", "decode 4 bits"),
    90: ("decode cap", "decode one page"),
    100: ("decode 8 bits", "decode sinks"),
    120: ("decode 8 bits", "decode sinks"),
}
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason=f"this Triton has no {TOOL.name}")


def python(*arguments, cache, **variables):
    """Run python without the interpreter, unless `variables` turn it on, and compile anew."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


CASES = [pytest.param(*item, marks=[pytest.mark.wide] if item[0] not in (89, 90) else []) for item in NAMES.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "names"), [*CASES, pytest.param(90, ("decode",), marks=pytest.mark.wide)])
def test_decode_kernels_fit(chip, names, tmp_path):
    """Chips of compute capability 8.6 run what is compiled for 8.9, and have as much shared memory."""
    done = python("-m", "tools.bench.kernel_report", f"sm_{chip}", *names, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *lines = (line.split("  ") for line in done.stdout.splitlines())
    header, *lines = ([cell.strip() for cell in line if cell.strip()] for line in (header, *lines))
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    measured = [(int(row["chip"]), row["call"], row["kernel"], int(row["D"]), int(row["G"])) for row in rows]
    wanted = [(call.name, D, G) for call in CALLS if call.name.startswith(names) for D, G in call.shapes]
    kernels = ("split_kernel", "combine_kernel", "evict_kernel")
    assert measured == [(chip, name, kernel, D, G) for name, D, G in wanted for kernel in kernels]
    for row in rows:
        assert all(row[name] == "0" for name in ("stack", "local", "LDL", "STL")), f"spills: {row}"
        assert 0 < int(row["shared"]) <= SHARED[chip] * 1024 and 0 < int(row["registers"]) <= 255, row
        if row["kernel"] == "split_kernel":
            exact = "float32" in row["call"]  # multiplied in full precision
            assert exact or int(row["HMMA"]) + int(row["HGMMA"]) > 0, f"no tensor cores: {row}"
            assert int(row["LDGSTS"]) > 0, f"keys and values are not fetched ahead: {row}"
            assert int(row["ahead"]) >= 2, f"the loop waits for the next block's keys and values: {row}"


@pytest.mark.parametrize("part", ["prompt", "replay", "decode"])
def test_the_files_have_a_row_for_each_call(part):
    """Also after a call has been added: benchmarks/*-kernels.txt, and the number of combinations that the page names."""
    root = Path(__file__).parents[2]
    command, header, *lines = (root / f"benchmarks/{part}-kernels.txt").read_text().splitlines()
    words = command.partition(":")[0].split()[4:]
    chips = [int(word[3:]) for word in words if word.startswith("sm_")]
    names = tuple(word for word in words if not word.startswith("sm_"))
    assert chips == (list(SHARED) if part == "decode" else [80, 89, 90])
    wanted = [(call.name, str(D), str(G)) for call in CALLS if call.name.startswith(names) for D, G in call.shapes]
    rows = [dict(zip(re.split("  +", header.strip()), re.split("  +", line.strip()), strict=True)) for line in lines]
    for chip in chips:
        found = [(row["call"], row["D"], row["G"]) for row in rows if row["chip"] == str(chip)]
        assert list(dict.fromkeys(found)) == wanted
    if part == "prompt":
        assert f" {len(wanted)} combinations " in (root / "docs/guides/backends.md").read_text()


LENGTHS = """
from itertools import product
from tools.bench import kernel_report as report
found = {}
for C, B, offset in product((17, 128, 1025, 2048, 4097, 5000, 20_000), (1, 3), (0, 1)):
    for statistics, value in ((("sum", "squares"), "mean"), (("gumbel",), "gumbel")):
        call = report.Call("", "decode", report.decode_step(statistics, value, C, B, offset, sliding=100, tau=1.5))
        for kernel, binary in report.compile_call(call, 16, 2):
            found.setdefault((kernel, value), set()).add(binary)
print(sorted((*names, len(kinds)) for names, kinds in found.items()))
"""


def test_a_new_length_compiles_nothing(tmp_path):
    """Whatever the slots and rows, and wherever a layer's state lies in memory, the same compiled kernels serve."""
    done = python("-c", LENGTHS, cache=tmp_path)
    kernels = ("combine_kernel", "evict_kernel", "split_kernel")
    assert done.stdout.strip() == str([(name, value, 1) for name in kernels for value in ("gumbel", "mean")]), done.stderr


STARVED = """
from tools.bench import kernel_report as report
row = report.measure(90, "starved", 128, 4, *report.compile_call(report.CALLS[0], 128, 4, maxnreg=32)[0])
print(row.spills, row.stack > 0, row.LDL > 0, row.STL > 0)
report.main(["encode"])
"""


def test_spilled_registers_and_unknown_kernels_are_reported(tmp_path):
    """The same kernel with 32 registers a thread; a name that no row begins with."""
    done = python("-c", STARVED, cache=tmp_path)
    assert done.stdout.split() == ["True"] * 4, done.stderr
    assert done.returncode != 0 and "encode names no row" in done.stderr.splitlines()[-1]


def test_refuses_the_interpreter(tmp_path):
    done = python("-m", "tools.bench.kernel_report", "decode", cache=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode != 0 and "unset TRITON_INTERPRET" in done.stderr.splitlines()[-1]
