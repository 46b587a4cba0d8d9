"""Build the sdist and from it the wheel, and try both away from the repository: `make test-wheel`.

    python -m tools.reliability.wheel                                    the wheel under this Python, the sdist's tests
    TORCH_INDEX=URL python -m tools.reliability.wheel 3.10 3.12 3.13     the wheel under others too

A Python is a version, found on PATH or among pyenv's, or a path. Each gets an environment of its own, in which torch comes
first: the pinned one, or --torch. Where the package index has no CPU build of it for a Python, torch comes with several
gigabytes of CUDA packages unless TORCH_INDEX names an index without. So the Pythons that are found but not named are tried
without torch: the wheel is installed and compiled, and what needs no torch is run. Needs setuptools 77 or newer.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.reliability.page import ROOT

COMMANDS = ("check", "compare", "generate", "demo", "policies", "architectures")
MODEL = "from kvpatch.cli.loading import MODELS; print(MODELS / 'llama-python')"
OWN_POLICY = """
from dataclasses import dataclass
import kvpatch, torch
from kvpatch.cli.loading import MODELS, load_model

@dataclass(frozen=True)
class EveryOther(kvpatch.Score):
    def value(self, context):
        return (context.positions_BHT % 2 == 0).float()

kvpatch.register_policy("every_other", kvpatch.Policy("every_other", EveryOther(), kvpatch.Scope(recent=2)))
model = load_model(str(MODELS / "llama-0"))
with kvpatch.patched(model, "every_other", k=8) as patch:
    model.generate(torch.arange(16, 36)[None], max_new_tokens=4, do_sample=False)
print(patch.report())
"""
WITHOUT_TORCH = "import kvpatch, sys; assert 'site-packages' in kvpatch.__file__; print(kvpatch.__version__)"


@dataclass(frozen=True)
class Step:
    """One thing that was tried: its name, whether it went well, and the last line it said."""

    name: str
    passed: bool
    said: str


def run(*command: object, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that sees no repository but the one of `path`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"COLUMNS": "120"} | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def step(name: str, *command: object, cwd: Path, path: Path | None = None) -> Step:
    done = run(*command, cwd=cwd, path=path)
    words = [line for line in done.stdout.splitlines() if re.search(r"\w", line)]  # and no line of a box
    if done.returncode:
        print(f"{name}: exit status {done.returncode}\n{done.stdout[-3000:]}", flush=True)
    return Step(name, done.returncode == 0, words[-1].strip("=│ ") if words else "")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of a copy of the repository, unpacked, and the wheel that is built from it alone."""
    source, out = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out"))
    out.mkdir()
    made = run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=source)
    archives = list(out.glob("*.tar.gz"))
    if not archives:
        sys.exit(made.stdout)
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    made = run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", unpacked, "-w", out, cwd=folder
    )
    wheels = list(out.glob("*.whl"))
    if not wheels:
        sys.exit(made.stdout)
    for file in (archives[0], wheels[0]):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
    return unpacked, wheels[0]


def found() -> dict[str, Path]:
    """Pythons of this machine from 3.10 on by version; the first of several that are the same version."""
    on_path = (shutil.which(f"python3.{minor}") for minor in range(10, 20))
    of_pyenv = Path.home().glob(".pyenv/versions/3.*/bin/python3")
    pythons: dict[str, Path] = {}
    for python in filter(None, [sys.executable, *on_path, *map(str, of_pyenv)]):
        done = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", cwd=ROOT)
        version = done.stdout.strip()
        if done.returncode == 0 and tuple(map(int, version.split("."))) >= (3, 10):
            pythons.setdefault(version, Path(python))
    return pythons


def environment(python: Path, folder: Path, *installs: Iterable[str]) -> tuple[Path, Step]:
    """The Python of a new environment, and how its making went."""
    own = folder / "bin" / "python"
    made = step("environment", python, "-m", "venv", folder, cwd=folder.parent)
    for install in installs:
        if made.passed:
            made = step(f"install {' '.join(install)}", own, "-m", "pip", "install", "--quiet", *install, cwd=folder)
    return own, made


def listings(command: Path, folder: Path) -> list[Step]:
    """The commands that load no model."""
    asked = [("--help",), *((name, "--help") for name in COMMANDS), ("policies",), ("architectures",)]
    return [step(" ".join(["kvpatch", *words]), command, *words, cwd=folder) for words in asked]


def whole(python: Path, wheel: Path, torch: str, folder: Path) -> list[Step]:
    """Install the wheel with what it needs, and use it as its user would."""
    index = ["--extra-index-url", url] if (url := os.environ.get("TORCH_INDEX")) else []
    own, made = environment(python, folder / "environment", [*index, torch], [f"kvpatch[cli,plot] @ {wheel.as_uri()}"])
    if not made.passed:
        return [made]
    command = own.with_name("kvpatch")
    model = run(own, "-c", MODEL, cwd=folder).stdout.strip().splitlines()[-1]
    return [
        *listings(command, folder),
        step("pip check", own, "-m", "pip", "check", cwd=folder),
        step("import", own, "-c", WITHOUT_TORCH + "; assert kvpatch.patched and kvpatch.list_policies()", cwd=folder),
        step("kvpatch check MODEL", command, "check", model, cwd=folder),
        step("a policy of one's own", own, "-c", OWN_POLICY, cwd=folder),
        step("kvpatch demo", command, "demo", cwd=folder),
    ]


def bare(python: Path, wheel: Path, folder: Path) -> list[Step]:
    """Install the wheel without torch, compile all of it and run what needs none."""
    own, made = environment(python, folder / "environment", ["--no-deps", str(wheel)], ["typer", "rich"])
    if not made.passed:
        return [made]
    where = run(own, "-c", "import kvpatch; print(kvpatch.__path__[0])", cwd=folder).stdout.strip()
    return [
        step("compile", own, "-W", "error", "-m", "compileall", "-q", "-f", where, cwd=folder),
        step("import without torch", own, "-c", WITHOUT_TORCH, cwd=folder),
        *listings(own.with_name("kvpatch"), folder),
    ]


def collect(unpacked: Path, arguments: list[str]) -> list[Step]:
    """Collect the fast tests of the unpacked sdist, and run those that are asked for."""
    pytest = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    steps = [step("sdist: collect", *pytest, "--collect-only", "-m", "not slow and not gpu", cwd=unpacked, path=unpacked)]
    if arguments:
        steps.append(step(f"sdist: pytest {' '.join(arguments)}", *pytest, *arguments, cwd=unpacked, path=unpacked))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="versions or paths; the running Python is always tried")
    pinned = re.search(r"^torch==.*$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    parser.add_argument("--torch", default=pinned[0] if pinned else "torch", help="as pip takes it")
    parser.add_argument("--pytest", default="tests/test_patching.py", help="tests of the sdist to run, as pytest takes them")
    given = parser.parse_args()
    pythons, failed = found(), False
    running = next(version for version, python in pythons.items() if str(python) == sys.executable)
    named = {running: pythons[running]} | {name: pythons.get(name, Path(name)) for name in given.pythons}
    with tempfile.TemporaryDirectory() as temporary:
        unpacked, wheel = build(Path(temporary))
        for version, python in ({"sdist": Path(sys.executable)} | named | pythons).items():
            folder = Path(temporary) / re.sub(r"\W", "-", version)
            folder.mkdir()
            if version == "sdist":
                steps = collect(unpacked, given.pytest.split())
            else:
                steps = whole(python, wheel, given.torch, folder) if version in named else bare(python, wheel, folder)
            print(f"\n{version}: {python}" + ("" if version in named or version == "sdist" else " (without torch)"))
            for one in steps:
                print(f"  {'pass' if one.passed else 'FAIL'}  {one.name}: {one.said}", flush=True)
            failed |= not all(one.passed for one in steps)
            shutil.rmtree(folder)
    sys.exit(failed)


if __name__ == "__main__":
    main()
