"""What policies keep on the pretrained model, for the table of uses in the guides and for the policies' own pages."""

from __future__ import annotations

from pathlib import Path

from kvpatch.policies.uses import Use as UseOfTable

from .page import USES, Results, Use
from .settings import NULL, ROWS
from .tables import markdown, shown_share

LINES = Path(__file__).parents[2] / "benchmarks/evidence"
MEASURED: dict[str, tuple[str, ...]] = {
    "question": (USES[0].title, USES[12].title, USES[3].title, USES[8].title),
    "later": (USES[1].title, USES[13].title, USES[4].title, USES[9].title),
    "code": (USES[3].title, USES[4].title),
    "chat": (USES[5].title, USES[7].title, USES[11].title),
    "server": (USES[0].title, USES[3].title, USES[5].title),
    "stream": (USES[2].title, USES[14].title),
}
"""By key of kvpatch/policies/uses.py the measured uses that are nearest to it."""
WORDS = {
    USES[0].title: "fact asked in the prompt",
    USES[1].title: "fact asked later",
    USES[2].title: "text goes on",
    USES[3].title: "code, asked in the prompt",
    USES[4].title: "code, asked later",
    USES[5].title: "system prompt's rules",
    USES[7].title: "tool calls over turns",
    USES[8].title: "list asked in the prompt",
    USES[9].title: "list asked later",
    USES[11].title: "facts over eight turns",
    USES[12].title: "fact in 3,000 tokens, asked in the prompt",
    USES[13].title: "fact in 3,000 tokens, asked later",
    USES[14].title: "3,000 tokens go on",
}


def describe_use(use: UseOfTable, folder: Path = LINES) -> str:
    """Say what its policy keeps of the full cache's gain, beside the null: at its share of the prompt, or at a fifth."""
    k = use.k if isinstance(use.k, float) else 0.2
    label = next((label for label, row in ROWS.items() if row.policy == use.policy and row.options == dict(use.options)), None)
    if label is None or use.key not in MEASURED:
        return "not measured"
    said = [_describe_part(part, label, k, folder) for part in USES if part.title in MEASURED[use.key]]
    return "; ".join(one for one in said if one) or "not measured"


def _describe_part(part: Use, label: str, k: float, folder: Path) -> str:
    results = Results(folder, part)
    own, null = results.kept((label, k)), results.kept((NULL, k))
    return f"{WORDS[part.title]}: {shown_share(own)}, null {100 * null.mean:.0f}%" if own and null else ""


def write_kept(label: str, k: float = 0.2, folder: Path = LINES) -> str:
    """A row for each measured use: what a row of the lines keeps of the full cache's gain, and what the null keeps."""
    rows = []
    for use in USES:
        results = Results(folder, use)
        own, null = results.kept((label, k)), results.kept((NULL, k))
        if own and null:
            rows.append([use.title, shown_share(own), shown_share(null)])
    return markdown(["gain kept at a fifth of the prompt", f"`{label}`", f"`{NULL}`"], rows)
