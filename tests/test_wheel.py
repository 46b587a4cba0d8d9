"""The wheel holds the package and nothing else, states what it needs, and its command works from wherever it was installed."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import kvpatch
from tests.test_layers import imports, modules

ROOT = Path(__file__).parents[1]
CORE = {"torch", "transformers", "einops"}
EXTRAS = {
    "cli": {"typer", "rich"},
    "serve": {"typer", "rich", "fastapi", "uvicorn", "pydantic", "openai", "psutil"},
    "vllm": {"vllm"},
    "plot": {"matplotlib"},
    "lm-eval": {"lm-eval"},
    "flash": {"flash-attn"},
    "train": {"kvpatch", "accelerate", "datasets", "trl"},
    "dev": {
        "kvpatch", "accelerate", "furo", "hypothesis", "mypy", "myst-parser", "numpy", "peft", "pytest", "pytest-xdist",
        "ruff", "sphinx", "sphinx-copybutton", "tokenizers", "triton",
    },
}  # fmt: skip
BROUGHT = {"jinja2", "huggingface_hub", "safetensors", "triton", "typing_extensions"}  # by transformers and torch
MODULE_OF = {"flash_attn": "flash-attn", "lm_eval": "lm-eval"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, since building writes beside the sources."""
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("kvpatch", "tests/helpers", "tools/bench"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, str(source), "-w", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def _requirements(metadata, extra):
    """Names of the packages that an extra brings; extra None: that are always needed."""
    found = set()
    for line in metadata.get_all("Requires-Dist"):
        of = re.search(r"extra == \"([^\"]+)\"", line)
        if (of[1] if of else None) == extra:
            found.add(re.match(r"[\w-]+", line)[0].lower())
    return found


def _run(*arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    about = f"kvpatch-{kvpatch.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"kvpatch", about}
    assert f"{about}/licenses/LICENSE" in names
    files = {path for path in (ROOT / "kvpatch").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {name for name in names if name.startswith("kvpatch/")} == {str(path.relative_to(ROOT)) for path in files}


def test_the_metadata_says_whose_it_is_and_what_it_needs(metadata):
    assert metadata["Version"] == kvpatch.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The kvpatch authors"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert len(metadata["Keywords"].split(",")) >= 4
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    assert _requirements(metadata, None) == CORE
    assert {extra: _requirements(metadata, extra) for extra in EXTRAS} == EXTRAS


def test_every_import_is_declared():
    """A module of the package imports what the core or an extra that is meant for it brings."""
    extras = set().union(*(EXTRAS[name] for name in ("cli", "serve", "plot", "lm-eval", "flash", "vllm")))
    known = CORE | BROUGHT | extras | {"prometheus_client", "starlette"}  # which vLLM and fastapi bring
    for name, path in modules().items():
        top = {one.split(".")[0] for one in imports(name, path)} - {"kvpatch", "__future__"} - set(sys.stdlib_module_names)
        unknown = {MODULE_OF.get(one, one) for one in top} - known
        assert not unknown, f"{name} imports {unknown}"


def test_errors_advise_only_what_can_be_installed():
    """kvpatch is on no package index, so `pip install kvpatch...` would fetch somebody else's package."""
    for name, path in modules().items():
        assert not re.search(r"pip install [\"']?kvpatch", path.read_text()), name


@pytest.mark.slow
def test_commands_work_where_the_wheel_was_installed(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = _run("-c", "import kvpatch; print(kvpatch.__file__)", folder=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path), found.stderr
    listed = _run("-m", "kvpatch.cli.main", "policies", folder=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert {line.split(" ")[0] for line in listed.stdout.splitlines()} >= set(kvpatch.list_policies())


@pytest.mark.slow
def test_the_demo_brings_its_models(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    few = "from kvpatch.cli import demo; demo.POLICIES = {'window': {}}; demo.KS = (0.5,); "
    demo = _run("-c", few + "import pathlib; demo.run(pathlib.Path('out'))", folder=tmp_path)
    assert demo.returncode == 0, demo.stderr
    assert (tmp_path / "out" / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "kvpatch" / "cli" / "texts" / "harbour.txt").exists()
