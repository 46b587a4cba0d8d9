"""Run the tests under several versions of transformers, each in an environment of its own: `make test-matrix`.

    python tools/test_matrix.py [VERSION ...] [--pytest ARGUMENTS]

Environments are .venv-<version> in the repository's root; they are made once and used again. Needs nothing but Python.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("5.15.0", "5.17.0", "5.23.0")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def environment(version: str) -> str | None:
    """Make .venv-<version> where it is not there yet or older than its requirements; what went wrong, or None."""
    folder, requirements = ROOT / f".venv-{version}", ROOT / "requirements-dev.txt"
    if (folder / "ok").is_file() and (folder / "ok").stat().st_mtime > requirements.stat().st_mtime:
        return None
    lines = requirements.read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    torch = next(line for line in names if line.startswith("torch=="))
    chosen_by_transformers = ("transformers==", "tokenizers==", "safetensors==")
    rest = [line for line in names if line != torch and not line.startswith(chosen_by_transformers)]
    pip = (f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    index = ["--extra-index-url", url] if (url := os.environ.get("TORCH_INDEX")) else []
    for command in (
        (sys.executable, "-m", "venv", "--clear", str(folder)),
        (*pip, *index, torch),
        (*pip, *rest, f"transformers=={version}", "setuptools>=68"),
        (*pip, "--no-deps", "--no-build-isolation", "-e", "."),
    ):
        done = run(*command)
        if done.returncode:
            return done.stdout.strip().splitlines()[-1]
    (folder / "ok").touch()
    return None


def tests(version: str, arguments: list[str]) -> tuple[bool, str]:
    """Whether pytest passed, and its last line."""
    done = run(f".venv-{version}/bin/python", "-m", "pytest", "-n", "2", *arguments)
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode:
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))))
    return done.returncode == 0, lines[-1].strip("= ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--pytest", default="", help="arguments for pytest, as one string")
    given = parser.parse_args()
    rows = []
    for version in given.versions:
        started = time.monotonic()
        problem = environment(version)
        passed, line = (False, problem) if problem else tests(version, given.pytest.split())
        spent = time.monotonic() - started
        rows.append((passed, f"{version:<14}{'pass' if passed else 'FAIL':<8}{spent:6.0f} s  {line}"))
        print(rows[-1][1], flush=True)
    print("\ntransformers  result    time  last line\n" + "\n".join(line for _, line in rows))
    sys.exit(0 if all(passed for passed, _ in rows) else 1)


if __name__ == "__main__":
    main()
