"""The tool that runs transformers' own tests: outcomes by test, which of them differ, and what the page says."""

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
