"""The kernels of a prompt as compiled for GPUs: no spills, shared memory that a chip has, tensor cores, prefetched tiles."""

import pytest

pytest.importorskip("triton")
from tests.tools.test_kernel_report import SHARED, python
from tools.bench.kernel_report import CALLS, TOOL

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TOOL.exists(), reason=f"this Triton has no {TOOL.name}")]
NAMES = {  # as in test_kernel_report.py; 80 is wide
    80: ("forward cap noise", "columns cap window", "columns squares", "rows noise tau", "replay gradients"),
    89: ("forward noise tau", "forward ALiBi noise padding", "columns float32", "rows noise float32", "replay window padding"),
    90: ("forward sinks", "columns count", "replay ALiBi"),
}
EVERY = ("forward", "rows", "columns", "replay")
CASES = [pytest.param(*item, marks=[pytest.mark.wide] if item[0] == 80 else []) for item in NAMES.items()]


@pytest.mark.parametrize(("chip", "names"), [*CASES, pytest.param(90, EVERY, marks=pytest.mark.wide)])
def test_prompt_kernels_fit(chip, names, tmp_path):
    done = python("-m", "tools.bench.kernel_report", f"sm_{chip}", *names, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *lines = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in done.stdout.splitlines())
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    wanted = [(call.name, D, G) for call in CALLS if call.name.startswith(names) for D, G in call.shapes]
    assert list(dict.fromkeys((row["call"], int(row["D"]), int(row["G"])) for row in rows)) == wanted
    for row in rows:
        # without tensor cores ptxas gives up a few registers so that another block fits beside this one
        spared = 16 if row["call"].endswith("float32") else 0
        assert int(row["stack"]) <= spared and row["local"] == "0", f"spills: {row}"
        assert int(row["LDL"]) + int(row["STL"]) <= spared // 2, f"spills: {row}"
        assert 0 < int(row["shared"]) <= SHARED[chip] * 1024 and 0 < int(row["registers"]) <= 255, row
        if not row["call"].endswith("float32"):
            assert int(row["HMMA"]) + int(row["HGMMA"]) > 0, f"no tensor cores: {row}"
        assert int(row["LDGSTS"]) > 0, f"nothing is fetched ahead: {row}"
