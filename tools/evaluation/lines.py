"""Results as JSON lines: written as they come, read again to go on where a run stopped."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

import kvpatch
from kvpatch.errors import KVPatchError

Line = dict[str, Any]


def versions() -> dict[str, str]:
    return {
        "kvpatch": kvpatch.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def read(path: Path) -> list[Line]:
    """Every whole line of a results file; one that was cut off while it was written is dropped, and said.

    Raises:
        KVPatchError: a broken line that is not the last.
    """
    if not path.is_file():
        return []
    found: list[Line] = []
    rows = path.read_text(encoding="utf-8").split("\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            found.append(json.loads(row))
        except json.JSONDecodeError as error:
            if number < len(rows):
                raise KVPatchError(
                    f"{path}, line {number}, is no JSON ({error.msg}): delete it, or give another --out."
                ) from error
            print(f"{path}: the last line was cut off, and is made anew.", file=sys.stderr)
    return found


def rewrite(path: Path, lines: Iterable[Line]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


class Book:
    """The results of one task in one file, open for appending.

    A line is known by its model, setting, seed and sample. Raises KVPatchError where the file holds results of other
    versions or of other samples under the same names: they do not belong in one table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines = read(path)
        rewrite(path, self.lines)
        self._file = path.open("a", encoding="utf-8")
        self._known = {self._key(line): line for line in self.lines}
        for line in self.lines:
            if line["versions"] != versions():
                raise KVPatchError(
                    f"{path} was made with {line['versions']}, and this is {versions()}: give another --out, or --fresh."
                )

    @staticmethod
    def _key(line: Line) -> tuple[Any, ...]:
        return line["model"], line["setting"], line["seed"], line.get("sample")

    def find(self, model: str, setting: str, seed: int, sample: str | None, digest: str = "") -> Line | None:
        line = self._known.get((model, setting, seed, sample))
        if line is not None and digest and line.get("digest") != digest:
            raise KVPatchError(f"{self.path} holds results of other samples than these: give another --out, or --fresh.")
        return line

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self._known[self._key(line)] = line
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
