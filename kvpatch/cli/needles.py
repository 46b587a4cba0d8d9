"""Texts of the demo: prompts with needles in a long context, and a source file of Python's library."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..plotting import Marks
from .loading import MODELS

SOURCE = "calendar.py"
"""A library file that tools/training/text.py holds out, so that llama-python was not trained on it."""


@dataclass(frozen=True)
class TextBatch:
    """Batch of texts to feed.

    Attributes:
        what: description for the user.
        ids_BT: token ids; the first `n` columns are the prompt, the rest is fed one by one.
        n: columns of the prompt.
        answer: span [start, stop) of the fed tokens that answer the question; empty if nothing is asked.
        marks: spans of row 0 that the picture points at, in positions of that row.
    """

    what: str
    ids_BT: Tensor
    n: int
    answer: tuple[int, int] = (0, 0)
    marks: Marks = field(default_factory=Marks)

    def find_right(self, logits_BSV: Tensor) -> Tensor:
        """Tell which rows greedy decoding would answer right, bool [B], from the logits under teacher forcing."""
        start, stop = self.answer
        return (logits_BSV[:, start:stop].argmax(-1) == self.ids_BT[:, self.n + start : self.n + stop]).all(-1)


def read_needles(device: torch.device, in_prompt: bool = True) -> TextBatch:
    """Read the prompts of `kvpatch demo` for the model llama-0: keys with three values each among filler, then a question.

    `_make_stages` calls it. Each row of ids ends with a question mark, the key that is asked for, and its three values.

    Args:
        device: of the model.
        in_prompt: the question belongs to the prompt; else it is fed after compression.
    """
    held = json.loads((MODELS / "llama-0" / "needles.json").read_text(encoding="utf-8"))
    ids_BT, row = torch.tensor(held["rows"], device=device), held["rows"][0]
    question = len(row) - 5  # the column of the question mark; then the key and three values
    n = question + 2 if in_prompt else question
    needles = [(i, i + 4) for i in range(question) if row[i] in held["keys"]]  # spans of a key and its values
    asked = [span for span in needles if row[span[0]] == row[question + 1]]
    marks = Marks([span for span in needles if span not in asked], asked, [(question, question + 2)])
    answer = question + 2 - n, question + 5 - n  # span of the values among the tokens fed after the prompt
    return TextBatch(f"{len(ids_BT)} prompts of {n} tokens with 4 needles", ids_BT, n, answer=answer, marks=marks)


def cut_excerpts(tokenizer: Any, device: torch.device) -> TextBatch:
    """Cut excerpts, evenly spread, from a source file of Python's library, as a text of `kvpatch demo`.

    `_load_shipped` calls it. Each begins with <bos>.
    """
    rows, prompt, fed = 8, 160, 72
    text = (Path(sysconfig.get_paths()["stdlib"]) / SOURCE).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    length = prompt + fed - 1
    starts = [i * (len(ids) - length) // (rows - 1) for i in range(rows)]
    rows_BT = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + length]] for start in starts], device=device)
    what = f"{rows} excerpts of {SOURCE}, {prompt} tokens of prompt and {fed} more"
    return TextBatch(what, rows_BT, prompt)
