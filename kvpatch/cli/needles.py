"""Texts of the demo: prompts with needles in a long context, and a source file of Python's library."""

from __future__ import annotations

import json
import random
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..evaluation.teacher_forcing import positions_of
from ..plotting import Marks
from .loading import MODELS

SOURCE = "calendar.py"
"""A library file that tools/training/text.py holds out, so that llama-python was not trained on it."""

_OFFICES = ("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Riga", "Accra", "Delhi")
_FILLER = (
    "The weather stayed mild for most of the week.",
    "Several people walked along the river before lunch.",
    "A new bakery opened on the corner of the square.",
    "The train was late again, but nobody seemed to mind.",
    "Children played in the park until it got dark.",
    "The library will close early on the last day of the month.",
)


@dataclass(frozen=True)
class Text:
    """Batch of texts to feed.

    Attributes:
        what: description for the user.
        ids_BT: token ids; the first `n` columns are the prompt, the rest is fed one by one.
        n: columns of the prompt.
        mask_BT: 0 for left padding; None without padding.
        answer: span [start, stop) of the fed tokens that answer the question; empty if nothing is asked.
        marks: spans to point at in row 0, in positions of that row.
    """

    what: str
    ids_BT: Tensor
    n: int
    mask_BT: Tensor | None = None
    answer: tuple[int, int] = (0, 0)
    marks: Marks = field(default_factory=Marks)

    @property
    def asks(self) -> bool:
        """Tell if there is a question."""
        return self.answer[0] < self.answer[1]

    def right(self, logits_BSV: Tensor) -> Tensor:
        """Tell which rows greedy decoding would answer right, bool [B], from the logits under teacher forcing."""
        start, stop = self.answer
        return (logits_BSV[:, start:stop].argmax(-1) == self.ids_BT[:, self.n + start : self.n + stop]).all(-1)


def task_needles(in_prompt: bool = True) -> Text:
    """Read the prompts that llama-0 was trained for: records of a key and three values among filler, and a key as question.

    Args:
        in_prompt: the question belongs to the prompt; else it is fed after compression.
    """
    held = _held()
    ids_BT = torch.tensor(held["rows"])
    row = ids_BT[0].tolist()
    question = len(row) - 5
    n = question + 2 if in_prompt else question
    found = [(i, i + 4) for i in range(question) if row[i] in held["keys"]]
    asked = [span for span in found if row[span[0]] == row[question + 1]]
    marks = Marks([span for span in found if span not in asked], asked, [(question, question + 2)])
    answer = question + 2 - n, question + 5 - n
    return Text(f"{len(ids_BT)} prompts of {n} tokens with 4 needles", ids_BT, n, answer=answer, marks=marks)


def knows_task(tokenizer: Any) -> bool:
    """Tell whether a tokenizer has the words of those prompts, as those of the small models made for them have."""
    return tokenizer("k00", add_special_tokens=False).input_ids == _held()["keys"][:1]


def _held() -> dict[str, Any]:
    return json.loads((MODELS / "llama-0" / "needles.json").read_text(encoding="utf-8"))


def text_needles(model: Any, tokenizer: Any, rows: int, seed: int = 7) -> Text:
    """Build a needle task in English for any model: codes of four offices among filler, and a question about one.

    A model with few positions gets less filler.

    Raises:
        KVPatchError: the tokenizer encodes the answers in no common length, or the model has no room for the codes.
    """
    limit, width, length = positions_of(model), 0, 0
    for filler in (20, 12, 6, 2):
        made = _office_prompts(rows, tokenizer, filler, seed)
        width, length = max(len(prompt) for prompt, _, _ in made), len(made[0][1])
        if length and (limit is None or width + length <= limit):
            break
    else:
        raise KVPatchError(f"The demo's prompts have at least {width + length} tokens; this model has {limit} positions.")
    ids, mask = torch.zeros(len(made), width + length, dtype=torch.long), torch.zeros(len(made), width + length)
    for i, (prompt, answer, _) in enumerate(made):
        ids[i, width - len(prompt) :] = torch.tensor(prompt + answer)
        mask[i, width - len(prompt) :] = 1
    what = f"{len(made)} prompts of up to {width} tokens with 4 needles"
    return Text(what, ids.to(model.device), width, mask.long().to(model.device), (0, length), made[0][2])


_Prompt = tuple[list[int], list[int], Marks]


def _office_prompts(rows: int, tokenizer: Any, filler: int, seed: int) -> list[_Prompt]:
    """Build up to `rows` prompts whose answers have the same number of tokens."""
    rng = random.Random(seed)
    made = [_office_prompt(rng, tokenizer, filler) for _ in range(2 * rows)]
    length = Counter(len(answer) for _, answer, _ in made).most_common(1)[0][0]
    return [row for row in made if len(row[1]) == length][:rows]


def _office_prompt(rng: random.Random, tokenizer: Any, filler: int) -> _Prompt:
    codes = {office: rng.randint(10000, 99999) for office in rng.sample(_OFFICES, 4)}
    asked = rng.choice(list(codes))
    lines: list[str] = [*codes, *(rng.choice(_FILLER) for _ in range(filler))]
    rng.shuffle(lines)
    ids: list[int] = list(tokenizer("").input_ids)  # tokens that the tokenizer puts in front of every text
    needles: list[tuple[int, int]] = []
    wanted: list[tuple[int, int]] = []
    for line in lines:
        sentence = f"The code of the {line} office is {codes[line]}." if line in codes else line
        added = tokenizer(f"{sentence} ", add_special_tokens=False).input_ids
        if line in codes:
            (wanted if line == asked else needles).append((len(ids), len(ids) + len(added)))
        ids += added
    question = f"\nQuestion: What is the code of the {asked} office?\nAnswer: The code of the {asked} office is"
    asking = tokenizer(question, add_special_tokens=False).input_ids
    answer = tokenizer(f" {codes[asked]}", add_special_tokens=False).input_ids
    return ids + asking, answer, Marks(needles, wanted, [(len(ids), len(ids) + len(asking))])


def source_file(model: Any, tokenizer: Any, rows: int = 8, prompt: int = 160, fed: int = 72) -> Text:
    """Cut excerpts from a source file of Python's library, evenly spread, each behind <bos> if the tokenizer has one.

    A model with few positions gets shorter prompts.
    """
    limit = positions_of(model)
    prompt = prompt if limit is None else min(prompt, limit - fed)
    text = (Path(sysconfig.get_paths()["stdlib"]) / SOURCE).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = prompt + fed - len(first)
    starts = [i * (len(ids) - length) // max(rows - 1, 1) for i in range(rows)]
    rows_BT = torch.tensor([first + ids[start : start + length] for start in starts], device=model.device)
    what = f"{rows} excerpts of {SOURCE}, {prompt} tokens of prompt and {fed} more"
    return Text(what, rows_BT, prompt)
