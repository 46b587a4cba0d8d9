"""The words of kvpatch: openings of docstrings, names by the glossary, dimension letters, documented methods."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "kvpatch"
FILES = sorted(ROOT.rglob("*.py"))
OPENERS = {"what", "whether", "where", "which", "how", "who", "whose", "why", "as", "that", "if"}

# parts of identifiers that the glossary replaces, and the folders and modules that still have them: to be emptied
REPLACED = {
    "moment": (),  # eviction context
    "extents": (),  # head offsets
    "stretch": (),  # segment
    "stretches": (),
    "tiers": (),  # eviction keys
    "tail": (),  # observation window
    "site": (),  # bound adapter
    "words": (),  # error message
    "deck": (),  # stacked layers
    "journal": (),  # undo log
    "settle": (),  # allocate, reserve
    "claim": (),  # mutation guard
    "lag": ("policies",),  # step counters; LagKV means the distance to the tokens that follow
    "clock": (),
}

OF_OTHERS = {"rotary_dim", "lm_eval", "duo_attention_on_the_fly", "general_plugins", "vllm_xargs"}
"""Names of other libraries in docstrings that kvpatch's code does not have."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _parts(identifier: str) -> set[str]:
    """Split an identifier at underscores and capitals: `HeadOffsets`, `head_offsets` -> head, offsets."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def identifiers(tree: ast.Module) -> set[str]:
    """Collect names of variables, attributes, parameters, functions and classes."""
    fields = ("id", "attr", "arg", "name", "asname")
    found = {getattr(node, field, None) for node in ast.walk(tree) for field in fields}
    return {name for name in found if isinstance(name, str)}


def docstrings(tree: ast.Module) -> list[tuple[str, str]]:
    """Name and docstring of a module, its classes and functions; a text after an assignment documents that name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "name", "module"), text))
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    value = after.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        found.append((ast.unparse(before).split(" ")[0], value.value))
    return found


def opens_wrong(text: str) -> bool:
    word = re.match(r"\W*(\w+)", text)
    return word is not None and word[1].lower() in OPENERS


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_docstrings_open_with_a_verb_or_a_noun(path):
    wrong = [name for name, text in docstrings(ast.parse(path.read_text())) if opens_wrong(text)]
    assert not wrong, f"{_name(path)}: docstrings of {', '.join(wrong)} open with one of {', '.join(sorted(OPENERS))}"


def test_names_in_docstrings_exist():
    """A docstring names callers and fields: one that was renamed or removed is found, unless the name is of another library."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    known = OF_OTHERS | {part for path in FILES for part in (*path.relative_to(ROOT).parts, path.stem)}
    for tree in trees.values():
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        known |= identifiers(tree) | {text for text in texts if text.isidentifier()}
    quoted = [
        (_name(path), name, quote)
        for path, tree in trees.items()
        for name, text in docstrings(tree)
        for quote in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)
    ]
    gone = [one for one in quoted if not {one[2], one[2].rpartition(".")[2]} & known]
    assert not gone and len(quoted) > 1000, gone


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_names_follow_the_glossary(path):
    used = {part for name in identifiers(ast.parse(path.read_text())) for part in _parts(name)}
    wrong = {word for word in used & REPLACED.keys() if not _name(path).startswith(REPLACED[word] or ("-",))}
    assert not wrong, f"{_name(path)} has identifiers with {', '.join(sorted(wrong))}: see the glossary in docs/architecture.md"


LETTERS_PENDING = {"P"}  # cache/: columns of a prompt


def _letters(key: str) -> set[str]:
    return set(re.findall(r"\b([A-Z])(?= [a-z])", key))


def test_dimension_letters_are_in_the_key():
    letters = _letters(ast.get_docstring(ast.parse((ROOT / "__init__.py").read_text())).split("Dimension key")[1])
    assert letters >= set("BHGQTDLV")
    for path in FILES:
        names = set(re.findall(r"\b[a-z]+(?:_[a-z]+)*_([A-Z][A-Z1]*)\b", path.read_text()))
        unknown = {name for name in names if not set(name) <= letters | LETTERS_PENDING | {"1"}}
        assert not unknown, f"{_name(path)}: {', '.join(sorted(unknown))} is not in the key of kvpatch/__init__.py"


def classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    nodes = {path: ast.walk(ast.parse(path.read_text())) for path in FILES}
    return {node.name: (path, node) for path, own in nodes.items() for node in own if isinstance(node, ast.ClassDef)}


def documented(known: dict[str, tuple[Path, ast.ClassDef]], name: str, method: str) -> bool:
    """Tell whether a class or one of its bases documents a method; a base outside the package counts as documented."""
    if name not in known:
        return name not in ("Protocol", "Enum")
    node = known[name][1]
    own = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == method]
    if any(ast.get_docstring(one) for one in own):
        return True
    return any(documented(known, ast.unparse(base).split(".")[-1], method) for base in node.bases)


def test_public_methods_have_a_docstring_or_inherit_one():
    known = classes()
    missing = [
        f"{_name(path)}: {name}.{node.name}"
        for name, (path, one) in known.items()
        if not name.startswith("_")
        for node in one.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not documented(known, name, node.name)
    ]
    assert missing == []


SHARED = {
    "Backend": "vLLM wants the name of the class for each kind of device",
    "Rule": "of a budget, which users import, and of a kernel, which the acceptance run on a GPU takes by that name",
}


def test_a_class_has_a_name_of_its_own():
    named = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(path.name)
    assert {name: files for name, files in named.items() if len(files) > 1}.keys() == SHARED.keys()


def test_a_breach_is_seen():
    assert opens_wrong("What is kept.") and opens_wrong('"Whether it is.') and not opens_wrong("Kept tokens.")
    assert docstrings(ast.parse('"""Module."""\nX = 1\n"""Where it is."""')) == [("module", "Module."), ("X", "Where it is.")]
    assert identifiers(ast.parse("def f(order): x.tail = f(site=1)")) == {"f", "order", "x", "tail", "site"}
    assert _parts("test_MomentOf_tail_BHT") == {"test", "moment", "of", "tail", "bht"}
    assert _letters("B rows, F entries of R1D and T tokens") == {"B", "F", "T"}
