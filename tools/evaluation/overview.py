"""The first screen of docs/small-models.md: one figure, quality against bytes held in four uses, and nine sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.plotting import new_figure, save, style

from . import plots
from .plots import Point
from .reasoning import RHYTHMS

FILE = "overview.png"
BEST = 4
"""Policies of a panel that are coloured and named, beside a window and chance."""
REFERENCES = ("window", plots.RANDOM)
SAID = "The best policies in colour, with bands of 95%, all others in grey. See how they rank: the models are small."
HELD = "KV bytes held, share of the full cache's"

Means = Mapping[str, Sequence[Point]]
"""By task, as docs/results/means.jsonl has them."""


@dataclass(frozen=True)
class Use:
    """A panel of the figure. parts: task and panel of the means that it shows."""

    title: str
    parts: tuple[tuple[str, str], ...]

    def points(self, means: Means) -> list[Point]:
        """Every policy's points: of its variants those that are best on average, under the policy's name."""
        found: dict[str, list[list[Point]]] = {}
        for task, panel in self.parts:
            own = [one for one in means.get(task, ()) if one.panel == panel and one.name != plots.CHANCE]
            for name in one_way([one.name for one in own]):
                found.setdefault(policy_of(name), []).append(sorted((p for p in own if p.name == name), key=lambda p: p.k))
        return [point for variants in found.values() for point in max(variants, key=_mean)]


_QUESTIONS = "questions come after the prompt"
USES = (
    Use("The question is in the prompt", (("recall", "the question is in the prompt"),)),
    Use("Questions come after compression", (("recall", _QUESTIONS), ("later", _QUESTIONS))),
    Use("A stream, asked later", (("recall", "the context is read in blocks, questions follow"),)),
    Use("Long reasoning", (("reasoning", "a trace of 577 tokens"),)),
)


SHOWN = {task for use in USES for task, _ in use.parts}
"""The tasks that the first screen is made from."""


def policy_of(name: str) -> str:
    """Of a setting's name: `kvzip, floor 0.2` and `roco, every 32` are kvzip and roco."""
    return name.partition(",")[0]


def one_way(names: Sequence[str]) -> list[str]:
    """Of the ways that a policy is run in long reasoning: every token, or its own rhythm where it has no such way."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        way = name.partition(", ")[2]
        if way not in RHYTHMS:
            found[name] = name
        elif way == "every token" or (way == "every 32" and policy_of(name) not in found):
            found[policy_of(name)] = name
    return list(found.values())


def _mean(points: Sequence[Point]) -> float:
    """Over the budgets that all tasks have, where there are any."""
    chosen = [one.mean for one in points if one.k in (0.2, 0.4)] or [one.mean for one in points]
    return sum(chosen) / len(chosen)


def lines_of(use: Use, means: Means) -> dict[str, list[Point]]:
    """The points of each policy, from the best to the worst."""
    found: dict[str, list[Point]] = {}
    for one in use.points(means):
        found.setdefault(policy_of(one.name), []).append(one)
    return dict(sorted(found.items(), key=lambda item: -_mean(item[1])))


def named(lines: Mapping[str, Any]) -> list[str]:
    """The policies that are coloured: the best, where a two-stage variant stands for its base, and the references."""
    best = [name for name in lines if name not in (*REFERENCES, plots.FULL) and not name.startswith("critical_")]
    return [*best[:BEST], *(name for name in REFERENCES if name in lines)]


# ---- the figure ----


def draw(means: Means, path: Path) -> None:
    """A panel per use; the best policies have their names at the end of their lines, all others are grey."""
    figure = new_figure(figsize=(13.6, 4.1), layout="constrained")
    for axes, use in zip(figure.subplots(1, len(USES), sharey=True), USES, strict=True):
        _panel(axes, lines_of(use, means))
        axes.set_title(use.title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel(HELD, fontsize=9)
    figure.axes[0].set_ylabel("answers right (at the right: steps)", fontsize=9)
    figure.suptitle(SAID, x=0.01, ha="left", fontsize=9, color="#555555")
    save(figure, path)


def _panel(axes: Any, lines: Mapping[str, Sequence[Point]]) -> None:
    chosen, ends = named(lines), []
    for name, points in lines.items():
        x, y = [one.x for one in points], [one.mean for one in points]
        if name == plots.FULL:
            axes.axhline(y[0], color="black", lw=1)
            axes.annotate("full cache", (0.02, y[0]), (0, 3), textcoords="offset points", fontsize=8, va="bottom")
        elif name in chosen:
            colour, marker = style(name)
            reference = name in REFERENCES
            line = {"lw": 1.2, "ls": "--"} if reference else {"lw": 2, "ls": "-"}
            axes.plot(x, y, color=colour, marker=marker, ms=4.5, zorder=3, **line)
            axes.fill_between(x, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.12, lw=0)
            ends.append((y[-1], x[-1], name, colour))
        else:
            axes.plot(x, y, color="#c9c9c9", lw=1, zorder=1)
    _names(axes, ends)
    axes.set_xlim(0, 0.88)
    axes.set_ylim(-0.02, 1.08)
    axes.set_xticks([0, 0.2, 0.4, 0.6])
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _names(axes: Any, ends: list[tuple[float, float, str, str]], gap: float = 0.058) -> None:
    """Names at the right of the longest line, moved apart where they would overlap."""
    at, right = -1.0, max((x for _, x, _, _ in ends), default=0.0) + 0.035
    ends = sorted(ends)
    places: list[float] = []
    for y, *_ in ends:
        at = max(y, at + gap)
        places.append(at)
    over = max(0.0, places[-1] - 1.02) if places else 0.0
    for i in range(len(places) - 1, -1, -1):  # what was pushed above the top comes down, and what is below it makes room
        limit = 1.02 if i == len(places) - 1 else places[i + 1] - gap
        places[i] = min(places[i], limit) if over else places[i]
    for place, (y, x, name, colour) in zip(places, ends, strict=True):
        axes.plot([x, right - 0.01], [y, place], color=colour, lw=0.6, alpha=0.6)
        axes.text(right, place, name, color=colour, fontsize=8.5, va="center", bbox={"fc": "white", "ec": "none", "pad": 0.6})


# ---- nine sentences ----

SENTENCES = """\
1. **The question is in the prompt:** `adakv` answers {in_adakv} and `snapkv` {in_snapkv} at a tenth, a fifth and two
   fifths of the text: what counts is to look at the prompt's end.
2. Policies that look at all of it alike fall behind: `roco` {in_roco}, `keyformer` {in_keyformer},
   `h2o` {in_h2o}; a window has {in_window}, chance {in_random}.
3. **Questions come after compression:** only a second reading stays near the full cache:
   {zip_name} {later_zip} at a fifth and two fifths.
4. Of policies that read once, `layer_defensive` has {later_layer_defensive} there; of those that go on evicting, `roco`
   {after_roco}, `keyformer` {after_keyformer}, `h2o` {after_h2o} (from a tenth on).
5. `snapkv` ({after_snapkv}) and `adakv` ({after_adakv}) do no better there than a window ({after_window}), with more
   bytes: they kept what the prompt's end looked at.
6. **A stream, asked later:** nearly the same order: `roco` {stream_roco}, `keyformer` {stream_keyformer}, a window
   {stream_window}.
7. **Long reasoning:** with three tenths of prompt and trace `tri_attention` has {think_tri_attention_3} of the steps
   right, `roco` {think_roco_3}, `cur` {think_cur_3}, `h2o` {think_h2o_3}, a window {think_window_3} (full cache
   {think_full}); with half {think_tri_attention_5}, {think_roco_5}, {think_cur_5}, {think_h2o_5} and {think_window_5}.
8. **The papers:** RoCo's protection by standard deviation and Keyformer's score per layer help on all fifteen models;
   Keyformer's noise and CriticalKV's second stage do not help on these models, nor do StreamingLLM's sinks help answers,
   though they keep [reading](#reading-without-the-first-token) as good as with the full cache; the tables below
   say what cannot be decided here, and why.
9. **Read them with care:** the models are small and the texts short. What a policy drops they show exactly; how
   policies rank on a real model [results](results.md) tell.
"""


def first_screen(means: Means) -> str:
    """The figure and the sentences, with the figures of the means in them."""
    values: dict[str, str] = {}
    for part, use in zip(("in", "after", "stream"), USES, strict=False):
        task, panel = use.parts[0]
        for name in {one.name for one in means[task]}:
            own = sorted((p for p in means[task] if p.panel == panel and p.name == name), key=lambda p: p.k)
            values[f"{part}_{name}"] = ", ".join(_share(one.mean) for one in own)
    later = Use("", (USES[1].parts[1],)).points(means)
    zipped = [one for one in later if policy_of(one.name) == "kvzip"]
    values["zip_name"] = f"`{zipped[0].name}`"
    values["later_zip"] = ", ".join(_share(one.mean) for one in zipped)
    values["later_layer_defensive"] = ", ".join(_share(one.mean) for one in later if one.name == "layer_defensive")
    for one in USES[3].points(means):
        name = policy_of(one.name)
        values["think_full" if name == plots.FULL else f"think_{name}_{round(10 * one.k)}"] = _share(one.mean)
    picture = f"![Quality against bytes held: the best policies in four uses](results/{FILE})"
    return f"{picture}\n\n{textwrap.dedent(SENTENCES).format(**values)}"


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"
