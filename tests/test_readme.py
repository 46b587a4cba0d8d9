"""The README is short, and what it and the page on what works say has a test."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKS = (ROOT / "docs/guides/works-with.md").read_text(encoding="utf-8")


def test_the_first_screen():
    lines = README.splitlines()
    assert len(lines) <= 180
    assert lines[2].startswith("`with kvpatch.patched(model, policy=")
    screen = "\n".join(lines[:58])
    set_up = ("make demo", "make test", "make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo", "pip install")
    for wanted in (*set_up, "import kvpatch", "from_pretrained", "generate(", "print(", "report()"):
        assert wanted in screen, wanted


def _rows(name):
    table = WORKS.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_what_works_has_a_test_and_every_example_is_named():
    named = set()
    for what, example, test in _rows("works"):
        if not test.strip("` "):
            assert what.startswith("**"), what
            continue
        file, function = test.strip("` ").split("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), test
        named |= set(re.findall(r"\[(\w+)\]", example))
    parts = {"__init__", "finetune_table"}  # not run by themselves
    assert named == {path.stem for path in (ROOT / "examples").glob("*.py")} - parts


def _words(path):
    """What the file's strings say, with a gap for whatever is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_what_is_refused_is_said_in_these_words():
    said = [words for path in (ROOT / "kvpatch").rglob("*.py") for words in _words(path)]
    for what, wanted in _rows("refused"):
        for part in wanted.split(" ... "):
            assert any(part in words for words in said), f"{what}: {part}"
