"""The Makefile tells what it does before it does it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Makefile").read_text()
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_bare_make_prints_the_help_and_makes_nothing():
    bare, help_ = make(), make("help")
    assert bare.returncode == 0 and bare.stdout == help_.stdout
    assert ".venv/bin" not in make("-n").stdout


def test_the_help_names_every_target_with_what_it_does():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    lines = [re.match(r"  ([\w-]+)  +(\S.*)", line) for line in make("help").stdout.splitlines()]
    assert {line[1] for line in lines if line} == set(phony.split())


def test_the_help_says_what_is_fetched_and_how_to_take_less():
    said = " ".join(make("help").stdout.split())
    assert "CUDA: more than 5 GB" in said and "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in said and "0.9 GB" in said


@pytest.mark.parametrize("target", ["demo", "test"])
def test_an_environment_tells_its_steps(tmp_path, target):
    """Recipes of a folder without an environment, shown and not run: each of the README's two commands makes it."""
    for name in ("Makefile", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True)
    steps = [line for line in done.stdout.splitlines() if line.startswith('echo "[')]
    assert [step[6:11] for step in steps] == ["[1/3]", "[2/3]", "[3/3]"]
    assert "with CUDA" in steps[0] and "(3, 10)" in done.stdout
    done = subprocess.run(["make", "-n", target, "TORCH_INDEX=URL"], cwd=tmp_path, capture_output=True, text=True)
    assert "--extra-index-url URL" in done.stdout
