"""A type checker of the user accepts right uses of the package and marks wrong ones, each at its line.

Lines that end in `# error: CODE` must be marked with that code by mypy, and no others.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = """
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kvpatch
from kvpatch.policies import EvictionContext


@dataclass(frozen=True)
class EveryOther(kvpatch.Score):
    def value(self, context: EvictionContext) -> Tensor:
        return (context.positions_BHT % 2 == 0).float()


def right(model: nn.Module) -> None:
    own = kvpatch.Policy("every_other", EveryOther(), kvpatch.Scope(recent=2))
    kvpatch.register_policy("every_other", own.with_options(sinks=4))
    policy: kvpatch.Policy = kvpatch.critical("adakv", alpha=0.25)
    with kvpatch.patched(model, policy, k=0.5, block=64, schedule="prompt", strict=True) as patch:
        cache: kvpatch.EvictingCache = patch.new_cache()
        report: kvpatch.Report = patch.report()
    share: float = report.share
    installed: kvpatch.Patch = kvpatch.patch(model, "h2o", k=16)
    installed.remove()
    settings: kvpatch.Settings = kvpatch.Settings("h2o", k=16, options={"recent": 4})
    kvpatch.patch(model, settings, record=True).remove()
    passed: bool = kvpatch.check_model(model).passed
    names: tuple[str, ...] = kvpatch.list_policies()
    print(share, cache, passed, names)


def wrong(model: nn.Module) -> None:
    kvpatch.patchd(model, "h2o")  # error: attr-defined
    kvpatch.patched(model, 3)  # error: arg-type
    kvpatch.Settings(kvpatch.get_policy("h2o"))  # error: arg-type
    kvpatch.patched(model, "h2o", block="64")  # error: arg-type
    kvpatch.patched("gpt2", "h2o")  # error: arg-type
    kvpatch.patch(model, "h2o").reprot()  # error: attr-defined
    kvpatch.get_policy("h2o").with_option(recent=4)  # error: attr-defined
    kvpatch.register_policy("every_other", EveryOther())  # error: arg-type
    kvpatch.policies.critcal("h2o")  # error: attr-defined
"""
OPTIONS = """
from torch import nn

import kvpatch


def right(model: nn.Module) -> None:
    kvpatch.patched(model, "h2o")
    kvpatch.patched(model, "h2o", 16)
    kvpatch.patched(model, "h2o", k="2GiB", recent=0.25)
    kvpatch.patched(model, "h2o", k=[0.5, 16, 16], sinks=4)
    kvpatch.patched(model, "snapkv", k=0.3, window=16)
    kvpatch.patched(model, "keyformer", k=0.3, noise="none", tau=(1.0, 2.0))


def wrong(model: nn.Module) -> None:
    kvpatch.patched(model, "h2o", blok=3)  # error: call-arg
    kvpatch.patched(model, "snapkv", windw=16)  # error: call-arg
    kvpatch.patched(model, "keyformer", noise="gumble")  # error: arg-type
    kvpatch.patched(model, "h2o", k=None)  # error: arg-type
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder."""
    pytest.importorskip("mypy")
    return tmp_path_factory.mktemp("user")


def marked(text: str, folder: Path) -> dict[int, str]:
    """Line -> code of mypy's errors in a file of a user's, with the options and so the cache of `make check`."""
    file = folder / "user.py"
    file.write_text(text)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return {int(line): code for line, code in re.findall(r"user\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)}


def expected(text: str) -> dict[int, str]:
    """Line -> code of the errors that the text announces."""
    lines = enumerate(text.splitlines(), 1)
    return {number: line.rpartition("# error: ")[2] for number, line in lines if "# error: " in line}


@pytest.mark.slow
def test_public_names_are_typed(folder):
    assert marked(PUBLIC, folder) == expected(PUBLIC)


@pytest.mark.slow
def test_a_misspelt_option_is_marked(folder):
    assert marked(OPTIONS, folder) == expected(OPTIONS)
