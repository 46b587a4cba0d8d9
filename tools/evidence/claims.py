"""What papers claim of their policies, decided on the pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .page import USES, Results, Use
from .settings import NULL
from .statistics import estimate, find_sides
from .tables import mark, markdown

DECIDING = USES[:8]
"""Uses on which all of the policies are measured; lists, HumanEval and the chat of eight turns have eight of them."""


@dataclass(frozen=True)
class Claim:
    """`a` loses less than `b`."""

    paper: str
    says: str
    a: str
    b: str


CLAIMS = (
    Claim("StreamingLLM", "its tokens beat random ones", "streaming_llm", "random"),
    Claim("StreamingLLM", "its window beats random tokens beside the same ends", "streaming_llm", NULL),
    Claim("H2O", "attention beats recency", "h2o", "streaming_llm"),
    Claim("Keyformer", "above H2O", "keyformer", "h2o"),
    Claim("Keyformer", "Gumbel noise helps", "keyformer", "keyformer, no noise"),
    Claim("RoCo", "above H2O", "roco", "h2o"),
    Claim("RoCo", "above TOVA", "roco", "tova"),
    Claim("SnapKV", "above H2O with the question in the prompt", "snapkv", "h2o"),
    Claim("AdaKV", "above SnapKV", "adakv", "snapkv"),
    Claim("CriticalKV", "two stages lose less", "critical_adakv", "adakv"),
    Claim("Expected Attention", "above SnapKV", "expected_attention", "snapkv"),
    Claim("Compactor", "leverage of keys needs no query", "leverage", NULL),
    Claim("KVzip", "little is lost whatever comes", "kvzip", "snapkv"),
)


def write_claims(folder: Path, k: float, uses: tuple[Use, ...] = DECIDING) -> str:
    """A row for each claim, a column for each use: nats that `a` loses less `b`'s; marked where Holm's correction leaves it."""
    found = {
        (claim, results.use.title): differences
        for results in [Results(folder, use) for use in uses]
        for claim in CLAIMS
        if (differences := results.differences((claim.a, k), (claim.b, k)))
    }
    sides = find_sides(found)
    titles = list(dict.fromkeys(title for _, title in found))
    rows = []
    for claim in CLAIMS:
        cells = [(claim, title) for title in titles]
        texts = [mark(f"{estimate(found[cell]).mean:+.2f}", sides[cell]) if cell in found else "" for cell in cells]
        rows.append([f"{claim.paper}: {claim.says}", f"`{claim.a}` less `{claim.b}`", *texts])
    return markdown(["paper", "measured", *titles], rows)
