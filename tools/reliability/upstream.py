"""transformers' own tests of a model, unpatched and patched at k=1.0, and which of them differ: `make upstream-tests`.

    python -m tools.reliability.upstream TRANSFORMERS [SUITE ...] [--packages FOLDER] [--note TEXT] [--write]

TRANSFORMERS is a checkout of transformers' repository at the version that is installed; a SUITE is a folder of its tests/models
(those of SUITES by default). Tests that ask for an accelerator, several processes or a download are skipped both times.
--packages: a folder with what those tests need beside the development environment (parameterized, expecttest, httpx).
--note: a sentence on where the tests come from, for the page.
--write puts the tables into docs/reliability.md. A test that differs and has no cause in CAUSES makes the command fail.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
import transformers

from tools.reliability import upstream_tests
from tools.reliability.page import ROOT, put

# folder of tests/models -> what of it runs: all tests of the model, or those that it has of GenerationTesterMixin
ALL, GENERATION = "all", "generation"
SUITES = {
    **dict.fromkeys(("llama", "mistral", "mpt", "gptj", "gpt2"), ALL),
    "qwen3_next": GENERATION,  # a hybrid
    "deepseek_v3": GENERATION,  # latent attention
    "gemma3": GENERATION,  # layers that slide; alone, and with images
    "gemma4": GENERATION,  # layers of two head sizes; alone, and with images
    "qwen2_5_vl": GENERATION,  # images, positions in three dimensions
}
_COMPILED = "::test_generate_compile_model_forward_fullgraph"
_NOT_COMPILED = "asks for a compiled decode step, which is refused for a hybrid and for layers that use others' keys"
_SLOTS = "looks at a sliding layer's tensors, which have empty slots beside the window"
# a test that differs on purpose, by a part of its name, the first that fits: why
CAUSES = {
    f"Qwen3NextModelTest{_COMPILED}": _NOT_COMPILED,
    f"Gemma4Audio2TextModelTest{_COMPILED}": _NOT_COMPILED,
    "Gemma3Vision2TextModelTest::": "reads an image's tokens in both directions, which is refused: a cache under a budget is "
    "read causally",
    "Qwen3NextModelTest::test_past_key_values_format": "counts the layers with a state, which stand beside the cache's layers "
    "here",
    "DeepseekV3ModelTest::test_past_key_values_format": "expected latents in the cache, which held expanded entries when this "
    "ran",
    "Gemma3TextModelTest::test_past_key_values_format": _SLOTS,
    "Gemma3TextModelTest::test_generate_continue_from_past_key_values": _SLOTS,
    _COMPILED: "asserts that `generate()` makes a `DynamicCache`, which is an `EvictingCache` here",
}
COUNTS = ("skipped", "passed", "failed")  # of a test's parts the last of these counts


@dataclass(frozen=True)
class Suite:
    """Outcomes by test, unpatched and patched, and the classes that were not patched, each with the reason."""

    name: str
    plain: dict[str, str]
    patched: dict[str, str]
    left: tuple[str, ...] = ()

    def passed(self, patched: bool) -> int:
        return Counter((self.patched if patched else self.plain).values())["passed"]

    @classmethod
    def of(cls, checkout: Path, name: str, packages: str | None) -> Suite:
        """Run a suite unpatched, then patched."""
        plain, _ = run(checkout, name, packages, False)
        return cls(name, plain, *run(checkout, name, packages, True))

    def skipped(self) -> int:
        return Counter(self.plain.values())["skipped"]

    def differing(self) -> list[str]:
        """Tests whose outcomes are not the same, or that ran once only."""
        names = {**self.plain, **self.patched}
        return [name for name in names if self.plain.get(name) != self.patched.get(name)]


def outcomes(report: Path) -> dict[str, str]:
    """Test -> outcome, from pytest's JUnit report; of subtests the one that counts."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {part.tag for part in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[name] = max(found.get(name, outcome), outcome, key=COUNTS.index)
    return found


def of_generation(checkout: Path) -> str:
    """Names of the tests that a model's own class has from GenerationTesterMixin, as pytest's -k takes them."""
    text = (checkout / "tests/generation/test_utils.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    mixin = next(node for node in classes if node.name == "GenerationTesterMixin")
    return " or ".join(node.name for node in mixin.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def run(checkout: Path, suite: str, packages: str | None, patched: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """One suite in a process of its own: outcomes by test, and the classes that were left as they are, each with the reason."""
    test = f"tests/models/{suite}/test_modeling_{suite}.py"
    path = [str(ROOT), *filter(None, [packages, os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", test, "-q", "-W", "ignore", "-p", "no:cacheprovider", f"--junitxml={report}"]
        chosen = ["-k", of_generation(checkout)] if SUITES.get(suite, ALL) == GENERATION else []
        plugin = ["-p", upstream_tests.__name__] if patched else []
        done = subprocess.run([*command, *chosen, *plugin], cwd=checkout, env=env, text=True, capture_output=True)
        if done.returncode not in (0, 1) or not report.is_file():
            raise SystemExit(f"{test} did not run:\n{done.stdout[-3000:]}")
        left = [line.removeprefix("kvpatch: ") for line in done.stdout.splitlines() if upstream_tests.LEFT in line]
        return outcomes(report), tuple(left)


def cause(test: str) -> str | None:
    """Why a test may differ; None where that is not known."""
    return next((why for part, why in CAUSES.items() if part in test), None)


def page(suites: list[Suite], note: str = "") -> str:
    """The section of docs/reliability.md."""
    rows = [
        f"| {one.name} | {SUITES.get(one.name, ALL)} | {one.passed(False)} | {one.passed(True)} | {one.skipped()} | "
        f"{len(one.differing())} |"
        for one in suites
    ]
    lines = [
        "## transformers' own tests\n",
        "transformers' tests of a model, unpatched and with every model of a known architecture patched (`h2o`, k=1.0) when it",
        "is first called: nothing may change. tools/reliability/upstream_tests.py patches them, and looks after each test at",
        "what is left of the patch. A test differs if its outcome is another one, be it skipped instead of passed; one that",
        "skips a subtest counts as skipped. `generation`: of the tests those of GenerationTesterMixin, which transformers",
        "runs for every class that generates.",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, on a CPU, without a network. Written by",
        "`make upstream-tests TRANSFORMERS=PATH`, PATH a checkout of transformers' repository.",
        *filter(None, [note]),
        "",
        "| suite | tests | passed unpatched | passed patched | skipped unpatched | differ |",
        "|---|---|---:|---:|---:|---:|",
        *rows,
        "",
    ]
    differing = [(one.name, test) for one in suites for test in one.differing()]
    if differing:
        lines += ["| differs | cause |", "|---|---|"]
        lines += [f"| {suite}: `{test}` | {cause(test) or 'unknown'} |" for suite, test in differing]
    else:
        lines.append("None differs.")
    lines += ["", *(f"In {one.name}, {left}." for one in suites for left in one.left)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transformers", type=Path)
    parser.add_argument("suites", nargs="*", default=SUITES)
    parser.add_argument("--packages")
    parser.add_argument("--note", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    packages = given.packages and str(Path(given.packages).resolve())
    if not (given.transformers / "tests/models").is_dir():
        raise SystemExit(f"{given.transformers} has no tests/models: give a checkout of transformers' repository.")
    suites = []
    for name in given.suites:
        suites.append(Suite.of(given.transformers, name, packages))
        print(f"{name}: {suites[-1].passed(False)} passed unpatched, {suites[-1].passed(True)} patched", flush=True)
    text = page(suites, given.note)
    print(text)
    if given.write:
        put(text)
    if any(cause(test) is None for one in suites for test in one.differing()):
        raise SystemExit("Some tests differ and nothing says why.")


if __name__ == "__main__":
    main()
