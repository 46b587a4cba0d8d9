"""Prompts and references from files and from the hub.

FILE.jsonl has a JSON object per line. The prompt is its field "prompt", else the only one there is of "instruction",
"article", "document" and "input"; "references" (or "reference", "highlights", "summary", "output") is a string or a
list of strings, and may be missing. A .txt file is one document, a folder is all its .txt, .md and .py files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvpatch.errors import KVPatchError

from .textmetrics import need

PROMPTS = ("prompt", "instruction", "article", "document", "input")
REFERENCES = ("references", "reference", "highlights", "summary", "output")
TEXTS = (".txt", ".md", ".py")


@dataclass(frozen=True)
class Row:
    """where: file and line, for messages."""

    prompt: str
    references: tuple[str, ...]
    where: str


def read(path: Path) -> str:
    """Raises KVPatchError where there is no such file, or no UTF-8 text in it."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVPatchError(f"--data {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise KVPatchError(f"--data {path} is no UTF-8 text (byte {error.start}): save it as UTF-8.") from error


def objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every JSON object of a JSONL file and where it stands.

    Raises:
        KVPatchError: as `read`; a line is no JSON object; there is none at all.
    """
    found = []
    for number, line in enumerate(read(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise KVPatchError(f"{where}, is no JSON: {error.msg} at column {error.colno}.") from error
        if not isinstance(row, dict):
            raise KVPatchError(f'{where}, is no JSON object such as {{"prompt": "...", "references": ["..."]}}.')
        found.append((where, row))
    if not found:
        raise KVPatchError(f"--data {path} is empty: it needs a JSON object per line.")
    return found


def text_of(row: dict[str, Any], name: str, where: str) -> str:
    """A field that must be there and hold a string. Raises KVPatchError where it does not."""
    value = _field(row, name, where)
    if not isinstance(value, str):
        raise KVPatchError(f"{where}: field {name!r} must be a string, not {type(value).__name__}.")
    return value


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise KVPatchError(f"{where}, has no field {name!r}. It has: {', '.join(row) or 'none'}.")
    return row[name]


def strings_of(row: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A field with one string or several, none of them empty. Raises KVPatchError where it is something else."""
    value = _field(row, name, where)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise KVPatchError(f"{where}: field {name!r} must be a string or a list of strings.")
    if not values or not all(value.strip() for value in values):
        raise KVPatchError(f"{where}: field {name!r} is empty, or one of its strings is.")
    return tuple(values)


def _row(where: str, row: dict[str, Any]) -> Row:
    named = [name for name in PROMPTS if name in row]
    if not named:
        others = ", ".join(PROMPTS[1:])
        raise KVPatchError(f"{where}, has no field 'prompt' (or {others}). It has: {', '.join(row) or 'none'}.")
    if len(named) > 1 and named[0] != "prompt":
        raise KVPatchError(f"{where}, has the fields {' and '.join(named)}: name the one that is the prompt 'prompt'.")
    prompt = text_of(row, named[0], where)
    if not prompt.strip():
        raise KVPatchError(f"{where}: field {named[0]!r} is empty.")
    reference = next((name for name in REFERENCES if row.get(name) is not None), None)
    return Row(prompt, () if reference is None else strings_of(row, reference, where), where)


def rows(name: str, count: int) -> list[Row]:
    """The first `count` rows of a JSONL file or a data set of HUB; of other files, documents without a reference.

    Raises:
        KVPatchError: the message names the file and the line.
    """
    if name in HUB:
        source = HUB[name]
        found = from_hub(source.path, source.config, source.split, count, **source.more)
        return [Row(*source.row(row), f"{name}, row {number}") for number, row in enumerate(found)]
    if name.endswith(".jsonl"):
        return [_row(where, row) for where, row in objects(Path(name))[:count]]
    return [Row(text, (), f"{name}, document {number}") for number, text in enumerate(documents(name)[:count])]


def documents(name: str, count: int | None = None) -> list[str]:
    """The first `count` texts: a .txt file, a folder's, the field "text" of a JSONL file, or a data set of HUB.

    Raises:
        KVPatchError: there is none, or it cannot be read.
    """
    path = Path(name)
    if name in HUB:
        texts = [row.prompt for row in rows(name, count or 200)]
    elif path.is_dir():
        texts = [read(file) for file in sorted(path.rglob("*")) if file.suffix in TEXTS and file.is_file()]
    elif path.suffix == ".jsonl":
        texts = [text_of(row, "text", where) for where, row in objects(path)]
    elif path.suffix in TEXTS:
        texts = [read(path)]
    else:
        raise KVPatchError(
            f"--data {name} is no file ending in .jsonl, {', '.join(TEXTS)}, no folder, and none of {', '.join(HUB)}."
        )
    texts = [text for text in texts if text.strip()][:count]
    if not texts:
        raise KVPatchError(f"--data {name} holds no text: a folder needs files ending in {', '.join(TEXTS)}.")
    return texts


# ---- the hub ----


@dataclass(frozen=True)
class Source:
    """A data set on the hub. row: from one of its rows to a prompt and its references. more: for load_dataset."""

    path: str
    config: str | None
    split: str
    row: Callable[[dict[str, Any]], tuple[str, tuple[str, ...]]]
    more: dict[str, Any]


def _fields(prompt: str, *references: str) -> Callable[[dict[str, Any]], tuple[str, tuple[str, ...]]]:
    return lambda row: (row[prompt], tuple(row[name] for name in references))


def _turns(row: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """A conversation but for its last utterance, which is the reference [Keyformer 4]."""
    *before, last = row["dialogue"]
    return "\n".join([row["narrative"], *before]), (last,)


_PARQUET = {"revision": "refs/convert/parquet"}  # the hub's own copy of data sets that a script used to make
_ALPACA = {"data_files": "hf://datasets/tatsu-lab/alpaca_eval/alpaca_eval.json"}
HUB = {
    "cnn_dailymail": Source("abisee/cnn_dailymail", "3.0.0", "test", _fields("article", "highlights"), {}),
    "xsum": Source("EdinburghNLP/xsum", None, "test", _fields("document", "summary"), _PARQUET),
    "gov_report": Source("ccdv/govreport-summarization", None, "test", _fields("report", "summary"), _PARQUET),
    "alpaca_eval": Source("json", None, "train", _fields("instruction", "output"), _ALPACA),
    "soda": Source("allenai/soda", None, "test", _turns, {}),
    "openwebtext": Source("Skylion007/openwebtext", None, "train", _fields("text"), _PARQUET),
}
"""Data sets of the papers by name [RoCo 5.1.2; Keyformer 4]; `python -m tools.evaluation summarize --data xsum`."""


def from_hub(path: str, config: str | None, split: str, count: int, instead: str = "", **more: Any) -> list[dict[str, Any]]:
    """The first `count` rows of a data set, and nothing else downloaded. instead: what to do where that fails.

    Raises:
        KVPatchError: the package is missing, there is no network, the hub does not have it.
    """
    datasets = need("datasets", "datasets")
    instead = instead or "save the rows as a .jsonl file and give that."
    try:
        found: Iterator[dict[str, Any]] = iter(datasets.load_dataset(path, config, split=split, streaming=True, **more))
        return list(islice(found, count))
    except Exception as error:  # datasets, the hub and the network have an error type each
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KVPatchError(f"--data {path} cannot be loaded from the hub ({said}): {instead}") from error
