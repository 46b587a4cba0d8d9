"""What policies keep on the pretrained model, for the table of uses in the guides and for the policies' own pages."""

from __future__ import annotations

from pathlib import Path

from kvpatch.policies.uses import Use as UseOfTable

from .answers import describe_answers
from .page import USES, Results, Use
from .settings import NULL, ROWS
from .statistics import Estimate
from .tables import markdown, shown_share

LINES = Path(__file__).parents[2] / "benchmarks/evidence"
WORDS = {
    0: "fact asked in the prompt",
    1: "fact asked later",
    2: "text goes on",
    3: "code, asked in the prompt",
    4: "code, asked later",
    5: "system prompt's rules",
    7: "tool calls over turns",
    8: "list asked in the prompt",
    9: "list asked later",
    11: "facts over eight turns",
    12: "fact in 3,000 tokens, asked in the prompt",
    13: "fact in 3,000 tokens, asked later",
    14: "3,000 tokens go on",
}
"""For measured uses, by their place in USES."""
MEASURED = {
    "question": (0, 3, 8, 12),
    "later": (1, 4, 9, 13),
    "code": (3, 4),
    "chat": (11, 5, 7),
    "server": (3, 5, 2, 0, 11),
    "stream": (2, 14),
}
"""By key of kvpatch/policies/uses.py the measured uses that are nearest to it."""


def describe_use(use: UseOfTable, folder: Path = LINES) -> str:
    """Say what its policy keeps of the full cache's gain, beside the null: at its share of the prompt, or at a fifth."""
    k = use.k if isinstance(use.k, float) else 0.2
    label = next((label for label, row in ROWS.items() if row.policy == use.policy and row.options == dict(use.options)), None)
    said = []
    for at in MEASURED.get(use.key, ()) if label is not None else ():
        if pair := find_pair(USES[at], label, k, folder):
            said.append(f"{WORDS[at]}: {shown_share(pair[0])}, null {100 * pair[1].mean:.0f}%")
    if use.key == "long" and label is not None and (own := describe_answers(folder / "answers.jsonl", label)):
        said.append(own)
    return (f"at k={k}: " if said and k != use.k and use.key != "long" else "") + "; ".join(said) or "not measured"


def find_pair(use: Use, label: str, k: float, folder: Path) -> tuple[Estimate, Estimate] | None:
    """What a row of the lines keeps of the full cache's gain, and what the null keeps; None where one was not measured."""
    results = Results(folder, use)
    own, null = results.kept((label, k)), results.kept((NULL, k))
    return (own, null) if own and null else None


def write_kept(label: str, k: float = 0.2, folder: Path = LINES) -> str:
    """A row for each measured use: what a row of the lines keeps of the full cache's gain, and what the null keeps."""
    pairs = [(use.title, find_pair(use, label, k, folder)) for use in USES]
    rows = [[title, *map(shown_share, pair)] for title, pair in pairs if pair]
    return markdown(["gain kept at a fifth of the prompt", f"`{label}`", f"`{NULL}`"], rows)
