"""Length by depth as a picture: a panel per policy, one colour scale [CriticalKV 4.4]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from kvpatch.errors import KVPatchError
from kvpatch.plotting import new_figure, save

ABREAST = 4
"""Panels beside each other."""
Panel = Sequence[Sequence[float | None]]


def heatmap(
    table: Mapping[str, Panel],
    rows: Sequence[Any],
    columns: Sequence[Any],
    row_label: str,
    column_label: str,
    titles: Mapping[str, str],
    path: str | PathLike[str],
) -> None:
    """Draw shares from 0 to 1, `table[policy][row][column]`, with the value in each cell; None leaves a cell empty.

    titles: what stands over a policy's panel where it is not the policy's name. What random eviction and chance give
    are panels like all others, from the caller.

    Raises:
        KVPatchError: nothing to draw, a panel that has not these rows and columns, or a path that cannot be written.
    """
    if not table:
        raise KVPatchError("Nothing to draw: the table has no policy.")
    for name, panel in table.items():
        if len(panel) != len(rows) or any(len(row) != len(columns) for row in panel):
            raise KVPatchError(f"The panel of {name} is not {len(rows)} rows of {len(columns)} cells.")
    abreast = min(ABREAST, len(table))
    lines = -(-len(table) // abreast)
    size = 0.6 + abreast * (0.9 + 0.42 * len(columns)), 0.5 + lines * (0.9 + 0.3 * len(rows))
    figure = new_figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, abreast, squeeze=False)
    image = None
    for i, axes in enumerate(grid.flat):
        if i >= len(table):
            axes.set_axis_off()
            continue
        name = list(table)[i]
        image = _panel(axes, table[name], rows, columns)
        axes.set_title(titles.get(name, name), loc="left", fontsize=8)
        if i % abreast == 0:
            axes.set_ylabel(row_label, fontsize=7)
        if i + abreast >= len(table):
            axes.set_xlabel(column_label, fontsize=7)
    figure.colorbar(image, ax=grid, shrink=0.6, pad=0.01)
    save(figure, path)


def _panel(axes: Any, panel: Panel, rows: Sequence[Any], columns: Sequence[Any]) -> Any:
    numbers = [[float("nan") if value is None else value for value in row] for row in panel]
    image = axes.imshow(numbers, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for i, row in enumerate(panel):
        for j, value in enumerate(row):
            if value is not None:
                colour = "white" if value > 0.5 else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.tick_params(length=0, labelsize=6)
    return image
