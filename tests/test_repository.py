"""What the public repository brings: workflows, templates of issues, hooks before a commit."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests import conftest

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
pytestmark = pytest.mark.skipif(not GITHUB.is_dir(), reason="a copy without the files whose names begin with a dot")
"""Targets that a workflow may call before they are there."""


def _load(path):
    read = yaml.safe_load(path.read_text())
    assert isinstance(read, dict), path
    return {("on" if key is True else key): value for key, value in read.items()}  # YAML 1.1 reads `on` as a boolean


def _commands(job):
    """Commands of a job, once for each combination of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        lines = [step.get("run", "")]
        for name, values in matrix.items():
            place = f"${{{{ matrix.{name} }}}}"
            lines = [line.replace(place, value) for line in lines for value in (values if place in line else [""])]
        yield from (shlex.split(line) for line in lines if line)


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} == {"test", "canary"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_parses_and_calls_targets_that_are_there(path):
    workflow = _load(path)
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys() and workflow["permissions"] == {"contents": "read"}
    called = set()
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        commands = list(_commands(job))
        assert commands and not any("${{" in word for words in commands for word in words)
        called |= {words[1] for words in commands if words[0] == "make"}
    assert called and called <= TARGETS


def test_the_parts_of_ci_run_on_every_python():
    (job,) = _load(GITHUB / "workflows/test.yml")["jobs"].values()
    matrix = job["strategy"]["matrix"]
    parts = re.findall(r"^make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert [*matrix["target"], "canary"] == parts, "the parts of .ci/run; the canary has a workflow of its own"
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert matrix["python"] == classifiers and {"3.10", "3.13"} <= set(classifiers)
    assert job["env"] == {"TORCH_INDEX": "https://download.pytorch.org/whl/cpu", "PYTHON": "python"}
    makefile = (ROOT / "Makefile").read_text()
    assert "\nTORCH_INDEX ?=" in makefile and "\nPYTHON ?=" in makefile, "variables of the environment are taken"


def test_the_canary_runs_each_day():
    workflow = _load(GITHUB / "workflows/canary.yml")
    (job,) = workflow["jobs"].values()
    assert [["make", "canary"]] == list(_commands(job))
    minute, hour, *rest = workflow["on"]["schedule"][0]["cron"].split()
    assert rest == ["*", "*", "*"] and 0 <= int(minute) < 60 and 0 <= int(hour) < 24


def test_a_report_of_a_bug_has_what_is_needed():
    version = "kvpatch --version --verbose"
    for name, wanted in {"bug": ("kvpatch check MODEL", version), "request": (version,)}.items():
        form = _load(GITHUB / f"ISSUE_TEMPLATE/{name}.yml")
        assert {"name", "description", "body"} <= form.keys()
        fields = {field["id"]: field for field in form["body"]}
        assert len(fields) == len(form["body"]) and all(field["attributes"]["label"] for field in form["body"])
        needed = [one["attributes"] for one in fields.values() if one.get("validations", {}).get("required")]
        required = " ".join(one.get("description", "") for one in needed)
        assert all(command in required for command in wanted), name


def test_hooks_before_a_commit_are_those_of_make_check():
    hooks = {hook["id"]: repo for repo in _load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    assert {"ruff-check", "mypy"} <= hooks.keys()
    (pinned,) = re.findall(r"^ruff==(.+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert hooks["ruff-check"]["rev"] == f"v{pinned}"


def test_settings_of_the_tools_are_in_setup_cfg_and_travel_with_the_sdist():
    settings = (ROOT / "setup.cfg").read_text()
    assert re.findall(r"^\[(.+)\]$", settings, re.MULTILINE) == ["mypy", "tool:pytest", "coverage:run", "coverage:report"]
    for section in ("mypy", "pytest", "coverage"):
        assert f"[tool.{section}" not in (ROOT / "pyproject.toml").read_text()
    manifest = (ROOT / "MANIFEST.in").read_text()
    assert "*.cfg" in manifest and "graft .ci\ngraft .github" in manifest and ".pre-commit-config.yaml" in manifest


def test_pytest_reads_its_settings(pytestconfig):
    if pytestconfig.rootpath == ROOT:
        assert pytestconfig.inipath == ROOT / "setup.cfg"
        assert any(line.startswith("slow:") for line in pytestconfig.getini("markers"))


class Case:
    """What pytest collects for one combination of values."""

    def __init__(self, *marks, sampled=None, **values):
        self.sampled = None if sampled is None else SimpleNamespace(args=(sampled,))
        self.marks, self.nodeid, self.function, self.obj, self.path = {*marks}, str(values), str, print, Path(__file__)
        self.callspec = SimpleNamespace(params=values)

    def get_closest_marker(self, name):
        return self.sampled if name == "sampled" else name if name in self.marks else None

    def add_marker(self, name):
        self.marks.add(name)


def test_each_value_of_a_parameter_is_in_a_case_that_is_not_wide():
    cases = [Case(name=name, policy=policy) for name in range(7) for policy in "abcdefghij"]
    conftest.pytest_collection_modifyitems(cases)
    assert sum("slow" not in case.marks for case in cases) == conftest.FAST
    narrow = [case.callspec.params for case in cases if "wide" not in case.marks]
    assert {one["name"] for one in narrow} == {*range(7)} and {one["policy"] for one in narrow} == {*"abcdefghij"}
    assert len(narrow) < 20
    every = [Case("every", "slow", name=name, policy=policy) for name in range(7) for policy in "abc"]
    conftest.pytest_collection_modifyitems(every)
    assert all(case.marks == {"every", "slow"} for case in every)


def test_of_a_sampled_test_one_in_so_many_is_not_wide():
    cases = [Case("slow", sampled=3, name=name) for name in range(31)]
    conftest.pytest_collection_modifyitems(cases)
    assert all("slow" in case.marks for case in cases) and sum("wide" not in case.marks for case in cases) == 11
