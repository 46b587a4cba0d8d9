"""Output of `kvpatch demo MODEL`: the questions, and a table of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..policies.facts import FACTS
from ..policies.uses import CHANCE

_CHANCE = "for comparison: the first 4 tokens, the newest ones, and others by chance"
_CLOSING = (
    "\nThe last answer stands at the end of the text, which all but kvzip keep whole. Had the questions stood in the prompt, "
    "a policy such as snapkv would have known what is asked. Your own text: kvpatch compare MODEL FILE."
)


@dataclass(frozen=True)
class PolicyAnswers:
    """Answers from what one policy kept.

    Attributes:
        policy: name of the policy.
        nbytes: bytes allocated for keys and values when the text had been read.
        seconds: for reading the text and answering all questions.
        answers: by question.
        held: the share of heads that kept the words which answer it, by question.
        right: whether the answer has these words, by question.
        share_T: the share of heads that kept each token of the text.
    """

    policy: str
    nbytes: int
    seconds: float
    answers: list[str]
    held: list[float]
    right: list[bool]
    share_T: Tensor

    def to_dict(self, full: PolicyAnswers) -> dict[str, Any]:
        """Return the row of --json as plain values. full: the answers under the full cache."""
        row: dict[str, Any] = {"policy": self.policy, "answers": self.answers, "right": self.right, "held": self.held}
        return row | {"nbytes": self.nbytes, "full_nbytes": full.nbytes, "seconds": self.seconds}


def show_story(console: Console, model: str, tokens: int, k: float, questions: list[str]) -> None:
    """Print which text the model reads, how much each policy keeps of it, and the questions; `run` calls it first."""
    console.print(
        f"\n{model} reads a text of {tokens} tokens once under each policy, which keeps {k:.0%} of it. Then come the "
        "questions, of which no policy knew:\n",
        highlight=False,
    )
    for number, question in enumerate(questions, 1):
        console.print(f"  {number}. {question}", highlight=False)
    console.print()


def show(console: Console, outcomes: list[PolicyAnswers]) -> None:
    """Print a table of each policy's bytes, seconds and answers, and a line on what each keeps; `run` calls it at the end."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", style="cyan", no_wrap=True)
    for head in ("KV MB", "seconds", "", "held"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("answer")
    for one in outcomes:
        first = one.policy, f"{one.nbytes / 1e6:.1f}", f"{one.seconds:.0f}"
        for number, (answer, share, right) in enumerate(zip(one.answers, one.held, one.right, strict=True)):
            sign = Text("\u2713", "green") if right else Text("\u2717", "red")
            table.add_row(*(first if number == 0 else ("", "", "")), sign, f"{share:.0%}", answer)
        table.add_section()
    console.print(table, highlight=False)
    console.print("held: the share of heads that kept the words which answer the question.", style="dim", highlight=False)
    for one in outcomes[1:]:
        use = _CHANCE if one.policy == CHANCE else FACTS[one.policy].describe_use()
        console.print(f"{one.policy}: {use}", style="dim", highlight=False)
    console.print(_CLOSING, highlight=False)
