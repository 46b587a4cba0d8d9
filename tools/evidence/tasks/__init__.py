"""A file per use. A task is a function that makes samples for a tokenizer; TASKS names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..samples import Sample
from . import code, document, facts, instructions, tools


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
        Task(
            "document",
            document.make_samples,
            "Such prose; the question, or more of the text, comes after compression.",
        ),
        Task("code", code.make_samples, "Python functions; the prompt ends with a request to repeat one."),
        Task("code-later", code.make_later_samples, "The same functions; the request comes after compression."),
        Task(
            "instructions",
            instructions.make_samples,
            "Four rules in the system prompt, prose, then a request for each.",
        ),
        Task("tools", tools.make_samples, "Tool calls of BFCL's conversations, the budget held over all turns."),
    )
}
