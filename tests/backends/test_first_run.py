"""Names that scripts for a first run on a device import: a script that was written before must still start."""

import importlib
import inspect
from pathlib import Path

import pytest

import kvpatch
from kvpatch.hooks.graph import StepGraph

ROOT = Path(__file__).parents[2]
NAMES = {
    "kvpatch": ("__version__", "patched"),
    "kvpatch.backends.entries": ("codecs",),
    "kvpatch.backends.flash.flash_backend": ("Refused", "attend"),
    "kvpatch.backends.flash.kernels": ("_kernels", "kernels"),
    "kvpatch.backends.protocol": ("Geometry", "Keys"),
    "kvpatch.backends.refusals": ("known",),
    "kvpatch.backends.triton.columns": ("column_statistics",),
    "kvpatch.backends.triton.decode": ("Rule", "step"),
    "kvpatch.backends.triton.forward": ("attend",),
    "kvpatch.backends.triton.triton_backend": ("driver_problem",),
    "kvpatch.hooks.graph": ("StepGraph",),
    "tests.helpers.recording": ("FakeRecorder",),
}
TESTS = ("decode", "forward", "columns", "rounded", "replay")


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    if module.startswith("kvpatch.backends.triton."):
        pytest.importorskip("triton")
    found = importlib.import_module(module)
    assert not [name for name in NAMES[module] if not hasattr(found, name)]


def test_arguments():
    assert list(inspect.signature(StepGraph).parameters)[:3] == ["model", "state", "make"]
    for method, arguments in {"graph": ["model"], "new_cache": ["room"], "record": ["cache"], "replay": ["record"]}.items():
        taken = inspect.signature(getattr(kvpatch.Patch, method)).parameters
        assert all(name in taken for name in arguments), method


def test_the_kernels_tests_are_where_they_were():
    for name in (*(f"test_triton_{part}.py" for part in TESTS), "test_flash.py"):
        assert (ROOT / "tests/backends" / name).is_file()
