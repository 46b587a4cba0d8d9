"""Run the core of the suite under the oldest supported transformers and the newest that pip gives: `make canary`.

    python -m tools.reliability.canary [VERSION ...]

Environments are .venv-canary-<version> in the repository's root. Each holds transformers with what it needs, and takes all else
from the environment that runs this. A failure under a version that docs/reliability.md names ends with 1. A newer version was
tested by nobody: its failure ends with 0, and is the last and loudest line, since mending it comes before other work.
"""

import re
import sys
import time
from pathlib import Path

import transformers
from packaging.version import Version

from kvpatch.hooks.versions import TRANSFORMERS
from tools.reliability.page import PAGE, ROOT
from tools.reliability.test_matrix import make_environment, run, summarize

OLDEST, BELOW = (Version(one) for one in TRANSFORMERS)
CORE = (
    "arch/test_upstream.py", "arch/test_proof.py", "hooks", "invariants", "serving/test_engine_names.py",
    "serving/test_generate_batch.py", "integrations/test_generation.py", "integrations/test_generation_contract.py",
    "integrations/test_decoding.py", "cache/test_hybrid.py", "cache/test_turns.py", "oracle/test_oracle.py",
)  # fmt: skip
PYTEST = ("-m", "pytest", "-n", "2", "-m", "not slow and not gpu", "--disable-warnings")
LIMIT = 600  # seconds of one version's tests


def find_newest(listed: str) -> Version | None:
    """Return the newest release below the upper bound in the output of `pip index versions`; None if it lists none."""
    line = re.search(r"Available versions: (.*)", listed)
    found = [Version(one.strip()) for one in line[1].split(",")] if line else []
    return max((one for one in found if one < BELOW and not one.is_prerelease), default=None)


def test(version: Version) -> tuple[bool, str]:
    """Run the core under a version: whether it passed, and what pytest said of it."""
    started, folder = time.monotonic(), ROOT / f".venv-canary-{version}"
    if not (folder / "ok").is_file():
        here = Path(transformers.__file__).parents[1]
        if error := make_environment(folder, [f"transformers=={version}"], beside=here):
            return False, f"no environment: {error}"
    code, said = run(str(folder / "bin/python"), *PYTEST, *(f"tests/{one}" for one in CORE), seconds=LIMIT)
    counts, failed = summarize(said)
    names = [line.partition(" - ")[0] for line in failed[:20]]
    return code == 0, "\n".join([f"{counts}, {time.monotonic() - started:.0f} s with the environment", *names])


def judge(newest: Version | None, asked: list[Version], tested: Version) -> tuple[int, str]:
    """Test the versions that this run's own tests do not: the exit code, and a loud line about one above those tested."""
    here, red, loud = Version(transformers.__version__), 0, ""
    if newest is None:
        print("canary: pip lists no transformers, so its newest was not tried")
    for version in dict.fromkeys(asked or [OLDEST, *([newest] if newest else [])]):
        if version == here and not asked:
            print(f"canary: transformers {version} is the newest and the one of this run's own tests")
            continue
        passed, line = test(version)
        print(f"canary: transformers {version}: {'pass' if passed else 'FAIL'}: {line}", flush=True)
        if not passed and version.release[:2] <= tested.release[:2]:
            red = 1
        elif not passed:
            loud = f"!!! CANARY: transformers {version}, which pip gives to new users, FAILS. Mend this before other work. !!!"
    return red, loud


def newest_tested() -> Version:
    """The newest version in the table of docs/reliability.md."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    table = next(part for part in section if part.startswith("Versions"))
    return max(Version(one) for one in re.findall(r"^\| (\d+\.\d+\.\d+) \|", table, re.MULTILINE))


def main() -> None:
    listed = run(sys.executable, "-m", "pip", "index", "versions", "transformers", "--disable-pip-version-check")[1]
    code, loud = judge(find_newest(listed), [Version(one) for one in sys.argv[1:]], newest_tested())
    if loud:
        print("\n" + "!" * len(loud) + f"\n{loud}\n" + "!" * len(loud))
    sys.exit(code)


if __name__ == "__main__":
    main()
