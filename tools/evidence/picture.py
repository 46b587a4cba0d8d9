"""One picture for a phone: what each policy keeps of the full cache's gain, over the bytes that it holds."""

from __future__ import annotations

from pathlib import Path

from kvpatch.plotting import find_style, new_figure, save

from .page import Results, Use
from .settings import LABELS, NULL, ROWS

SHOWN = ("refit(kvzip)", "kvzip", "snapkv", "critical_adakv", "h2o", "roco", "streaming_llm")
COLOURS = {NULL: ("#555555", "x"), "refit(kvzip)": ("#d62728", "*")}


def draw(folder: Path, uses: tuple[Use, ...], path: Path) -> None:
    """Write a PNG: a panel for each use, stacked two by two; all other policies are thin grey lines."""
    figure = new_figure(figsize=(7.2, 6.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, use in zip(panels, uses, strict=True):
        results = Results(folder, use)
        for label in LABELS:
            budgets = sorted(k for own, k in results.lines if own == label)
            points = [(results.bytes((label, k)), kept.mean) for k in budgets if (kept := results.kept((label, k)))]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            if label in SHOWN or label == NULL:
                colour, marker = COLOURS.get(label) or find_style(ROWS[label].policy)
                dashed = "--" if label == NULL else "-"
                axes.plot(x, y, color=colour, marker=marker, ms=6, lw=1.8, ls=dashed, label=label, zorder=3)
            else:
                axes.plot(x, y, color="#cccccc", marker=".", lw=0.8, zorder=1)
        axes.axhline(1, color="black", lw=0.8)
        axes.axhline(0, color="black", lw=0.5)
        axes.set_title(use.title, fontsize=10, loc="left")
        axes.grid(alpha=0.2)
        axes.set_ylim(-0.35, 1.08)
        axes.set_xlim(0, 0.56)
    for axes in figure.axes[2:]:
        axes.set_xlabel("bytes, share of the full cache", fontsize=9)
    for axes in figure.axes[::2]:
        axes.set_ylabel("gain kept", fontsize=9)
    figure.axes[-1].legend(fontsize=8, loc="lower right")
    save(figure, path)
