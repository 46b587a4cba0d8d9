"""docs/small-models.md: every task's means and orders, and what the papers say beside what is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

from . import mass, overview
from . import pictures as drawn
from .ablate import FAMILIES, label
from .bits import BITS
from .bits import label as bit_label
from .claims import by_recipe, order, table_of
from .papers import CLAIMS
from .reasoning import RHYTHMS
from .summary import INTERVALS, budget, grid, markdown, remarks, shown
from .table import Table
from .task import Task
from .tasks import get_task

INTRODUCTION = """\
# What small models show

{first}
Made by `make small-models` from the lines of every run: change the tools, not this page. Every model here is small (half a
million to a million parameters) and trained by this repository. Fifteen of them (five architectures, three training seeds
each) look things up in some two hundred tokens; three write Python in 256 tokens; one writes long traces. Nine have
attention sinks, and further seeds stand behind the primary comparisons. What
they show exactly is which tokens a policy drops and what that breaks. How policies rank on a large model they show only as far
as the mechanism is the same; measure yours with `python -m tools.evaluation` or `kvpatch compare`.

{intervals} Models weigh the same within an architecture, and architectures weigh the same. Three training seeds are few: an
interval over one architecture alone is narrower than it should be. Of some hundred comparisons a few will be separated by luck.

Versions: {versions}.
"""

CLAIMED = """\
## What the papers say

agrees, contradicts: the interval of the difference leaves zero out, and of three models or more all but one in eight have
that sign. on average: the interval does, but more models than that differ. not separated: zero is in the interval. All of it
is exploratory: only the [primary comparisons](#primary-comparisons) are corrected for their number. The papers' models are
four orders of magnitude larger than these.
"""


BESIDE = """\
The bytes are those of a share of the text in 16 bits. The same bytes hold 1.8 times the tokens in 8 bits and 3.2 times in 4
(scales and zeros count; heads have 32 numbers), at most the whole text. `right` as in [recall](#recall), and how much higher it
is than with 16 bits. Bold as above."""

REASONED = """\
One model writes walks through a graph (`tools/training/walks.py`): a prompt of 163 tokens and a trace of 577, in which a visit
takes up what the node's last visit wrote, at distances that the graph decides. k is the share of prompt and trace that a head
holds at most, in every column. prompt kept: only the trace is evicted. every m: eviction takes m tokens at once, so that a head
is down to m - 1 tokens less each time. raas and lazy always keep the prompt; lazy, r_kv, tri_attention and vase are run with a
rhythm alone, as published; tri_attention has a calibration of four other walks, and evicts from the prompt too, which its paper
keeps. A record is needed once more, when its node is visited again, and never after. The model makes one mistake in some 25
visits with its full cache, which `visits` forgives and the other measures do not: read that one. Intervals are over walks of
one trained model; they know nothing of other models."""


@dataclass(frozen=True)
class Section:
    """parts: the groups that get a table each, {} being all samples. ranked: whether settings are ordered, too."""

    task: str
    title: str
    text: str
    parts: tuple[dict[str, Any], ...] = ({},)
    ranked: bool = True
    metrics: tuple[str, ...] = ()
    """Besides the headline."""
    facts: tuple[str, ...] = ()
    """What the full cache shows of each model, a row per model."""


_IN, _AFTER, _STREAM = ({"scenario": name} for name in ("in", "after", "stream"))
_NEEDLES = tuple({"scenario": scenario, "kind": kind} for scenario in ("regular", "context") for kind in ("single", "multi"))

LATER = Section(
    "later",
    "Questions after compression",
    "Recall's eight questions once its context of 216 tokens is compressed. kvzip repeats the context behind the token that "
    "these models copy behind. roco, keyformer, h2o, window and random hold their budget while they answer; the others evict "
    "the context once and keep all that follows.",
    ranked=False,
)

SECTIONS: tuple[Section, ...] = (
    Section(
        "recall",
        "Recall",
        "A context of 216 tokens mentions sixteen keys with three values each, some often (Zipf). in: one question at the "
        "prompt's end. after: eight questions after compression. stream: the context is read in blocks of eight, with eviction "
        "all along. snapkv and its kin evict the context once and keep all that follows; the others hold their budget.",
        (_IN, _AFTER, _STREAM),
    ),
    Section(
        "needle",
        "Needles",
        "Four records, each written once, in 64, 128 or 232 tokens. regular: the question is compressed with the context. "
        "context: it comes later. single: one is asked, at five depths. multi: all four.",
        _NEEDLES,
    ),
    Section("jaccard", "Consistency of scores", "Kept sets beside the full cache's choice by the same score; none protected."),
    Section(
        "perturbation",
        "Perturbation of attention's output",
        "How far heads' outputs move, in how many heads two-stage selection moves them less, and what becomes of the answers. "
        "[perturbation.md](perturbation.md) says why.",
        ({"scenario": "recall in"}, {"scenario": "recall after"}, {"scenario": "needle in"}, {"scenario": "needle after"}),
        metrics=("heads_lower", "right"),
    ),
    Section(
        "sparsity",
        "Sparsity of attention",
        "Which share of keys hardly counts, and how much attention is kept. Policies that evict once hold every generated "
        "token, so that they hold more: see `held`.",
        metrics=("held",),
        facts=("sparsity", "tokens_for_90", "top_10", "top_20", "top_40"),
    ),
    Section(
        "robustness",
        "Deviation over steps",
        "When the deviation of a token's attention peaks, and the same with its queries in random order: what survives that is "
        "no property of time.",
        ranked=False,
        facts=("share_early", "share_fifth", "declines", "peak_step", "shuffled_early", "shuffled_declines"),
    ),
)


def write(tables: dict[str, Table], docs: Path, more: Mapping[str, str] | None = None) -> None:
    """docs/small-models.md, docs/results/means.jsonl and docs/results/*.png; `more` are sections that no task has, by title."""
    pictures = docs / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    ranked = [one for one in SECTIONS if one.ranked and one.task in tables]
    parts = {one.task: one.parts for one in ranked} | {name: ({},) for name in ("later", "reasoning") if name in tables}
    means = {name: drawn.means(tables[name], get_task(name), own) for name, own in parts.items()}
    drawn.write(means, pictures / "means.jsonl")
    draw(means, pictures)
    first = overview.first_screen(means) if overview.SHOWN <= set(means) else ""
    text = INTRODUCTION.format(first=first, intervals=INTERVALS, versions=_versions(tables))
    blocks = [text]
    blocks += [CLAIMED, *(f"### {paper}\n\n{table_of(said, tables)}\n" for paper, said in CLAIMS.items())]
    if LATER.task in tables:
        blocks.append(_section(LATER, tables[LATER.task], get_task(LATER.task), pictures))
    blocks += [one for one in (mass.section(tables, drawn.title), *(more or {}).values()) if one]
    blocks += of_tasks(tables, docs).values()
    if "reasoning" in tables:
        blocks.append(_reasoning(tables["reasoning"]))
    if "bits" in tables:
        blocks.append(_bits(tables["bits"]))
    if "ablate" in tables:
        blocks.append(_ablations(tables["ablate"]))
    (docs / "small-models.md").write_text("\n".join(blocks).rstrip() + "\n", encoding="utf-8")


def of_tasks(tables: Mapping[str, Table], docs: Path) -> dict[str, str]:
    """The section of each task in `tables`, by title; draws their pictures."""
    pictures = docs / "results"
    return {one.title: _section(one, tables[one.task], get_task(one.task), pictures) for one in SECTIONS if one.task in tables}


def draw(means: overview.Means, pictures: Path) -> None:
    """Every picture of the means, and the figure of the first screen where its tasks are all there."""
    drawn.draw(means, pictures, get_task)
    if overview.SHOWN <= set(means):
        overview.draw(means, pictures / overview.FILE)


def open_with(means: overview.Means, docs: Path) -> None:
    """Write the first screen of these means in the place of the one that is there."""
    path = docs / "small-models.md"
    head, made, rest = path.read_text(encoding="utf-8").partition("Made by `make small-models`")
    path.write_text(f"{head.splitlines()[0]}\n\n{overview.first_screen(means)}\n{made}{rest}", encoding="utf-8")


def _versions(tables: dict[str, Table]) -> str:
    """What the lines were made with."""
    found = {", ".join(f"{name} {which}" for name, which in t.lines[0]["versions"].items()) for t in tables.values()}
    return "; ".join(sorted(found))


def _facts(table: Table, task: Task, names: tuple[str, ...]) -> list[str]:
    """What the full cache shows, by model."""
    rows = []
    for model in table.models:
        here = table.where(model=model)
        rows.append([model, *(shown(here.mean(("full", 1.0), name)) for name in names)])
    return [*(f"- `{name}`: {task.metrics[name]}" for name in names), "", markdown(("", *names), rows), ""]


def _reasoning(table: Table) -> str:
    """What is measured of every policy: a table per budget with a column per way, and what a window lacks."""
    task = get_task("reasoning")
    samples = len({(line["model"], line["seed"], line["sample"]) for line in table.lines if "sample" in line})
    lines = ["## Long reasoning", "", REASONED, ""]
    lines += [f"`python -m tools.evaluation reasoning`. {samples:,} samples, models {', '.join(table.models)}. {task.source}"]
    lines += [""]
    policies = list(dict.fromkeys(name.partition(", ")[0] for name in table.names))
    cells = [(f"{policy}, {way}", k) for k in table.budgets for policy in policies for way in RHYTHMS]
    for metric, words in task.metrics.items():
        means = [found.mean for cell in cells if (found := table.mean(cell, metric)) is not None]
        spread = "" if metric == task.metric else f" Under a budget: {min(means):.3f} to {max(means):.3f}."
        lines += [f"- `{metric}`: {words}. Full cache: {shown(table.mean(('full', 1.0), metric))}.{spread}"]
    for k in table.budgets:
        ran = {cell[0] for cell in cells if cell[1] == k and table.mean(cell, task.metric) is not None}
        ways = [way for way in RHYTHMS if any(f"{policy}, {way}" in ran for policy in policies)]
        own = [policy for policy in policies if any(f"{policy}, {way}" in ran for way in ways)]
        rows = [[f"`{policy}`", *(shown(table.mean((f"{policy}, {way}", k), task.metric)) for way in ways)] for policy in own]
        lines += ["", f"### {task.metric.capitalize()}, k = {budget(k)}", "", markdown(("", *ways), rows)]
        others = [policy for policy in own if policy != "window"]
        rows = [
            [f"`{policy}`", *(
                shown(table.difference((f"{policy}, {way}", k), (f"window, {way}", k), task.metric), signed=True)
                for way in ways
            )]
            for policy in others
        ]  # fmt: skip
        lines += ["", f"### Above a window, k = {budget(k)}", "", f"Paired differences in `{task.metric}`.", ""]
        lines += [markdown(("", *ways), rows)]
    return "\n".join([*lines, "", *remarks(table), ""])


def _ablations(table: Table) -> str:
    """A table per family, with each variant's difference from the first."""
    lines = ["## One choice at a time", "", "Recall's `right`, all else as published; differences are from the first row.", ""]
    for family, (about, variants) in FAMILIES.items():
        names = [label(family, variant) for variant, _, _ in variants]
        rows = []
        for name in names:
            cells = [name.partition(": ")[2]]
            for scenario in ("in", "after"):
                here = table.where(scenario=scenario)
                for k in here.budgets:
                    step = here.difference((name, k), (names[0], k), "right") if name != names[0] else None
                    cells.append(shown(here.mean((name, k), "right")) + (f", {shown(step, signed=True)}" if step else ""))
            rows.append(cells)
        columns = ["", *(f"{scenario}, k = {budget(k)}" for scenario in ("in", "after") for k in table.budgets)]
        lines += [f"### {family}", "", f"{about}.", "", markdown(columns, rows), ""]
    return "\n".join([*lines, *remarks(table)])


def _bits(table: Table) -> str:
    """Recall with 16 bits at each budget, and how much better 8 and 4 bits are at the same bytes."""
    samples = len({(line["model"], line["seed"], line["sample"]) for line in table.lines if "sample" in line})
    lines = ["## Bits beside tokens", "", BESIDE, ""]
    lines += [f"`python -m tools.evaluation bits`. {samples:,} samples, models {', '.join(table.models)}, in bfloat16.", ""]
    for scenario in dict.fromkeys(line["group"]["scenario"] for line in table.lines if "group" in line):
        here, rows = table.where(scenario=scenario), []
        for policy in dict.fromkeys(name.partition(",")[0] for name in here.names):
            for k in here.budgets:
                wide, *narrow = (bit_label(policy, bits) for bits in BITS)
                gains = [here.difference((name, k), (wide, k), "right") for name in narrow]
                rows.append([policy, budget(k), shown(here.mean((wide, k), "right")), *(shown(g, signed=True) for g in gains)])
        columns = ("policy", "bytes, share of full", "16 bits", "8 bits, difference", "4 bits, difference")
        lines += [f"### {drawn.title('recall', {'scenario': scenario}).capitalize()}: bits", "", markdown(columns, rows), ""]
    return "\n".join(lines)


def _section(section: Section, table: Table, task: Task, pictures: Path) -> str:
    samples = len({(line["model"], line["seed"], line["sample"]) for line in table.lines if "sample" in line})
    lines = [f"## {section.title}", "", section.text, ""]
    lines += [f"`python -m tools.evaluation {task.name}`. {samples:,} samples, {len(table.models)} models. {task.source}", ""]
    for part in section.parts:
        lines += _part(section, table.where(**part) if part else table, task, part)
    if section.facts:
        lines += _facts(table, task, section.facts)
    said = remarks(table)
    lines += [*said, ""] if said else []
    if section.ranked:
        lines += [f"![{section.title}](results/{task.name}.png)", ""]
    with TemporaryDirectory() as folder:  # so that all it draws is found, also where an earlier page left its pictures
        task.pictures(table, Path(folder))
        for path in sorted(Path(folder).iterdir()):
            copy(path, pictures)
            lines += [f"![{section.title}](results/{path.name})", ""]
    return "\n".join(lines)


def _part(section: Section, table: Table, task: Task, part: dict[str, Any]) -> list[str]:
    name = drawn.title(section.task, part)
    lines = [f"### {name[0].upper()}{name[1:]}", ""] if name else []
    for metric in (task.metric, *section.metrics):
        full = table.mean(("full", 1.0), metric)
        lines += [f"`{metric}`: {task.metrics[metric]}." + (f" Full cache: {shown(full)}." if full else ""), ""]
        if table.names:
            lines += [grid(table, lambda cell, metric=metric: shown(table.mean(cell, metric))), ""]  # type: ignore[misc]
    if section.ranked:
        lines += ["From best to worst:", "", order(table, task.metric, task.better), ""]
    if section.ranked and len(table.recipes) > 1:
        lines += ["By architecture, mean over k:", "", by_recipe(table, task.metric), ""]
    return lines
