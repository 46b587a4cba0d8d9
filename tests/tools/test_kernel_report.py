"""The decode kernels as compiled for sm_90: no spills, shared memory that a multiprocessor has, tensor cores in use.

In processes of their own, because here Triton's interpreter may be on, which compiles nothing.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from tools.bench.kernel_report import ONE_SHAPE, SHAPES, TOOL

SHARED = 227 * 1024  # bytes that one block may have
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason=f"this Triton has no {TOOL.name}")


def python(*arguments, cache, **variables):
    """Run python without the interpreter, unless `variables` turn it on, and compile anew."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_decode_kernels_fit_sm_90(tmp_path):
    done = python("-m", "tools.bench.kernel_report", "decode", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *lines = (line.rsplit(maxsplit=13) for line in done.stdout.splitlines())
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    measured = [(row["call"].strip(), row["kernel"], int(row["D"]), int(row["G"])) for row in rows]
    wanted = [("decode", SHAPES), ("decode gumbel", ONE_SHAPE), ("decode count window", ONE_SHAPE)]
    kernels = ("split_kernel", "combine_kernel")
    assert measured == [(name, kernel, D, G) for name, shapes in wanted for D, G in shapes for kernel in kernels]
    for row in rows:
        assert all(row[name] == "0" for name in ("stack", "local", "LDL", "STL")), f"spills: {row}"
        assert 0 < int(row["shared"]) <= SHARED and 0 < int(row["registers"]) <= 255, row
        if row["kernel"] == "split_kernel":
            assert int(row["HMMA"]) > 0, f"no tensor cores: {row}"
            assert int(row["LDGSTS"]) > 0, f"keys and values are not fetched ahead: {row}"


STARVED = """
from tools.bench import kernel_report as report
kernel, args, kwargs = report.launches(report.CALLS[0], 128, 4)[0]
row = report.measure("starved", 128, 4, "split_kernel", report.compiled(kernel, args, kwargs | {"maxnreg": 32}))
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
