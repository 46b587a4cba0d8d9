"""A file per use. A task is a function that makes samples for a tokenizer; TASKS names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..samples import Sample
from . import code, document, facts, human_eval, instructions, lists, tools, turns


@dataclass(frozen=True)
class Task:
    """make: (tokenizer, number of samples) -> samples. about: a sentence for the page."""

    name: str
    make: Callable[[Any, int], list[Sample]]
    about: str


TASKS = {
    task.name: task
    for task in (
        Task("asked", facts.make_samples, "One of four codes hidden in prose; the prompt ends with the question."),
        Task("document", document.make_samples, "Such prose; the question, or more of the text, comes after compression."),
        Task("code", code.make_samples, "Python functions; the prompt ends with a request to repeat one."),
        Task("code-later", partial(code.make_samples, later=True), "The same functions; the request comes after compression."),
        Task("instructions", instructions.make_samples, "Four rules in the system prompt, prose, then a request for each."),
        Task("lists", lists.make_samples, "Forty keys with a code each; the prompt ends with the question for one."),
        Task("lists-later", partial(lists.make_samples, later=True), "The same lists; four codes are asked after compression."),
        Task("human-eval", human_eval.make_samples, "Three solved problems of HumanEval, and a fourth to be solved."),
        Task("turns", turns.make_samples, "Eight turns of chat, a code in each, the budget held over all of them."),
        Task("tools", tools.make_samples, "Tool calls of BFCL's conversations, the budget held over all turns."),
    )
}
