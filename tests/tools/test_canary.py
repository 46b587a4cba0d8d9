"""The canary: which versions it tests, and what its failures mean."""

import re

import pytest
from packaging.version import Version

from kvpatch.hooks import versions
from tools.reliability import canary

LISTED = "transformers (5.31.0)\nAvailable versions: 6.1.0, 6.0.0, 5.32.0rc1, 5.31.0, 5.30.2, 5.15.0\n  INSTALLED: 5.24.0"
HERE = Version("5.24.0")


def test_the_newest_is_the_newest_release_that_is_allowed():
    assert canary.find_newest(LISTED) == Version("5.31.0")
    assert canary.find_newest("ERROR: No matching distribution found for transformers") is None


@pytest.fixture
def outcomes(monkeypatch):
    """Versions that fail; every other passes. What was tested is noted in `seen`."""
    failing, seen = set(), []

    def test(version):
        seen.append(str(version))
        return str(version) not in failing, "1 failed" if str(version) in failing else "1 passed"

    monkeypatch.setattr(canary, "test", test)
    monkeypatch.setattr(canary.transformers, "__version__", str(HERE))
    return failing, seen


def test_what_this_run_tests_is_not_tested_again(outcomes, capsys):
    assert canary.judge(HERE, [], HERE) == (0, "")
    assert outcomes[1] == [str(canary.OLDEST)]
    assert f"transformers {HERE} is the newest and the one of this run's own tests" in capsys.readouterr().out


def test_a_failure_of_a_tested_version_is_red(outcomes):
    outcomes[0].add(str(canary.OLDEST))
    assert canary.judge(Version("5.98.0"), [], Version("5.98.1")) == (1, "")
    outcomes[0].clear()
    outcomes[0].add("5.98.0")
    assert canary.judge(Version("5.98.0"), [], Version("5.98.1")) == (1, "")


def test_a_failure_of_a_version_that_nobody_tested_is_loud_and_not_red(outcomes):
    outcomes[0].add("5.99.0")
    code, loud = canary.judge(Version("5.99.0"), [], Version("5.98.1"))
    assert code == 0 and "transformers 5.99.0" in loud and "FAILS" in loud
    assert outcomes[1] == [str(canary.OLDEST), "5.99.0"]


def test_without_a_list_it_says_so(outcomes, capsys):
    assert canary.judge(None, [], HERE) == (0, "")
    assert "pip lists no transformers" in capsys.readouterr().out


def test_its_files_exist():
    assert all((canary.ROOT / "tests" / one).exists() for one in canary.CORE)


def test_the_page_names_the_newest_tested_version():
    assert f"{canary.newest_tested().major}.{canary.newest_tested().minor}" == versions.TESTED["transformers"]
    torches = re.findall(r"^\| \d+\.\d+\.\d+ \| (\d+\.\d+)\S* \| pass", canary.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert max(map(Version, torches)) == Version(versions.TESTED["torch"])
