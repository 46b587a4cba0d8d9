"""JSON lines as a picture: a panel per case and length, a row per policy, ratios to the unpatched model from left to right.

A panel has the unpatched model at 1, the floor and the roof where they were measured, and a tick where a limit is. Of a peer
both sides stand in one row. Where tokens per second were measured, a full cache is at 1 and more is better.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .lines import FLOOR, Line, latest
from .paper import TABLE, compared
from .peer import FIGURES

OURS, THEIRS, LIMIT = "#24557a", "#d9480f", "#9a2a2a"
MARKERS = {"kvpatch": (OURS, "o"), "peer": (THEIRS, "s"), "paper": (THEIRS, "s")}
NAMES = {"prompt": "prompt", "decode": "tokens", "bytes": "KV bytes", "memory": "extra peak memory"}


@dataclass
class Panel:
    """Figures of policies by series, limits of some, and lines down the whole panel by name."""

    title: str
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    lines: dict[str, float] = field(default_factory=dict)

    def add(self, policy: str, series: str, value: float | None) -> None:
        if value is not None:
            self.values.setdefault(policy, {})[series] = value


def panels(lines: list[Line]) -> list[Panel]:
    """What is to be drawn: panels of a case stand together."""
    found: dict[str, Panel] = {}
    roofs: dict[str, list[float]] = {}

    def panel(title: str) -> Panel:
        return found.setdefault(title, Panel(title))

    speeds = [line for line in latest(lines) if "tokens_per_s" in line]
    for line in [line for line in latest(lines) if "tokens_per_s" not in line] + compared(speeds):
        about = f"{line['case']} · {line['arch']} · n = {line['n']}"
        about += f" · batch {line['batch']}" if "batch" in line else ""
        if line["case"] == "peer":
            for name in FIGURES:
                what = name.removesuffix("_ratio")
                place = panel(f"{line['peer']} · {NAMES[what]} · n = {line['n']}")
                for series, side in (("kvpatch", "ours"), ("peer", "theirs")):
                    place.add(line["policy"], series, line[side].get(name))
                if f"{what}_roof_ms" in line["ours"]:
                    ours = line["ours"]
                    roofs.setdefault(place.title, []).append(ours[f"{what}_roof_ms"] / ours[f"{what}_ms_unpatched"])
        elif "tokens_per_s" in line:
            place = panel(about + " · tokens/s to full")
            place.add(line["policy"], "kvpatch", line.get("speedup"))
            place.add(line["policy"], "paper", _of_paper(line))
        elif "ratio" in line:
            _add(panel(about), line)
            if "roof_ms" in line:
                roofs.setdefault(about, []).append(line["roof_ms"] / line["ms_unpatched"])
    for title, ratios in roofs.items():
        found[title].lines["roof"] = median(ratios)
    cases = list(dict.fromkeys(title.split(" · ")[0] for title in found))
    drawn = [one for one in found.values() if one.values]
    return sorted(drawn, key=lambda one: cases.index(one.title.split(" · ")[0]))


def _add(place: Panel, line: Line) -> None:
    policy, limits = line["policy"], line["limits"]
    if policy == FLOOR:
        place.lines["floor"] = line["ratio"]
        return
    place.add(policy, "kvpatch", line["ratio"])
    if "ms_floor" in line:
        place.lines.setdefault("floor", line["ratio"] / line["over_floor"])
    if "over_floor" in limits:
        place.limits[policy] = limits["over_floor"] * line["ratio"] / line["over_floor"]
    elif "ratio" in limits:
        place.limits[policy] = limits["ratio"]


def _of_paper(line: Line) -> float | None:
    if line["case"] != "paper":
        return None
    table = TABLE.get((line["n"], line["batch"]), {})
    own, full = table.get(line["policy"]), table.get("full")
    return None if own is None or full is None else own / full


# ---- drawing ----


def draw(lines: list[Line], path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        ValueError: no line has a ratio to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = panels(lines)
    if not every:
        raise ValueError("these lines have no ratio to draw: measure something first, with --json FILE")
    across = min(3, len(every))
    grid = [every[i : i + across] for i in range(0, len(every), across)]
    heights = [0.9 + 0.27 * max(len(one.values) for one in row) for row in grid]
    figure = Figure(figsize=(4.6 * across, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(grid), across, squeeze=False, height_ratios=heights)
    for row, own in zip(grid, axes, strict=True):
        for place, one in zip(row, own, strict=False):
            _panel(place_axes=one, panel=place)
        for unused in own[len(row) :]:
            unused.set_axis_off()
    handles = {label: handle for one in axes.flat for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _panel(place_axes: Any, panel: Panel) -> None:
    axes, names = place_axes, list(panel.values)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.axvline(1.0, color="#555555", linewidth=1.0, label="unpatched (full)")
    styles = {"floor": ("--", "#2b8a3e"), "roof": (":", "#555555")}
    for name, at in panel.lines.items():
        axes.axvline(at, linestyle=styles[name][0], color=styles[name][1], linewidth=1.3, label=name)
    for series, (color, marker) in MARKERS.items():
        at = [(own[series], row) for row, own in enumerate(panel.values.values()) if series in own]
        if at:
            x, y = zip(*at, strict=True)
            label = "the other library" if series == "peer" else "the paper" if series == "paper" else series
            axes.plot(x, y, marker, color=color, markersize=5.5, label=label, alpha=0.9)
    for policy, limit in panel.limits.items():
        axes.plot(limit, names.index(policy), "|", color=LIMIT, markersize=14, markeredgewidth=2, label="limit")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(_places(panel)))
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _places(panel: Panel) -> Iterable[float]:
    yield from (1.0, *panel.limits.values(), *panel.lines.values())
    for own in panel.values.values():
        yield from own.values()
