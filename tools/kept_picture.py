"""Draws docs/kept.png, the picture of the README: `python -m tools.kept_picture`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from kvpatch import Report, patched, plotting
from kvpatch.evaluation.teacher_forcing import feed
from tools.training import tasks

DOCS = Path(__file__).parents[1] / "docs"
K = 0.2
POLICIES: dict[str, dict[str, Any]] = {
    "window": {},
    "streaming_llm": {},
    "h2o": {},
    "roco": {},
    "keyformer": {},
    "snapkv": {"window": 8},  # its 32 would fill the whole budget of so short a prompt
    "adakv": {"window": 8},
}
ROWS, SEED = 24, 7
WIDTH, DPI = 9.0, 150  # inches; shown at 900 pixels, a point is a pixel and a third


def draw(path: Path) -> None:
    """Measure every policy on 24 prompts, and draw what it keeps of the first one."""
    torch.set_num_threads(1)
    model, _ = tasks.load("llama-0")
    text = tasks.needle(random.Random(SEED), ROWS)
    rows = [_row(model, text, "full", 1.0, {}), *(_row(model, text, name, K, opts) for name, opts in POLICIES.items())]
    figure = plotting.new_figure(figsize=(WIDTH, 0.9 + 0.72 * len(rows)), layout="constrained")
    every = figure.subplots(len(rows), 1, sharex=True)
    for axes, (title, share_LT) in zip(every, rows, strict=True):
        L, T = share_LT.shape
        axes.imshow(share_LT.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_yticks([])
        axes.set_ylabel(f"{L} layers", fontsize=8)
        axes.set_title(title, loc="left", fontsize=10, pad=3)
        axes.tick_params(length=2, labelsize=8)
        for spans, colour in _marks(text):
            for start, stop in spans:
                axes.axvspan(start - 0.5, stop - 0.5, ymin=0, ymax=1, fill=False, ec=colour, lw=1.6)
        axes.set_xlim(-0.5, T - 0.5)
    every[-1].set_xlabel("token of the prompt", fontsize=9)
    _legend(figure)
    figure.savefig(path, dpi=DPI)


def _row(model: Any, text: tasks.Batch, policy: str, k: float, options: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """The title and the share of heads that keep each token of the first prompt, [L,T]."""
    n = text.prompt_length
    with patched(model, policy, k, **options):
        right = int(text.correct(feed(model, text.tokens_BT[:, :-1], n).logits_BSV.argmax(-1)).sum())
        report = Report.of(feed(model, text.prompt_BT[:1], n).cache)
    kept = report.kept().float().mean(1)
    what = "full cache" if policy == "full" else policy
    return f"{what}: {kept.mean():.0%} of the prompt kept, {right} of {ROWS} questions answered", kept


def _marks(text: tasks.Batch) -> list[tuple[list[tuple[int, int]], str]]:
    """Spans [start, stop) of the first prompt, and their colours."""
    row = text.tokens_BT[0].tolist()
    question = len(row) - 5  # the question's mark and its key, then three values
    facts = [(i, i + 4) for i in range(question) if row[i] in tasks.KEYS]
    asked = [span for span in facts if row[span[0]] == row[question + 1]]
    others = [span for span in facts if span not in asked]
    return [(others, "#8a8a8a"), (asked, "#d9480f"), ([(question, question + 2)], "#2b8a3e")]


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    labels = (("#8a8a8a", "a fact"), ("#d9480f", "the fact that is asked for"), ("#2b8a3e", "the question"))
    handles = [Patch(fill=False, ec=colour, lw=1.6, label=label) for colour, label in labels]
    handles.append(Patch(fc="#08306b", ec="0.6", label="kept by all heads"))
    handles.append(Patch(fc="white", ec="0.6", label="by none"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)


if __name__ == "__main__":
    draw(DOCS / "kept.png")
