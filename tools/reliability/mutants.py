"""The mutants of some source files: cosmic-ray's operators make them, and what tests cannot be asked to notice is left out."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

NEEDS_ARGUMENTS = ("VariableReplacer", "VariableInserter")  # operators that do nothing unless told which variable


@dataclass(frozen=True)
class Mutant:
    """One change. file: below kvpatch/. lines: those of its statement. before, after: the changed lines, stripped. where: the
    function, method or class. key: of its result, which holds as long as that function reads the same."""

    file: str
    operator: str
    line: int
    lines: tuple[int, int]
    before: str
    after: str
    where: str
    span: tuple[int, int]
    at_import: bool
    source: str
    key: str


class Module:
    """A source file with what is left out of it, and which statement and function a line belongs to."""

    def __init__(self, source: str) -> None:
        self.source, self.tree = source, ast.parse(source)

    @cached_property
    def dumped(self) -> str:
        """The tree as text, to see whether a change makes another."""
        return ast.dump(self.tree)

    @cached_property
    def left_out(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Type annotations, assertions (for mypy), raised errors (their words), and blocks for type checkers alone."""
        found: list[ast.AST] = []
        for node in ast.walk(self.tree):
            for_mypy = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if for_mypy or isinstance(node, ast.Raise | ast.Assert):
                found.append(node)
            found += [part for name in ("annotation", "returns") if (part := getattr(node, name, None)) is not None]
        return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found]  # type: ignore[attr-defined]

    def leaves_out(self, at: tuple[int, int]) -> bool:
        """Whether a change at (line, column) is none to be noticed; a bare * among parameters is no product."""
        line = self.source.splitlines()[at[0] - 1]
        return any(start <= at < end for start, end in self.left_out) or line[at[1] :].replace(" ", "")[:2] in ("*,", "/,")

    def statement(self, line: int) -> tuple[int, int]:
        """First and last line of the smallest statement (of a compound one: its head)."""
        best = (1, len(self.source.splitlines()))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
                body = getattr(node, "body", None)
                end = body[0].lineno - 1 if body else node.end_lineno
                if line <= max(end, node.lineno) and end - node.lineno <= best[1] - best[0]:
                    best = (node.lineno, max(end, node.lineno))
        return best

    def scope(self, line: int) -> tuple[str, tuple[int, int], bool]:
        """Name and lines of what a line stands in, and whether it runs when the module is imported."""
        name, span, at_import, node = [], (1, len(self.source.splitlines())), True, self.tree
        while True:
            inner = [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.lineno <= line <= (child.end_lineno or 0)
            ]
            if not inner:
                return ".".join(name), span, at_import
            node = inner[0]  # type: ignore[assignment]
            name.append(inner[0].name)
            span = (inner[0].lineno, inner[0].end_lineno or 0)
            if isinstance(inner[0], ast.FunctionDef) and line >= inner[0].body[0].lineno:
                at_import = False


def mutants(root: Path, file: str, seed: int, packages: str | None) -> Iterator[Mutant]:
    """All mutants of kvpatch/`file`. Of the replacements that one operator or number could get, one is drawn by `seed`."""
    if packages is not None and packages not in sys.path:
        sys.path.append(packages)  # behind this environment's own
    from cosmic_ray.mutating import mutate_code

    source = (root / "kvpatch" / file).read_text()
    module, lines = Module(source), source.splitlines()
    for place, choices in _places(source).items():
        if module.leaves_out(place[1]):
            continue
        ranked = sorted(choices, key=lambda choice: hashlib.sha256(f"{seed} {file} {place} {choice[0]}".encode()).digest())
        for name, operator, occurrence in ranked:
            try:
                mutated = mutate_code(source, operator, occurrence)
                tree = ast.parse(mutated)
            except (SyntaxError, AttributeError):  # that of an exception with a dotted name
                continue  # an operator that means something else here: another is drawn
            if ast.dump(tree) == module.dumped:
                continue
            yield _mutant(module, file, name, place[1][0], lines, mutated)
            break


def _places(source: str) -> dict[tuple[str, tuple[int, int]], list[tuple[str, Any, int]]]:
    """What may be changed: (kind of operator, position) -> (operator's name, operator, occurrence)."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple[str, tuple[int, int]], list[tuple[str, Any, int]]] = {}
    for full_name in cosmic_ray.plugins.operator_names():
        name = full_name.split("/")[1]
        if name in NEEDS_ARGUMENTS:
            continue
        operator, occurrence = cosmic_ray.plugins.get_operator(full_name)(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                found.setdefault((name.split("_")[0], start), []).append((name, operator, occurrence))
                occurrence += 1
    return found


def _mutant(module: Module, file: str, operator: str, line: int, lines: list[str], mutated: str) -> Mutant:
    where, span, at_import = module.scope(line)
    new = mutated.splitlines()
    same = next((i for i, (a, b) in enumerate(zip(lines, new, strict=False)) if a != b), len(new))
    behind = next((i for i, (a, b) in enumerate(zip(lines[::-1], new[::-1], strict=False)) if a != b), 0)
    behind = min(behind, len(lines) - same, len(new) - same)
    before, after = (" ".join(part.strip() for part in text[same : len(text) - behind]) for text in (lines, new))
    own = "\n".join(lines[span[0] - 1 : span[1]]) if where else "\n".join(lines)
    key = hashlib.sha256(f"{file}\n{where}\n{own}\n{before}\n{after}\n{line - span[0]}\n{operator}".encode()).hexdigest()[:20]
    return Mutant(file, operator, line, module.statement(line), before, after, where, span, at_import, mutated, key)
