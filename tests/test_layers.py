"""The package's modules import downwards only, and no files import each other in a circle: docs/architecture.md.

Counted are all imports, also those under TYPE_CHECKING and inside functions.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1] / "kvpatch"
LAYERS = (
    ("errors",), ("policies",), ("backends",), ("arch",), ("cache",), ("attention", "storage"), ("serving",),
    ("hooks",),
    ("plotting", "report_text"), ("report",), ("handle",), ("patching",), ("evaluation",), ("planning",), ("cli",),
    ("__main__",),
)  # fmt: skip
HUGGING_FACE = (
    "arch", "hooks", "cli", "evaluation", "handle", "patching", "cache.cache", "cache.state", "cache.layer",
    "cache.from_dynamic", "cache.lossless", "cache.recurrent", "serving.engine", "serving.sampling", "planning.weights",
)  # fmt: skip
ROOT_MODULES = 8  # at most
LINES = 300  # of a file that docs/architecture.md does not name among the long ones


def modules() -> dict[str, Path]:
    """Every module of the package by its name within it; packages by the name of their folder."""
    files = [path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(name: str, path: Path, text: str | None = None) -> set[str]:
    """Absolute names that a module imports; `from a import b` gives a and a.b."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    here = ["kvpatch", *filter(None, package.split("."))]
    found = set()
    for node in ast.walk(ast.parse(path.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def graph(changed: dict[str, str] | None = None) -> dict[str, set[str]]:
    """Modules of the package that each module imports, the deepest that is named."""
    known, result = modules(), {}
    for name, path in known.items():
        found = imports(name, path, (changed or {}).get(name))
        own = {one.removeprefix("kvpatch.") for one in found if one.startswith("kvpatch.")}
        files = {one for one in own if one in known}
        result[name] = {one for one in files if not any(other.startswith(f"{one}.") for other in files)} - {name}
    return result


def upward(imported: dict[str, set[str]]) -> list[str]:
    """Imports of a layer that is not below, and of another part of the same layer."""
    rank = {part: index for index, parts in enumerate(LAYERS) for part in parts}
    wrong = []
    for name, others in imported.items():
        mine = name.split(".")[0]
        for theirs in sorted(other.split(".")[0] for other in others):
            if mine != theirs and rank[theirs] >= rank[mine]:
                wrong.append(f"{name} -> {theirs}")
    return wrong


def circles(imported: dict[str, set[str]]) -> list[str]:
    """Modules that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for other in imported[stack.pop()] - seen:
                seen.add(other)
                stack.append(other)
        return seen

    return sorted(name for name in imported if name in reached(name))


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in modules()} == {part for parts in LAYERS for part in parts}
    assert len(list(ROOT.glob("*.py"))) <= ROOT_MODULES


def test_imports_go_downwards():
    assert upward(graph()) == []


def test_no_circle():
    assert circles(graph()) == []


def test_hugging_face_stays_at_the_door():
    """transformers, accelerate and peft are named where models are met, nowhere in the computations."""
    for name, path in modules().items():
        outside = {one.split(".")[0] for one in imports(name, path)} & {"transformers", "accelerate", "peft"}
        assert not outside or name.startswith(HUGGING_FACE), f"{name} imports {outside}"


def test_a_breach_is_seen():
    """An import that goes up, one under TYPE_CHECKING that closes a circle, and one inside a function."""
    up = graph({"policies.scores": "from ..cache.layer import SlotLayer"})
    assert upward(up) == ["policies.scores -> cache"]
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .scores import Score"
    assert "policies.scores" in circles(graph({"policies.budgets": typed}))
    inner = "def f():\n    from ..patching import patch"
    assert upward(graph({"hooks.target": inner})) == ["hooks.target -> patching"]


def test_long_files_are_those_that_the_documentation_explains():
    said = (ROOT.parent / "docs" / "architecture.md").read_text().partition("## Files and classes that are long")[2]
    named = {ROOT / name for row in re.findall(r"^\| (`.*?) \|", said, re.MULTILINE) for name in re.findall("`(.*?)`", row)}
    long = {path for path in ROOT.rglob("*.py") if len(path.read_text().splitlines()) > LINES}
    assert f"at most {LINES} lines" in said
    assert long == named
