"""What papers claim of their policies, decided on the pretrained model."""

from __future__ import annotations

from pathlib import Path

from .page import USES, Results, Use
from .settings import NULL
from .statistics import estimate, find_sides
from .tables import mark, markdown

DECIDING = USES[:8]
"""Uses on which all of the policies are measured; lists, HumanEval and the chat of eight turns have eight of them."""

CLAIMS = (
    ("StreamingLLM", "its tokens beat random ones", "streaming_llm", "random"),
    ("StreamingLLM", "its window beats random tokens beside the same ends", "streaming_llm", NULL),
    ("H2O", "attention beats recency", "h2o", "streaming_llm"),
    ("Keyformer", "above H2O", "keyformer", "h2o"),
    ("Keyformer", "Gumbel noise helps", "keyformer", "keyformer, no noise"),
    ("RoCo", "above H2O", "roco", "h2o"),
    ("RoCo", "above TOVA", "roco", "tova"),
    ("SnapKV", "above H2O with the question in the prompt", "snapkv", "h2o"),
    ("AdaKV", "above SnapKV", "adakv", "snapkv"),
    ("CriticalKV", "two stages lose less", "critical_adakv", "adakv"),
    ("Expected Attention", "above SnapKV", "expected_attention", "snapkv"),
    ("Compactor", "leverage of keys needs no query", "leverage", NULL),
    ("KVzip", "little is lost whatever comes", "kvzip", "snapkv"),
)
"""A paper, what it says, and the two policies of which the first then loses less."""


def write_claims(folder: Path, k: float, uses: tuple[Use, ...] = DECIDING) -> str:
    """A row for each claim, a column for each use: what the first loses less the second's; marked where it is sure."""
    found = {
        (claim, results.use.title): differences
        for results in [Results(folder, use) for use in uses]
        for claim in CLAIMS
        if (differences := results.differences((claim[2], k), (claim[3], k)))
    }
    sides = find_sides(found)
    titles = list(dict.fromkeys(title for _, title in found))
    rows = []
    for claim in CLAIMS:
        cells = [(claim, title) for title in titles]
        texts = [mark(f"{estimate(found[cell]).mean:+.2f}", sides[cell]) if cell in found else "" for cell in cells]
        rows.append([f"{claim[0]}: {claim[1]}", f"`{claim[2]}` less `{claim[3]}`", *texts])
    return markdown(["paper", "measured", *titles], rows)
