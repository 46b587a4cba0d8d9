"""A file per use. A task is a function that makes samples for a tokenizer; TASKS names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..samples import Sample
from ..settings import MIDDLE, MOST, NULL, Cells, rows_of
from . import code, document, facts, human_eval, instructions, lists, tools, turns

WHOLE = (Cells(MIDDLE, MOST),)
SHORT = (Cells(MIDDLE, MOST, rows_of(NULL, "streaming_llm", "h2o", "roco", "keyformer", "snapkv", "adakv", "kvzip")),)
"""The middle budget alone: every row, or one of each family."""
OTHERS = rows_of(
    "random", NULL, "streaming_llm", "h2o", "roco", "keyformer, no noise", "snapkv", "adakv", "critical_adakv",
    "expected_attention", "kvzip",
)  # fmt: skip
REFIT = rows_of("kvzip", "refit(kvzip)")
ADVISED = rows_of(NULL, "snapkv", "adakv", "critical_adakv")
CODE = (Cells(0.3, 16, rows_of(NULL, "snapkv", "adakv", "kvzip")), Cells(0.5, 16, rows_of(NULL, "keyformer, no noise")))
LONG = 3000
"""Tokens of the long texts, of which there are few."""
LONG_CELLS = (Cells(MIDDLE, 16, rows_of(NULL, "streaming_llm", "h2o", "keyformer, no noise", "snapkv", "adakv", "kvzip")),)


@dataclass(frozen=True)
class Task:
    """make: (tokenizer, number of samples) -> samples. about: a sentence for the page. cells: what `make results` measures."""

    name: str
    make: Callable[[Any, int], list[Sample]]
    about: str
    cells: tuple[Cells, ...] = WHOLE


TASKS = {
    task.name: task
    for task in (
        Task("asked", facts.make_samples, "One of four codes hidden in prose; the prompt ends with the question.",
             (*WHOLE, *(Cells(k, 24, OTHERS) for k in (0.1, 0.3, 0.5)), Cells(0.3, 44, ADVISED))),
        Task("document", document.make_samples, "Such prose; the question, or more of the text, comes after compression.",
             (*WHOLE, *(Cells(k, 30, OTHERS) for k in (0.1, 0.3, 0.5)), Cells(0.3, 48, ADVISED),
              Cells(0.02, 24, (*REFIT, *rows_of(NULL))), *(Cells(k, MOST, REFIT) for k in (0.05, 0.1)), Cells(0.3, 24, REFIT))),
        Task("asked-long", partial(facts.make_samples, tokens=LONG), "The first of these in 3,000 tokens.", LONG_CELLS),
        Task("document-long", partial(document.make_samples, tokens=LONG), "The second in 3,000 tokens.", LONG_CELLS),
        Task("code", code.make_samples, "Python functions; the prompt ends with a request to repeat one.", (*WHOLE, *CODE)),
        Task("code-later", partial(code.make_samples, later=True), "The same functions; the request comes after compression.",
             (*WHOLE, *CODE, *(Cells(k, 16, REFIT) for k in (0.05, 0.1)))),
        Task("instructions", instructions.make_samples, "Four rules in the system prompt, prose, then a request for each."),
        Task("lists", lists.make_samples, "Forty keys with a code each; the prompt ends with the question for one.", SHORT),
        Task("lists-later", partial(lists.make_samples, later=True), "The same lists; four codes are asked after compression.",
             SHORT),
        Task("human-eval", human_eval.make_samples, "Three solved problems of HumanEval, and a fourth to be solved.", SHORT),
        Task("turns", turns.make_samples, "Eight turns of chat, a code in each, the budget held over all of them.", SHORT),
        Task("tools", tools.make_samples, "Tool calls of BFCL's conversations, the budget held over all turns."),
    )
}  # fmt: skip
