"""The wheel holds the package and nothing else, and its command works from wherever it was installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvpatch

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, since building writes beside the sources."""
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.cfg", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("kvpatch", "tests/helpers", "tools/bench"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, str(source), "-w", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def _run(*arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    about = f"kvpatch-{kvpatch.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"kvpatch", about}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kvpatch").rglob("*.py")} | {"kvpatch/py.typed"}
    assert {name for name in names if name.startswith("kvpatch/")} == sources


@pytest.mark.slow
def test_commands_work_where_the_wheel_was_installed(wheel, tmp_path):
    """`policies` lists the registry; `demo`, whose models are not in the wheel, says in one sentence what to do."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = _run("-c", "import kvpatch; print(kvpatch.__file__)", folder=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path), found.stderr
    listed = _run("-m", "kvpatch.cli.main", "policies", folder=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert {line.split(" ")[0] for line in listed.stdout.splitlines()} >= set(kvpatch.list_policies())
    demo = _run("-m", "kvpatch.cli.main", "demo", "--out", tmp_path / "out", folder=tmp_path)
    assert demo.returncode == 2
    (line,) = [line for line in demo.stderr.splitlines() if line.startswith("kvpatch: ")]  # torchao writes lines of its own
    assert "clone the repository" in line and "--model" in line and ". " not in line
