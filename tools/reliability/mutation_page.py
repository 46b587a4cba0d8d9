"""A section of docs/reliability.md: how many mutants of each file were killed, and every survivor with why it lives."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import tomllib

from tools.reliability.mutants import Mutant
from tools.reliability.page import put

UNKNOWN = "not looked into"
INTRODUCTION = """## Mutation testing

Made by `make mutation`. cosmic-ray's operators change `policies/`, `cache/` and `attention/`, or the files that `--files`
names, in one place at a time (an operator, a comparison, a number, `and`/`or`, `not`, `True`/`False`, a loop, a decorator);
each changed copy meets the tests that run the changed statement, and is *killed* by the first that fails, or by {limit}
seconds; what survives may be tried again with more tests, slow ones too (`--again survived`). Where a place can be changed in
several ways (eleven other operators, a number up or down) the seed draws one. Left out: docstrings, type annotations, the
words of errors (`raise` statements), `TYPE_CHECKING` blocks, assertions for the type checker, and changes that do not compile.
"""


def write_page(page: Path, root: Path, listed: list[Mutant], results: dict[str, dict[str, Any]], seed: int) -> None:
    """The page, from the results of those mutants that have one."""
    from tools.reliability.mutation_worker import LIMIT

    reasons = read_reasons(root)
    done = [(mutant, results[mutant.key]["verdict"]) for mutant in listed if mutant.key in results]
    lines = [INTRODUCTION.format(limit=LIMIT)]
    rows, total = [], Counter({"listed": len(listed)})
    survivors = []
    for file in dict.fromkeys(mutant.file for mutant in listed):
        counts = Counter(verdict for mutant, verdict in done if mutant.file == file)
        same = 0
        for mutant, verdict in done:
            if mutant.file == file and verdict == "survived":
                why, equal = reason(reasons, mutant)
                same += equal
                survivors.append((mutant, why))
        tried = sum(counts.values())
        rows.append(_row(file, tried, counts, same))
        total.update(counts)
        total["same"] += same
    tried = total["killed"] + total["survived"] + total["timeout"]
    lines += ["| file | mutants | killed | of these by time | survivors | of these equivalent | killed |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |", *rows, _row("**all**", tried, total, total["same"]), ""]
    dead = total["killed"] + total["timeout"]
    if tried < len(listed):
        low, high = interval(dead, tried)
        lines += [f"A sample of {tried} of {len(listed)} mutants, drawn by seed {seed}: {low:.1%} to {high:.1%} (95%).", ""]
    different = tried - total["same"]
    lines += [f"Of the {different} that are not equivalent, {dead / max(different, 1):.1%} were killed.", ""]
    lines += ["### Survivors", "", "| where | line | becomes | why it survives |", "| --- | --- | --- | --- |"]
    for mutant, why in sorted(survivors, key=lambda pair: (pair[0].file, pair[0].line)):
        place = f"`{mutant.file}` {mutant.where}"
        lines.append(f"| {place} | {_code(mutant.before)} | {_code(mutant.after)} | {why} |")
    put("\n".join(lines), page)
    print(f"{page.relative_to(root)}: {dead} of {tried} killed ({dead / max(tried, 1):.1%}), {len(survivors)} survivors")


def _row(file: str, tried: int, counts: Counter[str], same: int) -> str:
    dead = counts["killed"] + counts["timeout"]
    name = file if file.startswith("**") else f"`{file}`"
    share = f"{dead / tried:.1%}" if tried else "-"
    return f"| {name} | {tried} | {dead} | {counts['timeout']} | {counts['survived']} | {same} | {share} |"


def read_reasons(root: Path) -> list[dict[str, Any]]:
    return tomllib.loads((root / "tools" / "reliability" / "equivalent.toml").read_text()).get("survivor", [])


def reason(reasons: list[dict[str, Any]], mutant: Mutant) -> tuple[str, bool]:
    """Why a survivor lives, and whether it computes the same: the first entry whose file, line and change fit it."""
    for entry in reasons:
        here = entry["file"] in (mutant.file, "*") and entry.get("where", mutant.where) == mutant.where
        if here and entry["line"] in mutant.before and entry.get("becomes", "") in mutant.after:
            return entry["why"], entry.get("equivalent", True)
    return UNKNOWN, False


def interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
    if not n:
        return 0.0, 1.0
    share, square = successes / n, z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return middle - half, middle + half


def _code(text: str) -> str:
    return "`" + text.split("  # ")[0].replace("|", "\\|").strip() + "`" if text else "(nothing)"
