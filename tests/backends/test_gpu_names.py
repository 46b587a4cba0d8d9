"""Names below the public ones that scripts for a first run on a GPU take from outside of this repository."""

import inspect
from importlib import import_module
from operator import attrgetter

import pytest

pytest.importorskip("triton")

NAMES = {
    "kvpatch.backends.entries": ("codecs", "Exact.cached", "Exact.encode", "Rounded.cached", "Rounded.encode"),
    "kvpatch.backends.flash.flash_backend": ("Refused", "attend"),
    "kvpatch.backends.flash.kernels": ("kernels", "_kernels"),
    "kvpatch.backends.protocol": ("Geometry", "Keys"),
    "kvpatch.backends.refusals": ("known",),
    "kvpatch.backends.triton.columns": ("column_statistics",),
    "kvpatch.backends.triton.decode": ("Rule", "step"),
    "kvpatch.backends.triton.forward": ("attend",),
    "kvpatch.backends.triton.triton_backend": ("driver_problem",),
    "kvpatch.hooks.graph": ("StepGraph",),
    "tests.helpers.recording": ("FakeRecorder",),
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_there(module):
    found = import_module(module)
    for name in NAMES[module]:
        attrgetter(name)(found)


def test_the_kernels_take_what_the_scripts_give_them():
    from kvpatch.backends.flash import flash_backend
    from kvpatch.backends.protocol import Geometry
    from kvpatch.backends.triton import columns, decode, forward

    for function, count, named in (
        (decode.step, 10, ("scale", "codecs")),
        (forward.attend, 5, ("scale", "holes")),
        (columns.column_statistics, 6, ("scale",)),
        (flash_backend.attend, 4, ()),
        (Geometry, 3, ()),
    ):
        inspect.signature(function).bind(*range(count), **dict.fromkeys(named))
