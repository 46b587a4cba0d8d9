"""`python -m tools.reliability.misuse --write`: every misuse of the tests with its error as it was printed, in
docs/reliability.md. Without --write it goes to the terminal."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tools.reliability.page import ROOT, put

TITLES = {
    "CACHES": "A cache",
    "PATCHES": "A patch, its report and its files",
    "PASSES": "A forward pass and generate()",
    "ARGUMENTS": "Policies, registries and the command line",
}


def told(row: Any, model: Any) -> tuple[str, str]:
    """The class and the message of one row's error."""
    from tests.helpers.misuse_world import enter

    with tempfile.TemporaryDirectory() as folder:
        world, stack = enter(model, Path(folder), row.on)
        with stack:
            try:
                row.do(world)
            except row.kind as error:
                if not re.search(row.words, str(error)):
                    raise SystemExit(f"{row.name}: other words than the test's: {error}") from error
                return type(error).__name__, str(error).strip().replace(folder, "folder")
    raise SystemExit(f"{row.name}: nothing was raised")


def of_patched(arguments: dict[str, Any], model: Any) -> tuple[str, str]:
    import kvpatch

    try:
        kvpatch.patch(model, **{"policy": "keyformer", **arguments}).remove()
    except kvpatch.KVPatchError as error:
        return type(error).__name__, str(error)
    raise SystemExit(f"{arguments}: nothing was raised")


def page() -> str:
    """The tables, by running every row."""
    from tests.helpers.tiny import make
    from tests.robustness import misuse, misuse_arguments
    from tests.robustness.test_errors import ARGUMENTS

    model, parts, count = make("llama_gqa"), [], 0
    for name, title in TITLES.items():
        rows = getattr(misuse, name, None) or getattr(misuse_arguments, name)
        count += len(rows)
        parts.append(_table(title, [(row.name, *told(row, model)) for row in rows]))
    shown = [(", ".join(f"{key}={value!r}" for key, value in one.items()), one) for one, _ in ARGUMENTS]
    parts.append(_table("Arguments of patched()", [(text, *of_patched(one, model)) for text, one in shown]))
    return (
        "## Misuse\n\n"
        f"{count + len(shown)} misuses, each with its error as it was printed. After each one "
        "tests/robustness/test_misuse.py finds the model bit for bit as before, and a misused cache goes on as its "
        "untouched clone does. Written by `python -m tools.reliability.misuse --write`.\n\n" + "\n".join(parts)
    )


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {_cell(name)} | {kind} | {_cell(words)} |" for name, kind, words in rows]
    return "\n".join([f"### {title}\n", "| Misuse | Class | Message |", "|---|---|---|", *lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.replace(str(ROOT), ".").split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    text = page()
    if arguments.write:
        put(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
