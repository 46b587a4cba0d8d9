"""What papers claim of their policies, decided on the pretrained model, beside the verdict of the small ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .page import USES, Results, Use, markdown
from .settings import NULL
from .statistics import compare_with_zero, correct_holm, estimate

LEVEL = 0.05


@dataclass(frozen=True)
class Claim:
    """`a` loses less than `b`. small: the verdict of docs/small-models.md, in its words."""

    paper: str
    says: str
    a: str
    b: str
    small: str


CLAIMS = (
    Claim("StreamingLLM", "its tokens beat random ones", "streaming_llm", "random", "in a stream"),
    Claim("StreamingLLM", "its window beats random tokens beside the same ends", "streaming_llm", NULL, "not measured"),
    Claim("H2O", "attention beats recency", "h2o", "streaming_llm", "agrees"),
    Claim("Keyformer", "above H2O", "keyformer", "h2o", "agrees where facts are asked later"),
    Claim("Keyformer", "Gumbel noise helps", "keyformer", "keyformer, no noise", "contradicts on average"),
    Claim("RoCo", "above H2O", "roco", "h2o", "agrees"),
    Claim("RoCo", "above TOVA", "roco", "tova", "agrees in kept sets"),
    Claim("SnapKV", "above H2O with the question in the prompt", "snapkv", "h2o", "agrees"),
    Claim("AdaKV", "above SnapKV", "adakv", "snapkv", "agrees with the question in the prompt"),
    Claim("CriticalKV", "two stages lose less", "critical_adakv", "adakv", "not separated"),
    Claim("Expected Attention", "above SnapKV", "expected_attention", "snapkv", "agrees where facts are asked later"),
    Claim("Compactor", "leverage of keys needs no query", "leverage", NULL, "agrees where facts are asked later"),
    Claim("KVzip", "little is lost whatever comes", "kvzip", "snapkv", "agrees where facts are asked later"),
)


def write_claims(folder: Path, k: float, uses: tuple[Use, ...] = USES) -> str:
    """A row for each claim, a column for each use: nats that `a` loses less `b`'s; marked where Holm's correction leaves it."""
    measured = {use.title: (use, Results(folder / f"{use.task}.jsonl")) for use in uses}
    cells: dict[tuple[int, str], list[float]] = {}
    for i, claim in enumerate(CLAIMS):
        for title, (use, results) in measured.items():
            if found := results.differences(use, (claim.a, k), (claim.b, k)):
                cells[i, title] = found
    raised = dict(zip(cells, correct_holm([compare_with_zero(found) for found in cells.values()]), strict=True))
    titles = [title for title in measured if any(at == title for _, at in cells)]
    rows = []
    for i, claim in enumerate(CLAIMS):
        row = [f"{claim.paper}: {claim.says}", f"`{claim.a}` less `{claim.b}`"]
        for title in titles:
            known = cells.get((i, title))
            if known is None:
                row.append("")
                continue
            one = estimate(known)
            sure = raised[i, title] < LEVEL
            row.append(
                f"**{one.mean:+.2f}**" if sure and one.mean < 0 else f"*{one.mean:+.2f}*" if sure else f"{one.mean:+.2f}"
            )
        rows.append([*row, claim.small])
    return markdown(["paper", "measured", *titles, "small models"], rows)
