"""What the papers say, as differences that can be measured here: does the claim hold on small models?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .stats import Estimate
from .summary import budget, markdown, shown
from .table import Table


@dataclass(frozen=True)
class Claim:
    """`a` is above `b` (or the number `level`) in `metric`, or below where the claim's `sign` is -1.

    where: of which samples. budgets: the mean over these; () is all that were run. caveat: why small models may not show it.
    """

    source: str
    says: str
    task: str
    metric: str
    a: str
    b: str = ""
    level: float = 0.0
    sign: int = 1
    where: dict[str, Any] = field(default_factory=dict)
    budgets: Sequence[Any] = ()
    caveat: str = ""

    def measured(self, table: Table) -> Estimate | None:
        """a - b, or a - level; a mean over budgets, sample by sample."""
        here = table.where(**self.where)
        wanted = self.budgets or ((1.0,) if self.a == "full" else here.budgets)
        return here.over(self.a, self.b, self.metric, wanted, self.level)

    def verdict(self, estimate: Estimate | None) -> str:
        """Agrees, contradicts; on average, where the interval leaves zero out but models disagree; not separated."""
        if estimate is None:
            return "not measured"
        side = self.sign if estimate.low > 0 else -self.sign if estimate.high < 0 else 0
        if not side:
            return "not separated"
        return ("agrees" if side > 0 else "contradicts") + ("" if estimate.carried else " on average")


def table_of(claims: Sequence[Claim], tables: dict[str, Table]) -> str:
    """A row per claim: what is said, what is measured, in how many models the sign is as said, the verdict."""
    rows = []
    for claim in claims:
        estimate = claim.measured(tables[claim.task]) if claim.task in tables else None
        agreeing = "-" if estimate is None else f"{estimate.signs[0 if claim.sign > 0 else 1]} of {estimate.models}"
        against = f"`{claim.b}`" if claim.b else f"{claim.level:g}"
        what = f"`{claim.a}` {'above' if claim.sign > 0 else 'below'} {against}"
        what += f", {claim.metric}" + "".join(f", {value}" for value in claim.where.values())
        what += f", k = {', '.join(map(budget, claim.budgets))}" if claim.budgets else ""
        verdict = claim.verdict(estimate) + (f" ({claim.caveat})" if claim.caveat else "")
        rows.append([claim.source, claim.says, what, shown(estimate, signed=True), agreeing, verdict])
    return markdown(("paper", "says", "measured", "difference", "models as said", "here"), rows)


def by_recipe(table: Table, metric: str) -> str:
    """A column per architecture: each setting's mean over budgets and that architecture's trained models."""
    parts = {recipe: table.where(recipe=recipe) for recipe in table.recipes}
    rows = [
        [f"`{name}`", *(shown(here.over(name, "", metric, here.budgets)) for here in parts.values())] for name in table.names
    ]
    return markdown(["", *parts], rows)


def order(table: Table, metric: str, better: str, budgets: Sequence[Any] = ()) -> str:
    """Settings from best to worst by their mean over budgets, each with its paired difference from the one above it."""
    wanted = list(budgets) or table.budgets
    means = {name: table.over(name, "", metric, wanted) for name in table.names}
    known = {name: estimate for name, estimate in means.items() if estimate is not None}
    ranked = sorted(known, key=lambda name: known[name].mean * (-1 if better == "higher" else 1))
    rows, above = [], ""
    for name in ranked:
        step = table.over(name, above, metric, wanted) if above else None
        rows.append([f"`{name}`", shown(known[name]), shown(step, signed=True) if step else ""])
        above = name
    return markdown(("", f"{metric}, mean over k", "difference from the one above"), rows)
