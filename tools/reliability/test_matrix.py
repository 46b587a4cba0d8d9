"""Run the tests under several versions of transformers and torch, each in an environment of its own: `make test-matrix`.

    python -m tools.reliability.test_matrix [TRANSFORMERS[/TORCH] ...] [--pytest ARGUMENTS] [--write]

A version is a number, `pinned` (requirements-dev.txt's) or `newest` (of those that pyproject.toml allows); a torch that
is not named is the pinned one. Other builds of torch than the pinned one come with several gigabytes of CUDA packages
unless TORCH_INDEX names an index without. Environments are .venv-<transformers>-<torch> in the repository's root; they
are made once and used again, but those with a `newest` are made anew. --write puts the table into docs/reliability.md.
Needs nothing but Python.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tools.reliability.page import ROOT, put

ROWS = ("5.15.0", "5.17.0", "newest", "pinned/2.10.0", "pinned/newest")
RANGE = {"transformers": ">=5.15,<6", "torch": ">=2.10"}
# their pins suit the pinned transformers or torch; another one brings its own
FOLLOW = {"transformers": ("tokenizers", "safetensors"), "torch": ("triton", "numpy")}
# the interpreter of Triton 3.6, which torch 2.10 brings, fails on newer ones
ADDED = {"transformers": (), "torch": ("numpy<2.4",)}
SHOW = "import torch, transformers; print(transformers.__version__, torch.__version__)"


@dataclass
class Outcome:
    """One environment's run: what was asked for, the versions that were there, pytest's last line and the failed tests."""

    asked: str
    versions: str
    passed: bool
    seconds: float
    line: str
    failed: list[str]


def run(*command: str, seconds: int | None = None) -> tuple[int, str]:
    """Run a command in the repository's root; its exit status (-1: out of time) and what it printed."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        return -1, (error.stdout or b"").decode(errors="replace") + f"\nended after {seconds} seconds"
    return done.returncode, done.stdout


def make_environment(folder: Path, *installs: Sequence[str], beside: Path | None = None) -> str | None:
    """Make an environment anew; what went wrong, or None. installs: what pip gets. beside: packages that it sees, too."""
    own = str(folder / "bin/python")
    pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for command in ((sys.executable, "-m", "venv", "--clear", str(folder)), *((*pip, *words) for words in installs)):
        code, said = run(*command)
        if code:
            return said.strip().splitlines()[-1]
        if beside is not None:
            (next(folder.glob("lib/python*/site-packages")) / "of_this_environment.pth").write_text(f"{beside}\n")
    (folder / "ok").touch()
    return None


def requirements(row: str) -> tuple[str, list[str]]:
    """torch, and all else, as pip takes them."""
    transformers, _, torch = row.partition("/")
    wanted = {"transformers": transformers, "torch": torch or "pinned"}
    pins = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line and line[0] != "#"]
    for name, version in wanted.items():
        if version == "pinned":
            continue
        dropped = tuple(f"{other}==" for other in (name, *FOLLOW[name]))
        pins = [line for line in pins if not line.startswith(dropped)]
        pins += [name + (RANGE[name] if version == "newest" else f"=={version}"), *ADDED[name]]
    first = next(line for line in pins if line.startswith(("torch=", "torch>")))
    return first, [line for line in pins if line != first]


def environment(row: str, folder: Path) -> str | None:
    """Make the environment where it is not there yet or older than its requirements; what went wrong, or None."""
    done = folder / "ok"
    if "newest" not in row and done.is_file() and done.stat().st_mtime > (ROOT / "requirements-dev.txt").stat().st_mtime:
        return None
    torch, rest = requirements(row)
    index = ["--extra-index-url", url] if (url := os.environ.get("TORCH_INDEX")) else []
    own = (["--no-deps", "torchao==0.18.0"], ["--no-deps", "--no-build-isolation", "-e", "."])
    return make_environment(folder, [*index, torch], [*rest, "setuptools>=77"], *own)


def tests(row: str, arguments: list[str]) -> Outcome:
    started, folder = time.monotonic(), ROOT / f".venv-{row.replace('/', '-')}"
    problem = environment(row, folder)
    if problem:
        return Outcome(row, "-", False, time.monotonic() - started, problem, [])
    python = str(folder / "bin/python")
    versions = run(python, "-c", SHOW)[1].strip().splitlines()[-1]
    code, said = run(python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments)
    line, failed = summarize(said)
    return Outcome(row, versions, code == 0, time.monotonic() - started, line, failed)


def summarize(said: str) -> tuple[str, list[str]]:
    """Of what pytest printed: the line with its counts, and those of failed tests."""
    lines = said.strip().splitlines() or ["no output"]
    counts = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), lines[-1])
    return counts.strip("= "), [line for line in lines if line.startswith(("FAILED", "ERROR"))]


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    today = date.today().isoformat()
    lines = ["| transformers | torch | result | minutes | pytest | day |", "|---|---|---|---|---|---|"]
    for one in outcomes:
        transformers, _, torch = one.versions.partition(" ")
        verdict = "pass" if one.passed else "FAIL"
        lines.append(f"| {transformers} | {torch or one.asked} | {verdict} | {one.seconds / 60:.0f} | {one.line} | {today} |")
    return "\n".join(lines)


def page(outcomes: list[Outcome], arguments: str) -> str:
    which = f"`pytest {arguments}`" if arguments else "the whole suite"
    failed = [f"- {one.versions}: {line}" for one in outcomes for line in one.failed]
    told = ["", "What failed:", "", *failed] if failed else []
    return "\n".join(["## Versions", "", f"`make test-matrix` ({which}).", "", table(outcomes), *told, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="TRANSFORMERS[/TORCH]")
    parser.add_argument("--pytest", default="", help="arguments for pytest, as one string")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    given = parser.parse_args()
    outcomes = []
    for row in given.rows:
        outcomes.append(tests(row, given.pytest.split()))
        print("\n".join([f"{row}: {outcomes[-1].line}", *outcomes[-1].failed]), flush=True)
    print("\n" + table(outcomes))
    if given.write:
        put(page(outcomes, given.pytest))
    sys.exit(0 if all(one.passed for one in outcomes) else 1)


if __name__ == "__main__":
    main()
