"""The primary comparisons: a few that are named beforehand, over all training seeds, and corrected for being several.

A section of docs/small-models.md: `python -m tools.evaluation.results --alone primary`. The rest of that page is exploratory.
"""

from __future__ import annotations

from collections.abc import Mapping

from .claims import Claim
from .models import PLAIN, SUNK
from .stats import Estimate, holm
from .summary import BRACKETS, markdown, shown
from .table import Table

LEVEL = 0.05
WITHOUT, WITH = "without sinks", "with sinks"
MODELS = {WITHOUT: PLAIN, WITH: SUNK}
_IN, _AFTER, _STREAM, _REGULAR = ({"scenario": name} for name in ("in", "after", "stream", "regular"))


def _recall(says: str, a: str, b: str, where: dict[str, str]) -> Claim:
    return Claim("", says, "recall", "right", a, b, where=where)


_SINKS = _recall("sinks and a window beat a window", "streaming_llm", "window", _STREAM)
_TWO_STAGE = Claim("", "two-stage selection is better", "needle", "right", "critical_snapkv", "snapkv", where=_REGULAR)

FAMILY: tuple[tuple[str, Claim], ...] = (
    (WITHOUT, _recall("looking at the prompt's end beats accumulated attention", "snapkv", "roco", _IN)),
    (WITHOUT, _recall("sharing a layer's budget among heads helps", "adakv", "snapkv", _IN)),
    (WITHOUT, _recall("accumulated attention beats recency", "roco", "window", _AFTER)),
    (WITHOUT, _recall("the mean beats the sum", "roco", "h2o", _AFTER)),
    (WITHOUT, _recall("keyformer beats h2o", "keyformer", "h2o", _AFTER)),
    (WITHOUT, _recall("accumulated attention beats recency while reading", "roco", "window", _STREAM)),
    (WITHOUT, _SINKS),
    (WITHOUT, _TWO_STAGE),
    (WITH, _SINKS),
    (WITH, _TWO_STAGE),
    (WITH, Claim("", "it moves most heads less", "perturbation", "heads_lower", "critical_snapkv", level=0.5)),
)
"""Of which models, and what is said of them. It is the papers' headlines as far as recall and needles can tell."""

TITLE = "Primary comparisons"
TEXT = """
These {count} comparisons are the ones to cite. They were named before the models with sinks, and the training seeds
beyond the third of an architecture, were trained; the first three had been seen, and so had two models with sinks of
another penalty. Each is a mean over its task's budgets. {brackets} p: of all ways to flip the signs of models'
differences the share that lie as far from zero; corrected: for the number of comparisons [Holm 1979]. By architecture:
the mean over its models, and how many these are. A verdict speaks of every architecture only where all have that sign;
else it is on average, and names those that differ. Everything else on this page is exploratory.
`python -m tools.evaluation.results --alone primary` makes this section.
"""


def policies(group: str) -> dict[str, tuple[str, ...]]:
    """What of each task must be measured on a group's models."""
    found: dict[str, dict[str, None]] = {}
    for own, claim in FAMILY:
        if own == group:
            found.setdefault(claim.task, {}).update(dict.fromkeys(name for name in (claim.a, claim.b) if name))
    return {task: tuple(names) for task, names in found.items()}


def section(tables: Mapping[str, dict[str, Table]]) -> str:
    """The section, from the lines of both groups by task; nothing where there are none."""
    if not any(tables.values()):
        return ""
    found = [_measured(group, claim, tables) for group, claim in FAMILY]
    # what was not measured still counts as one of the family
    raised = holm([one[0].p if one else 1.0 for one in found])
    rows = []
    for (group, claim), one, p in zip(FAMILY, found, raised, strict=True):
        what = f"`{claim.a}` above {f'`{claim.b}`' if claim.b else f'{claim.level:g}'}, {claim.task}, {claim.metric}"
        what += "".join(f", {value}" for value in claim.where.values())
        row = [claim.says, group, what]
        if one is None:
            rows.append([*row, "-", "-", "-", "-", "not measured"])
            continue
        whole, parts = one
        apart = "; ".join(f"{name} {part.mean:+.3f} ({part.models})" for name, part in parts.items())
        row += [shown(whole, signed=True).strip("*"), apart, f"{whole.p:.4f}", f"{p:.4f}"]
        rows.append([*row, verdict(claim, whole, parts, p)])
    columns = ("", "models", "measured", "difference", "by architecture", "p", "p, corrected", "here")
    return f"## {TITLE}\n\n{TEXT.strip().format(count=len(FAMILY), brackets=BRACKETS)}\n\n{markdown(columns, rows)}\n"


def _measured(group: str, claim: Claim, tables: Mapping[str, dict[str, Table]]) -> tuple[Estimate, dict[str, Estimate]] | None:
    """Over all of a group's models, and by architecture."""
    table = tables.get(group, {}).get(claim.task)
    whole = claim.measured(table) if table else None
    if table is None or whole is None:
        return None
    apart = {recipe.removesuffix("-sinks"): claim.measured(table.where(recipe=recipe)) for recipe in table.recipes}
    return whole, {name: part for name, part in apart.items() if part is not None}


def verdict(claim: Claim, whole: Estimate, parts: Mapping[str, Estimate], p: float) -> str:
    """Agrees or contradicts where the corrected p says so: everywhere, or on average and not in the architectures named."""
    side = 1 if whole.mean > 0 else -1
    if p >= LEVEL:
        return "not separated"
    word = "agrees" if side == claim.sign else "contradicts"
    others = [name for name, part in parts.items() if part.mean * side <= 0]
    return f"{word} on average, not in {', '.join(others)}" if others else f"{word} in every architecture"
