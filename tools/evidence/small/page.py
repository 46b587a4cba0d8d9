"""docs/small-models.md: a section for each task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..tables import markdown, shown
from .mass import FIXED, HELD, MASS
from .reasoning import RHYTHMS
from .runs import TASKS
from .table import WHOLE, Table

INTRODUCTION = """\
# What small models show

[Results](results.md) decide which policy to take: they are a pretrained model's. This page has what those do not measure:
more policies for questions after compression, budgets by mass, and long reasoning.
The models are small (half a million to a million parameters) and trained by this repository; their texts have some two
hundred tokens, but for the long traces. They show exactly which tokens a policy drops and what that breaks. How policies rank
on a large model they show only as far as the mechanism is the same.

The question is always recall's: a context of 216 tokens mentions sixteen keys with three values each, some often (Zipf). in:
one question stands at the prompt's end. after: eight questions come after compression. `right`: share of a sequence's answers
that are right in all three values. snapkv and its kin evict the context once and keep all that follows; the others hold their
budget.

Made by `make small-models`; change `tools/evidence/small`, not this page. Fifteen models: five architectures, three training
seeds each, but where a section says otherwise. Brackets: 95% by a paired hierarchical bootstrap, trained models and then
samples, spread as wide as few models ask for. **Bold**: the interval of the difference leaves zero out, and of three models
or more all but one in eight have that sign. Models weigh the same within an architecture, and architectures weigh the same.

Versions: {versions}.
"""

LATER = """\
## Questions after compression

Recall's eight questions once its context is compressed. kvzip repeats the context after the token that asks these models
to copy. roco, keyformer, h2o, window and random hold their budget while they answer; the others evict the context once and
keep all that follows.
"""

WEIGHED = f"""\
## Budgets by mass

`k=kvpatch.Mass(0.9)` lets each head hold the fewest tokens whose scores sum to 0.9 of all scores. Beside it the fixed `k`
that holds as many tokens on average over heads, layers and samples. The question is in the prompt. h2o with 16 recent tokens,
roco with 10 and none of high deviation, snapkv with a window of 8. held: {HELD} under the mass.
"""

REASONED = """\
## Long reasoning

One model writes walks through a graph (`tools/training/walks.py`): a prompt of 163 tokens and a trace of 577, in which a visit
takes up what the node's last visit wrote, at distances that the graph decides. k is the share of prompt and trace that a head
holds at most, in every column. prompt kept: only the trace is evicted. every m: eviction takes m tokens at once, so that a head
is down to m - 1 tokens less each time. raas and lazy always keep the prompt; lazy, r_kv, tri_attention and vase are run with a
rhythm alone, as published; tri_attention has a calibration of four other walks, and evicts from the prompt too, which its paper
keeps. A record is needed once more, when its node is visited again, and never after. Intervals are over walks of one trained
model; they know nothing of other models.
"""


def write_page(tables: dict[str, Table], docs: Path) -> None:
    """Write docs/small-models.md from the tasks that have lines."""
    found = {str(line["versions"]): line["versions"] for table in tables.values() for line in table.lines}
    versions = "; ".join(", ".join(f"{name} {which}" for name, which in one.items()) for one in found.values())
    text = f"{INTRODUCTION.format(versions=versions)}\n{write_sections(tables, SECTIONS)}"
    (docs / "small-models.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def write_source(table: Table, task: str) -> str:
    """How the lines were made, and what the full cache has."""
    about = TASKS[task]
    models = f"models {', '.join(table.models)}" if len(table.models) < 10 else f"{len(table.models)} models"
    text = f"`python -m tools.evidence small {task}`. {table.count_samples():,} samples, {models}."
    if about.source:
        text += f" {about.source}"
    full = shown(table.mean(WHOLE, about.metric))
    return f"{text}\n\n`{about.metric}`: {about.metrics[about.metric]}. Full cache: {full}.\n"


def write_later(table: Table) -> str:
    """A row for each way, a column for each budget."""
    rows = [[f"`{label}`", *(shown(table.mean((label, k), "right")) for k in table.budgets)] for label in table.labels]
    grid = markdown(["", *(f"k = {k:g}" for k in table.budgets)], rows)
    return "\n".join([LATER, write_source(table, "later"), grid, ""])


def write_mass(table: Table) -> str:
    """What a mass takes of each policy, what it costs, and what a fixed budget of the same size costs."""
    rows, sides = [], [0, 0]
    for policy in dict.fromkeys(label.partition(",")[0] for label in table.labels):
        for k in table.budgets:
            own, fixed = ((f"{policy}, {way}", k) for way in (MASS, FIXED))
            gain = table.difference(own, fixed, "right")
            sides[0] += gain is not None and gain.low > 0
            sides[1] += gain is not None and gain.high < 0
            means = (table.mean(own, "held"), table.mean(own, "right"), table.mean(fixed, "right"))
            better = "-" if gain is None else f"{gain.signs[0]} of {gain.models}"
            rows.append([f"`{policy}`", f"{k:g}", *map(shown, means), shown(gain, signed=True), better])
    header = ("", "mass", "held", "right, mass", "as many tokens", "mass - fixed", "models that a mass is better on")
    last = f"A mass is better in {sides[0]} of {len(rows)} rows, worse in {sides[1]}: there the interval leaves zero out."
    return "\n".join([WEIGHED, write_source(table, "mass"), markdown(header, rows), "", last, ""])


def write_reasoning(table: Table) -> str:
    """A table for each budget with a column for each way."""
    lines = [REASONED, write_source(table, "reasoning")]
    policies = list(dict.fromkeys(label.partition(", ")[0] for label in table.labels))
    for k in table.budgets:
        found = {(policy, way): table.mean((f"{policy}, {way}", k), "visits") for policy in policies for way in RHYTHMS}
        ways = [way for way in RHYTHMS if any(found[policy, way] for policy in policies)]
        rows = [[f"`{policy}`", *(shown(found[policy, way]) for way in ways)] for policy in policies]
        lines += [f"### Visits, k = {k:g}", "", markdown(("", *ways), [row for row in rows if set(row[1:]) != {"-"}]), ""]
    return "\n".join([*lines, *table.list_errors(), ""])


SECTIONS: dict[str, Callable[[Table], str]] = {
    "later": write_later,
    "mass": write_mass,
    "reasoning": write_reasoning,
}


def write_sections(tables: dict[str, Table], names: Iterable[str]) -> str:
    """The sections of some tasks, as a terminal shows them."""
    return "\n".join(SECTIONS[name](tables[name]) for name in names if name in tables)
