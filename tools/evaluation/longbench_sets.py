"""The sets of LongBench: prompts and measures (longbench.json), and rows from files, from the hub, or made here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.training import train

from . import data, textmetrics
from .task import digest

HUB = "THUDM/LongBench"
MADE = ("lcc", "repobench-p")
UNPACK = f"download https://huggingface.co/datasets/{HUB}/resolve/main/data.zip, unpack it and give --data FOLDER."

Row = dict[str, Any]
"""As LongBench has it: input, context, answers, length, dataset, language, all_classes, _id."""


@dataclass(frozen=True)
class Set:
    """new: tokens that are generated. template: a chat model gets one. first_line: all that counts of an answer."""

    domain: str
    measure: str
    new: int
    template: bool
    first_line: bool
    prompt: str

    def parts(self, row: Row) -> tuple[str, str]:
        """The prompt up to the end of the context, and the rest."""
        before, _, after = self.prompt.partition("{context}")
        return before + row["context"], after.replace("{input}", row["input"])

    def score(self, text: str, row: Row) -> float:
        """The best over the answers, 0 to 100."""
        if self.first_line:
            text = text.lstrip("\n").split("\n")[0]
        measure = textmetrics.LONGBENCH[self.measure]
        return 100 * max(measure(text, answer, row["all_classes"]) for answer in row["answers"])


_TABLE = json.loads(Path(__file__).with_name("longbench.json").read_text(encoding="utf-8"))
SETS = {name: Set(**fields) for name, fields in _TABLE["sets"].items()}


def checked(name: str, where: str, row: Row) -> Row:
    """A row of a set with all that is used of it. Raises KVPatchError where something is missing or of another kind."""
    data.text_of(row, "input", where)
    data.text_of(row, "context", where)
    classes = data.strings_of(row, "all_classes", where) if SETS[name].measure == "classification" else ()
    return row | {"answers": list(data.strings_of(row, "answers", where)), "all_classes": list(classes)}


def read(name: str, where: str, count: int) -> list[Row] | None:
    """The first rows of a set from a folder or the hub; None where the folder has no such file."""
    if where == "hub":
        rows = data.from_hub(HUB, name, "test", count, instead=UNPACK)
        return [checked(name, f"{HUB} {name}, row {i}", row) for i, row in enumerate(rows)]
    path = Path(where) / f"{name}.jsonl"
    return [checked(name, *found) for found in data.objects(path)[:count]] if path.is_file() else None


def made(name: str, tokenizer: Any, count: int, seed: int) -> list[Row]:
    """Rows from held-out Python source: the answer is the line behind a place that is drawn.

    lcc: the context is the 150 tokens before that line. repobench-p: the input is the 32 tokens before it, always as
    many so that questions can be batched, and the context the first 110 of the file.
    """
    rng, sources, found = random.Random(f"{name} {seed}"), _sources(), []
    while len(found) < count:
        lines = rng.choice(sources).splitlines(keepends=True)
        at = rng.randrange(len(lines) + 1)
        before, answer = "".join(lines[:at]), "".join(lines[at : at + 1]).rstrip("\n")
        if len(answer.strip()) < 8 or any(mark in answer for mark in ("#", "`", "//")) or len(before) < 2000:
            continue
        near, first = before[-2000:], before[:2000]
        if name == "lcc":
            context, question = near[_starts(tokenizer, near)[-150] :], ""
        else:
            context, question = first[: _starts(tokenizer, first)[110]], near[_starts(tokenizer, near)[-32] :]
        row = {"input": question, "context": context, "answers": [answer], "length": len((context + question).split())}
        found.append(row | {"dataset": name, "language": "python", "all_classes": [], "_id": digest(row)})
    return found


@cache
def _sources() -> list[str]:
    return train.python_sources(held_out=True)


def _starts(tokenizer: Any, text: str) -> list[int]:
    """Where each token of a text begins."""
    return [start for start, _ in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
