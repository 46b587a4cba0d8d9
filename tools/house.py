"""Counts of the code, which docs/architecture.md shows: `python -m tools.house`.

`--at COMMIT` counts another state of the repository, `--draw SEED` prints functions to be read alone, each with its file. A
count is a figure to look at and not to aim at: which names are good, readers say.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEFORE = "090b53b"
"""The commit of the column "before"."""
OWNERS = {"policy", "score"}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Code:
    """The Python files of a state of the repository, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {path.relative_to(root).as_posix(): path for path in sorted(root.glob("kvpatch/**/*.py"))}
        self.trees = {name: ast.parse(path.read_bytes()) for name, path in self.files.items()}

    def walk(self, *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
        """Yield the nodes of these kinds, each with the name of its file."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, kinds):
                    yield name, node

    def functions(self) -> list[tuple[str, Function]]:
        """Return all functions and methods but special ones such as __init__."""
        found = self.walk(ast.FunctionDef, ast.AsyncFunctionDef)
        return [(name, node) for name, node in found if not node.name.startswith("__")]

    def count_lines(self, folder: str) -> int:
        """Count the lines of a folder's Python files."""
        return sum(len(path.read_bytes().splitlines()) for path in self.root.glob(f"{folder}/**/*.py"))

    def list_score_members(self) -> set[str]:
        """Return the names that a score has, but for private ones."""
        members = set()
        for _, node in self.walk(ast.ClassDef):
            for one in node.body if node.name == "Score" else ():
                target = one.target if isinstance(one, ast.AnnAssign) else None
                members.add(one.name if isinstance(one, Function) else target.id if isinstance(target, ast.Name) else "_")
        return {name for name in members if not name.startswith("_")}

    def count_flags_read(self) -> int:
        """Count reads of a score's members, but for its needs, outside of policies/: `score.rows`, `self.policy.rows`."""
        members, found = self.list_score_members() - {"needs"}, self.walk(ast.Attribute)
        reads = [(name, node) for name, node in found if node.attr in members and _name_owner(node) in OWNERS]
        return sum(not name.startswith("kvpatch/policies/") for name, _ in reads)

    def count_gates(self) -> int:
        """Count functions outside of policies/ that raise an error under a condition on a policy or a score."""
        return sum(not name.startswith("kvpatch/policies/") and _is_gate(node) for name, node in self.functions())

    def count_definitions(self, wanted: str) -> int:
        """Count functions of this name."""
        return sum(node.name == wanted for _, node in self.functions())

    def share_of_single_words(self) -> float:
        """Return the percentage of functions whose names are one word."""
        names = [node.name.strip("_") for _, node in self.functions()]
        return 100 * sum("_" not in name for name in names) / len(names)

    def rate_of_any(self) -> float:
        """Return how often 1,000 lines of the library name the type Any."""
        found = sum(node.id == "Any" for _, node in self.walk(ast.Name))
        return 1000 * found / self.count_lines("kvpatch")

    def rate_of_comments(self) -> float:
        """Return how many comments stand on 100 lines of code, docstrings among them."""
        comments = code = 0
        for path in self.files.values():
            kinds = dict[int, set[int]]()
            for token in tokenize.tokenize(BytesIO(path.read_bytes()).readline):
                for line in range(token.start[0], token.end[0] + 1) if token.type not in LAYOUT else ():
                    kinds.setdefault(line, set()).add(token.type)
            comments += sum(tokenize.COMMENT in found for found in kinds.values())
            code += sum(found != {tokenize.COMMENT} for found in kinds.values())
        return 100 * comments / code


def _name_owner(node: ast.Attribute) -> str | None:
    """Return the name before the last dot."""
    value = node.value
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else None


def _is_gate(function: Function) -> bool:
    """Tell if a function raises an error under a condition on a policy or a score."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in node.body):
            read = (one for one in ast.walk(node.test) if isinstance(one, ast.Attribute))
            if any(_name_owner(one) in OWNERS for one in read):
                return True
    return False


COUNTS: dict[str, Callable[[Code], float]] = {
    "members of a score": lambda code: len(code.list_score_members()),
    "reads of members outside of policies/, needs apart": Code.count_flags_read,
    "functions there that refuse by parts of a policy": Code.count_gates,
    "definitions of map_rows": lambda code: code.count_definitions("map_rows"),
    "lines of kvpatch/": lambda code: code.count_lines("kvpatch"),
    "lines of tools/": lambda code: code.count_lines("tools"),
    "lines of tests/": lambda code: code.count_lines("tests"),
    "functions named by one word, %": lambda code: round(code.share_of_single_words()),
    "Any in 1,000 lines": lambda code: round(code.rate_of_any(), 1),
    "comments on 100 lines": lambda code: round(code.rate_of_comments(), 1),
}


def count_all(root: Path = ROOT) -> dict[str, str]:
    """Return the counts as a page shows them."""
    code = Code(root)
    return {name: f"{count(code):,}" for name, count in COUNTS.items()}


def count_commit(commit: str) -> dict[str, str]:
    """Return the counts of a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return count_all(Path(folder))


def draw_functions(seed: int, number: int = 12, least: int = 6) -> list[str]:
    """Return functions of at least some lines, drawn by chance, each with its file's name above it."""
    found = [(name, node) for name, node in Code(ROOT).functions() if node.end_lineno - node.lineno + 1 >= least]
    drawn = random.Random(seed).sample(found, number)
    return [f"# {name}\n{ast.get_source_segment((ROOT / name).read_text(), node, padded=True)}\n" for name, node in drawn]


def main() -> None:
    """Print counts, or functions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", metavar="COMMIT", help=f"count this commit, such as {BEFORE}")
    parser.add_argument("--draw", type=int, metavar="SEED", help="print functions drawn by chance in place of counts")
    asked = parser.parse_args()
    if asked.draw is not None:
        print("\n".join(draw_functions(asked.draw)))
        return
    for name, count in (count_all() if asked.at is None else count_commit(asked.at)).items():
        print(f"{name:52} {count:>8}")


if __name__ == "__main__":
    main()
