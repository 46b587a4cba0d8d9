"""The tool that looks for holes in the tests: what it leaves out, which tests it picks, and what its page says."""

from tools.reliability.mutants import Module, Mutant
from tools.reliability.mutation import in_scope
from tools.reliability.mutation_page import read_reasons, write_page
from tools.reliability.mutation_tests import ALWAYS, UNSEEN, Tests
from tools.reliability.page import ROOT

SOURCE = '''
import typing
if typing.TYPE_CHECKING:
    LIMIT = 1 + 1

SIZE: int | None = 3


def f(a: int | None, *, b: int = 2 + 2) -> int | None:
    """A docstring: 1 + 1."""
    assert a is not None
    if a > b:
        raise ValueError(f"{a + 1} is more than {b}")
    return (
        a
        + b
    )
'''


def _at(text, part=""):
    """Line and column of `part` in the line with `text`."""
    number = next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)
    return number, SOURCE.splitlines()[number - 1].index(part or text)


def test_tests_that_every_mutant_meets_are_there():
    for name in (*ALWAYS, *UNSEEN):
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), name


def test_what_is_left_out():
    module = Module(SOURCE)
    for text, part in [
        ("LIMIT =", "+"), ("SIZE", "|"), ("def f", "|"), ("def f", "*,"), ("-> int", "| None:"), ("assert", "is not"),
        ("raise", "+"),
    ]:  # fmt: skip
        assert module.leaves_out(_at(text, part)), (text, part)
    for text, part in [("SIZE", "3"), ("def f", "2 + 2"), ("if a > b", ">"), ("        + b", "+")]:
        assert not module.leaves_out(_at(text, part)), (text, part)


def _mutant(line=5, key="k", **kwargs):
    given = {"file": "a.py", "operator": "AddNot", "line": line, "lines": (line, line), "before": "if a | b:  # why",
             "after": "if not a | b:", "where": "f", "span": (4, 8), "at_import": False, "source": "", "key": key}  # fmt: skip
    return Mutant(**{**given, **kwargs})


def test_tests_are_those_that_run_the_line_and_the_telling_ones_come_first():
    def ran(*lines):
        return {"a.py": list(lines), "b.py": [5]}

    found = {
        "t.py::slow[1]": {"seconds": 2.0, "lines": ran(5)},
        "t.py::fast[1]": {"seconds": 0.1, "lines": ran(5, 6)},
        "t.py::fast[2]": {"seconds": 0.2, "lines": ran(5)},
        "t.py::other": {"seconds": 0.01, "lines": ran(7)},
        "t.py::endless": {"seconds": 1000.0, "lines": ran(5)},
        "t.py::long": {"seconds": 30.0, "lines": ran(5)},
        **{f"t.py::swift[{n}]": {"seconds": 0.02 + n / 1000, "lines": ran(9)} for n in range(3)},
        "t.py::first": {"seconds": 0.06, "lines": ran(9)},
    }
    tests = Tests(found)
    assert tests.of(_mutant()) == ["t.py::fast[1]", "t.py::slow[1]", "t.py::fast[2]"]
    assert tests.of(_mutant(), again=True) == ["t.py::fast[1]", "t.py::slow[1]", "t.py::long", "t.py::fast[2]", *UNSEEN]
    swift = ["t.py::swift[0]", "t.py::swift[1]", "t.py::swift[2]", "t.py::first"]
    assert tests.of(_mutant(line=9, span=(9, 9))) == swift
    tests.note(_mutant(), "t.py::fast[2]")
    tests.note(_mutant(), "unknown")
    assert tests.of(_mutant()) == ["t.py::fast[2]", "t.py::fast[1]", "t.py::slow[1]"]
    assert "t.py::other" in tests.of(_mutant(line=8))  # nobody runs it: whoever runs its function
    assert Tests(found).of(_mutant(file="c.py")) == []


def test_the_page(tmp_path):
    folder = tmp_path / "tools" / "reliability"
    folder.mkdir(parents=True)
    (folder / "equivalent.toml").write_text(
        '[[survivor]]\nfile = "a.py"\nline = "if a"\nbecomes = "not a"\nwhy = "both the same"\n'
    )
    listed = [_mutant(key=str(i), line=i) for i in range(4)] + [_mutant(key="4", file="b.py")]
    verdicts = {"0": "killed", "1": "timeout", "2": "survived", "4": "survived"}
    page = tmp_path / "docs" / "page.md"
    write_page(page, tmp_path, listed, {key: {"verdict": verdict} for key, verdict in verdicts.items()}, 7)
    text = page.read_text()
    assert "\n## Mutation testing\n" in text
    assert "| `a.py` | 3 | 2 | 1 | 1 | 1 | 66.7% |" in text
    assert "| **all** | 4 | 2 | 1 | 2 | 1 | 50.0% |" in text
    assert "A sample of 4 of 5 mutants, drawn by seed 7" in text
    assert "Of the 3 that are not equivalent, 66.7% were killed." in text
    assert r"| `a.py` f | `if a \| b:` | `if not a \| b:` | both the same |" in text
    assert "| `b.py` f |" in text
    assert "| not looked into |" in text


def test_reasons_are_of_lines_that_are_there():
    named = [entry["file"] for entry in read_reasons(ROOT) if entry["file"] != "*"]  # --files takes any
    sources = {file: (ROOT / "kvpatch" / file).read_text() for file in (*in_scope(), *named)}
    for entry in read_reasons(ROOT):
        assert any(entry["line"] in text for file, text in sources.items() if entry["file"] in (file, "*")), entry
