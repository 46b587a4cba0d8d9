"""The tool that runs transformers' own tests: outcomes by test, which of them differ, and what the page says."""

import subprocess

import pytest

from tools.reliability import upstream
from tools.reliability.page import put

REPORT = """<testsuites><testsuite>
<testcase classname="tests.models.llama.test_modeling_llama.LlamaModelTest" name="test_a"/>
<testcase classname="tests.models.llama.test_modeling_llama.LlamaModelTest" name="test_a"><failure message="x"/></testcase>
<testcase classname="tests.models.llama.test_modeling_llama.LlamaModelTest" name="test_b"><skipped message="x"/></testcase>
<testcase classname="tests.models.llama.test_modeling_llama.LlamaModelTest" name="test_c"/>
<testcase classname="tests.models.llama.test_modeling_llama.LlamaModelTest" name="test_c"><skipped message="x"/></testcase>
<testcase classname="tests.models.llama.test_modeling_llama.LlamaModelTest" name="test_d"><error message="x"/></testcase>
</testsuite></testsuites>"""


def test_a_test_fails_where_a_part_of_it_does(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = upstream.outcomes(tmp_path / "report.xml")
    assert list(found.values()) == ["failed", "skipped", "passed", "failed"]
    assert next(iter(found)) == "LlamaModelTest::test_a"


def test_the_page_names_what_differs_and_why(monkeypatch, tmp_path):
    plain = {"T::test_a": "passed", "T::test_b": "passed", "T::test_c": "failed", "T::test_d": "passed"}
    alike = upstream.Suite("gpt2", plain, dict(plain))
    assert "| gpt2 | all | 3 | 3 | 0 | 0 |" in upstream.page([alike])
    assert "None differs." in upstream.page([alike])
    changed = {**plain, "T::test_b": "skipped", "T::test_d": "failed"}
    other = upstream.Suite("gemma4", plain, changed, ("Gemma4Audio ran as it is: it hears",))
    monkeypatch.setattr(upstream, "CAUSES", {"::test_b": "as it should be"})
    text = upstream.page([alike, other], "A note.")
    assert "| gemma4 | generation | 3 | 1 | 0 | 2 |" in text
    assert "| gemma4: `T::test_b` | as it should be |" in text
    assert "| gemma4: `T::test_d` | unknown |" in text
    assert "In gemma4, Gemma4Audio ran as it is: it hears." in text
    put(text, tmp_path / "page.md")
    assert "(#transformers-own-tests): **The tests of transformers" in (tmp_path / "page.md").read_text()


def test_what_differs_without_a_cause_is_an_error(monkeypatch, tmp_path, capsys):
    (tmp_path / "tests/models").mkdir(parents=True)
    ran = {False: ({"T::test_a": "passed"}, ()), True: ({"T::test_a": "failed"}, ())}
    monkeypatch.setattr(upstream, "run", lambda checkout, suite, packages, patched: ran[patched])
    monkeypatch.setattr("sys.argv", ["upstream", str(tmp_path), "mpt"])
    with pytest.raises(SystemExit, match="nothing says why"):
        upstream.main()
    assert "mpt: 1 passed unpatched, 0 patched" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["upstream", str(tmp_path / "tests")])
    with pytest.raises(SystemExit, match="no tests/models: give a checkout"):
        upstream.main()


MIXIN = """
class Other:
    def test_no(self): ...

class GenerationTesterMixin:
    all_generative_model_classes = ()
    def test_greedy(self): ...
    def _check(self): ...
    def test_sample(self): ...
"""


def test_the_tests_of_generation_are_those_of_the_mixin(monkeypatch, tmp_path):
    (tmp_path / "tests/generation").mkdir(parents=True)
    (tmp_path / "tests/generation/test_utils.py").write_text(MIXIN)
    assert upstream.of_generation(tmp_path) == "test_greedy or test_sample"
    asked = []

    def pytest_run(command, **options):
        asked.append(command)
        report = next(part for part in command if part.startswith("--junitxml=")).removeprefix("--junitxml=")
        (tmp_path / "report.xml").write_text(REPORT)
        (tmp_path / "report.xml").replace(report)
        said = "kvpatch: 3 Gemma4Model patched\nkvpatch: Gemma4Audio ran as it is: it hears\n"
        return subprocess.CompletedProcess(command, 1, stdout=said)

    monkeypatch.setattr(upstream.subprocess, "run", pytest_run)
    found = upstream.Suite.of(tmp_path, "gemma4", None)
    assert found.left == ("Gemma4Audio ran as it is: it hears",) and found.skipped() == 1
    assert all(command[command.index("-k") + 1] == "test_greedy or test_sample" for command in asked)
    assert [upstream.upstream_tests.__name__ in command for command in asked] == [False, True]
    upstream.Suite.of(tmp_path, "llama", None)
    assert not any("-k" in command for command in asked[2:])
