"""One choice of a policy at a time, the rest as it comes: what it does to the real model. Families of them, and their tables.

`python -m tools.evidence run asked document --choices --budgets 0.2` measures them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from .page import USES, Results
from .settings import ROWS, Row
from .statistics import estimate, find_sides
from .tables import mark, markdown

K = 0.2
USED = [use for use in USES if use.task in ("asked", "document")]


class Family(NamedTuple):
    """Variants of policies that differ in one option; each stands beside `base`, a row of settings.ROWS."""

    title: str
    about: str
    variants: dict[str, tuple[str, dict[str, Any]]]


def _vary(base: str, **options: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """A variant of a row, labelled by the row and what it changes."""
    changes = ", ".join(f"{name}={value if isinstance(value, str) else repr(value)}" for name, value in options.items())
    return {f"{base}, {changes}": (base, options)}


FAMILIES = (
    Family(
        "recent",
        "The share of the budget for the newest tokens; by default 0.5 in `h2o`, 0.3 in `keyformer`, ten tokens in `roco`.",
        _vary("h2o", recent=0.1) | _vary("h2o", recent=0.3) | _vary("h2o", recent=0.7)
        | _vary("keyformer", recent=0.1) | _vary("keyformer", recent=0.5) | _vary("keyformer", recent=0.7),
    ),
    Family(
        "noise",
        "Keyformer adds Gumbel noise to the logits; its temperature is 1 until something is generated.",
        {"keyformer, no noise": ("keyformer", {"noise": "none"})},
    ),
    Family("shared", "A score for each layer, or one for all.", _vary("keyformer", shared=True)),
    Family(
        "positions",
        "Tokens keep their positions, or take their rank among what is held.",
        _vary("keyformer", positions="renumbered") | _vary("streaming_llm", positions="renumbered")
        | _vary("snapkv", positions="renumbered"),
    ),
    Family(
        "scope",
        "RoCo spares the tokens whose attention varies most, by default half of the budget; or, in their place, the newest.",
        _vary("roco", protected=0.0) | _vary("roco", protected=0.9) | _vary("roco", protected=0, recent=0.5),
    ),
    Family(
        "block",
        "Tokens that are read before each eviction; by default the whole prompt.",
        _vary("roco", block=64) | _vary("roco", block=256) | _vary("h2o", block=64) | _vary("h2o", block=256),
    ),
    Family(
        "window and pooling",
        "SnapKV scores by the prompt's last 32 rows, each token by the highest of itself and six neighbours.",
        _vary("snapkv", window=8) | _vary("snapkv", window=64) | _vary("snapkv", pooling=None) | _vary("snapkv", kernel=3)
        | _vary("snapkv", pooling="avg"),
    ),
    Family(
        "floor and chunk",
        "KVzip lets heads differ; each keeps at least a fifth of an equal share in the other tables.",
        _vary("kvzip", floor=0.0) | _vary("kvzip", floor=0.5) | {"kvzip, chunk=256": ("kvzip", {"floor": 0.2, "chunk": 256})},
    ),
)  # fmt: skip


def list_rows() -> dict[str, Row]:
    """Every variant that is no row of the other tables."""
    made = (Row(label, *one, beside=True) for family in FAMILIES for label, one in family.variants.items())
    return {row.label: row for row in made if row.label not in ROWS}


def base_of(label: str) -> str:
    """The row that a variant stands beside."""
    return label.partition(",")[0]


def write_tables(folder: Path) -> str:
    """Write a table for each family that was measured: each policy's loss, and what a variant adds; Holm over all of them."""
    results = [Results(folder, use) for use in USED]
    found = {}
    for label in dict.fromkeys(label for family in FAMILIES for label in family.variants):
        added = [one.differences((label, K), (base_of(label), K)) for one in results]
        if all(added):
            found |= {(label, use): values for use, values in zip(USED, added, strict=True)}
    sides = find_sides(found)
    texts = []
    for family in FAMILIES:
        rows = []
        for base in dict.fromkeys(map(base_of, family.variants)):
            own = [label for label in family.variants if base_of(label) == base and (label, USED[0]) in found]
            for label in own[:1]:  # the policy's loss on the samples of its first variant
                lost = [one.differences((base, K), only=one.values((label, K))) for one in results]
                rows.append([f"`{base}`", *(f"{estimate(values).mean:.2f}" for values in lost), ""])
            for label in own:
                added = [found[label, use] for use in USED]
                marked = [mark(str(estimate(found[label, use])), -abs(sides[label, use])) for use in USED]
                rows.append([f"`{label}`", *marked, " to ".join(map(str, sorted(set(map(len, added)))))])
        if rows:
            grid = markdown(["", *(use.title for use in USED), "texts"], rows)
            texts.append(f"### {family.title.capitalize()}\n\n{family.about}\n\n{grid}")
    return "\n\n".join(texts)
