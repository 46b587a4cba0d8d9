"""An untested version is refused in words, before the model is touched, and at no other time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvpatch
from kvpatch import patching
from kvpatch.hooks.versions import TORCH, TRANSFORMERS, check_versions
from tests.helpers.tiny import make, prompt, snapshot

REFUSED = [
    ("transformers", "6.0.0", "knows transformers 5.15 to 5.x; this is 6.0.0: pip install 'transformers>=5.15,<6'"),
    ("transformers", "6.0.0.dev0", "this is 6.0.0.dev0"),
    ("transformers", "10.1", "this is 10.1"),
    ("transformers", "5.14.9", "this is 5.14.9: pip install 'transformers>=5.15,<6'"),
    ("transformers", "4.99.0", "this is 4.99.0"),
    ("torch", "2.9.1", "knows torch 2.10 and newer; this is 2.9.1: pip install 'torch>=2.10'"),
    ("torch", "2.9.1+cu128", "this is 2.9.1+cu128"),
    ("torch", "1.13", "this is 1.13"),
    ("transformers", "mine", "'mine' is no version number"),
]


@pytest.mark.parametrize(("package", "version", "words"), REFUSED)
def test_refused(package, version, words, monkeypatch):
    model = make("llama")
    before, logits = snapshot(model), model(prompt(1, 8)).logits
    monkeypatch.setattr(getattr(patching, package), "__version__", version)
    with pytest.raises(kvpatch.KVPatchError) as error, kvpatch.patched(model, "h2o", 4):
        pass
    assert words in str(error.value)
    monkeypatch.undo()
    assert snapshot(model) == before
    assert torch.equal(model(prompt(1, 8)).logits, logits)


@pytest.mark.parametrize(
    ("own", "of_torch"),
    [("5.15.0", "2.10.0"), ("5.15", "2.10"), ("5.23.0.dev0", "2.13.0+cpu"), ("5.100.0", "3.0.0"), ("5.15.0rc1", "2.10.0a0")],
)
def test_accepted(own, of_torch):
    check_versions(own, of_torch)


def test_checked_once(monkeypatch):
    check_versions.cache_clear()
    for _ in range(3):
        kvpatch.patch(make("llama"), "h2o", 4).remove()
    assert check_versions.cache_info().misses == 1


def test_a_version_does_not_keep_it_from_being_imported():
    code = "import transformers; transformers.__version__ = '6.0.0'; import kvpatch; print(kvpatch.list_policies()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip().endswith("full"), done.stderr


def test_the_metadata_says_the_same():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f"transformers>={TRANSFORMERS[0]},<{TRANSFORMERS[1]}" in text
    assert f"torch>={TORCH}" in text
