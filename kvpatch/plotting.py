"""Pictures of the kept tokens and of their effect on predictions.

matplotlib is imported when a picture is drawn; no window is opened and no global state is changed.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import KVPatchError
from .policies.facts import FACTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_BLUES = ("#24557a", "#4f9bc4")  # alternate, to tell layers apart
_OTHERS = ("#843c39", "#7b4173", "#a55194")  # of policies that are none of FACTS
_NEEDLE, _ASKED, _QUESTION = "#9a9a9a", "#d9480f", "#2b8a3e"
_WIDTH, _FONT = 78, 7  # letters of a line, and points
_LETTER, _LINE = 0.602 * _FONT / 72, 1.35 * _FONT / 72  # inches of one letter, and of one line, of DejaVu Sans Mono
_DARKEST = 0.8  # the share of heads from which on a word is black


@dataclass(frozen=True)
class Marks:
    """Spans of the text to point at, as [start, stop) pairs of token positions.

    needles: sentences hidden in the text. asked: those that the question asks for. question: the question.
    """

    needles: Sequence[tuple[int, int]] = ()
    asked: Sequence[tuple[int, int]] = ()
    question: Sequence[tuple[int, int]] = ()


def new_figure(**options: Any) -> Figure:
    """Make a matplotlib Figure without a window, for the functions of this module that draw; options: of Figure.

    Raises KVPatchError if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVPatchError("Pictures need matplotlib: pip install matplotlib") from error

    class Picture(Figure):
        """Figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            return encode_png(self)

    figure = Picture(**options)
    FigureCanvasAgg(figure)
    return figure


def encode_png(figure: Figure, dpi: int = 90) -> bytes:
    """Return a figure as the bytes of a PNG, which a notebook shows: of a report (`Report._repr_html_`), or of a picture."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()


def find_style(policy: str) -> tuple[str, str]:
    """Return the colour and the marker of a policy, for `draw_divergence` and the project's tools, which draw it alike.

    A policy that is none of FACTS gets one that depends on its name alone.
    """
    if (fact := FACTS.get(policy)) is not None:
        return fact.colour, fact.marker
    return _OTHERS[zlib.crc32(policy.encode()) % len(_OTHERS)], "P"


def draw_heads(kept_LHT: Tensor, title: str) -> Figure:
    """Draw, for `Report.plot`, which tokens heads hold, kept_LHT (bool [L,H,T]): a line per layer and head, a column per token.

    Layers have two colours in turn, to tell them apart.
    """
    L, H, n = kept_LHT.shape
    figure = new_figure(figsize=(11, 1.4 + min(0.13 * L * H, 12)), layout="constrained")
    axes = figure.add_subplot()
    from matplotlib.colors import ListedColormap

    colour_L = torch.arange(L, device="cpu") % 2 + 1  # alternates from layer to layer
    axes.imshow(
        (kept_LHT * colour_L[:, None, None]).reshape(L * H, n).numpy(),
        cmap=ListedColormap(["white", *_BLUES]),
        vmin=0,
        vmax=2,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_yticks([H * layer + (H - 1) / 2 for layer in range(L)], [f"layer {layer}" for layer in range(L)])
    axes.set_xlabel("token of the text")
    axes.set_ylabel("a line per KV head")
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def draw_budgets(held_LH: Tensor, title: str) -> Figure:
    """Draw, for `Report.plot`, how many tokens each head holds, held_LH (int [L,H]): a line per layer, a cell per head."""
    L, H = held_LH.shape
    figure = new_figure(figsize=(2.5 + 0.7 * H, 1.6 + 0.35 * L), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(held_LH.numpy(), cmap="Blues", vmin=0, aspect="auto")
    middle = held_LH.max() / 2
    for layer in range(L if H * L <= 512 else 0):
        for head in range(H):
            n = int(held_LH[layer, head])
            axes.text(head, layer, str(n), ha="center", va="center", fontsize=7, color="white" if n > middle else "black")
    axes.set_xticks(range(H))
    axes.set_yticks(range(L))
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.colorbar(image, label="tokens held")
    return figure


def draw_panels(columns: Sequence[Sequence[tuple[str, Tensor]]], marks: Marks, title: str) -> Figure:
    """Draw for `kvpatch demo` a panel per policy (row) and budget (column): the share of heads that kept each token.

    columns: for each budget its panels, each with a title and the share [L,T] of heads by layer and token. marks: spans of the
    text to point at.
    """
    n_rows = max(map(len, columns))
    figure = new_figure(figsize=(7.5 * len(columns), 1.2 + 1.05 * n_rows), layout="constrained")
    grid = figure.subplots(n_rows, len(columns), squeeze=False, sharex=True)
    image: ScalarMappable | None = None
    cells = ((grid[i][j], *panel) for j, column in enumerate(columns) for i, panel in enumerate(column))
    for axes, name, share_LT in cells:
        image = axes.imshow(share_LT.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        L = share_LT.shape[0]
        axes.set_yticks(range(L), [f"layer {layer}" for layer in range(L)], fontsize=7)
        axes.set_title(name, loc="left", fontsize=9, pad=11)
        axes.tick_params(length=0, labelsize=7)
        for spans, colour in ((marks.needles, _NEEDLE), (marks.asked, _ASKED), (marks.question, _QUESTION)):
            _point_at(axes, spans, colour, L)
        axes.set_ylim(L - 0.5, -0.5)
    for j in range(len(columns)):
        grid[n_rows - 1][j].set_xlabel("token of the prompt", fontsize=8)
    _write_legend(figure, marks, title)
    assert image is not None  # there is a policy
    figure.colorbar(image, ax=grid, label="share of heads that kept the token", shrink=0.5, pad=0.01)
    return figure


def draw_divergence(
    curves: Mapping[str, Sequence[tuple[int, float]]], chance: str, full: int, tolerance: float, title: str
) -> Figure:
    """Draw for `kvpatch compare` the divergence in nats against the bytes of the cache at the end, a line per policy.

    The axis of nats is logarithmic above 1e-4 and linear below, so that 0, the value without eviction, has a place.

    Args:
        curves: (bytes, nats) pairs by policy.
        chance: the policy that is drawn dashed.
        full: bytes of the full cache, drawn as a vertical line.
        tolerance: nats, drawn as a dotted line.
        title: shown above.
    """
    figure = new_figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.add_subplot()
    size, unit = (2**30, "GiB") if full >= 2**30 else (2**20, "MiB") if full >= 2**20 else (2**10, "KiB")
    for name, points in curves.items():
        color, marker = find_style(name)
        look: dict[str, Any] = {"color": color, "marker": marker, "ls": "--" if name == chance else "-"}
        label = f"{name} (chance)" if name == chance else name
        axes.plot([nbytes / size for nbytes, _ in points], [nats for _, nats in points], label=label, ms=5, lw=1.4, **look)
    axes.axhline(tolerance, color=_NEEDLE, lw=1, ls=":", label=f"tolerance, {tolerance:g}")
    axes.axvline(full / size, color=_NEEDLE, lw=1, label="full cache")
    axes.set_yscale("symlog", linthresh=1e-4)
    drawn = [tolerance, *(nats for points in curves.values() for _, nats in points)]
    axes.set_ylim(min(drawn) / 2 if min(drawn) > 2e-4 else 0, 2 * max(drawn) or 1e-4)
    axes.set_xlim(0, None)
    axes.set_xlabel(f"keys and values held at the end, {unit}")
    axes.set_ylabel("KL(full || evicted), nats per token")
    axes.grid(alpha=0.3)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, wrap=True)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return figure


def draw_text(
    text: str, spans: Sequence[tuple[int, int]], pages: Sequence[tuple[str, Tensor]], asked: Sequence[str], title: str
) -> Figure:
    """Draw a text once for each policy, for `kvpatch demo MODEL`: letters are the darker the more heads kept their token.

    Args:
        text: the text.
        spans: of its tokens, (start, stop) in characters.
        pages: a heading and the share [T] of heads that kept each token.
        asked: words to underline.
        title: shown above.
    """
    # break the text into lines, and find where in it each line begins
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH, drop_whitespace=False) or [""]]
    lines = [line.lstrip() for line in lines]
    numbered, begin = [], 0
    for number, line in enumerate(lines):
        begin = text.index(line, begin)
        numbered.append((number, begin, line))
        begin += len(line)
    depth, columns = -(-len(pages) // 2), min(len(pages), 2)
    size = _WIDTH * _LETTER, (len(lines) + 2) * _LINE
    figure = new_figure(figsize=(size[0] * columns + 0.5, size[1] * depth + 0.5), layout="constrained")
    grid = figure.subplots(depth, columns, squeeze=False).flatten()
    for axes, (heading, share_T) in zip(grid, pages, strict=False):
        axes.set(xlim=(0, _WIDTH), ylim=(len(lines), -1))
        axes.set_title(heading, loc="left", fontsize=9)
        shares = share_T.tolist()
        for number, start, line in numbered:
            for (a, b), share in zip(spans, shares, strict=True):
                if a < start + len(line) and b > start:
                    a, b = max(a, start), min(b, start + len(line))  # the part on this line
                    grey = str(round(0.88 * (1 - min(share / _DARKEST, 1)), 3))
                    look: dict[str, Any] = {"color": grey, "family": "monospace", "fontsize": _FONT, "va": "center"}
                    axes.text(a - start, number, text[a:b], parse_math=False, **look)  # a text may have dollars
            for word in asked:
                column = line.find(word)
                if column >= 0:
                    axes.hlines(number + 0.55, column, column + len(word), color=_ASKED, lw=1.2)
    for axes in grid:
        axes.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _point_at(axes: Axes, spans: Sequence[tuple[int, int]], colour: str, L: int) -> None:
    """Mark spans of the text on `axes`, a panel of `draw_panels` with L layers: a bar above each span, lines down its edges."""
    for start, stop in spans:
        x, y = [start - 0.5, stop - 0.5], -0.5 - 0.09 * L
        axes.plot(x, [y, y], color=colour, lw=4, solid_capstyle="butt", clip_on=False)
        axes.vlines(x, -0.5, L - 0.5, color=colour, lw=0.7)


def _write_legend(figure: Figure, marks: Marks, title: str) -> None:
    """Write the figure's title, for `draw_panels`, and below the panels a legend of the kinds of spans that are marked."""
    from matplotlib.lines import Line2D

    labels = (
        (marks.needles, _NEEDLE, "a needle"),
        (marks.asked, _ASKED, "the needle that is asked for"),
        (marks.question, _QUESTION, "the question"),
    )
    lines = [Line2D([], [], color=colour, lw=4, label=label) for spans, colour, label in labels if spans]
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    if lines:
        figure.legend(handles=lines, loc="outside lower left", ncols=len(lines), frameon=False, fontsize=9)


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a picture to the file that a user names, for `Report.plot` and commands; raise KVPatchError if that fails."""
    target = Path(path)
    if not target.parent.is_dir():
        raise KVPatchError(f"path={str(path)!r}: the folder {str(target.parent)!r} does not exist.")
    if target.is_dir():
        raise KVPatchError(f"path={str(path)!r} is a folder: give the name of a picture such as 'kept.png'.")
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise KVPatchError(f"path={str(path)!r} cannot be written: {error}") from error
