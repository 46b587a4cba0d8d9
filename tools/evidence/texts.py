"""Texts that no published model was trained on, cut to the sizes that tasks need.

texts/pages.txt: prose of this documentation at commit 4a0698c, without tables and code. texts/code.txt: functions of the
library at that commit. They are frozen, so that results do not change with the pages, and younger than the models.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "texts"


@cache
def sentences() -> list[str]:
    """Sentences of prose, in order; the last of a paragraph ends with a line break."""
    paragraphs = (FOLDER / "pages.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return [part for text in paragraphs for part in re.split(r"(?<=[.!?:;])\s+", text + "\n")]


@cache
def functions() -> list[str]:
    """Source of functions and classes, in order."""
    return (FOLDER / "code.txt").read_text(encoding="utf-8").strip().split("\n\n\n")


def group_parts(tokenizer: object, parts: list[str], tokens: int, joint: str) -> list[list[str]]:
    """Disjoint runs of consecutive parts, each the shortest with at least `tokens` tokens; what is left over is dropped."""
    groups: list[list[str]] = []
    own: list[str] = []
    size = 0
    for part in parts:
        own.append(part)
        size += len(tokenizer(part + joint, add_special_tokens=False).input_ids)  # type: ignore[operator]
        if size >= tokens:
            groups.append(own)
            own, size = [], 0
    return groups
