"""What reading costs where a stream's first token has gone: nats of filler, for which heads have nothing to look up.

Answers do not show it: a head that looks something up needs no sink while it does. StreamingLLM's paper measures language
modelling, and so does this, on contexts of filler that are read in blocks under a budget of so many tokens.
Dimension key: B rows, T tokens, C tokens that count.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.training import tasks

from .perplexity import nats
from .stats import Bootstrap
from .summary import markdown, shown
from .task import FULL, Setting

ROWS, LENGTH, COUNTED, BLOCK, BUDGETS = 16, 232, 168, 8, (24, 48)
POLICIES = ("window", "streaming_llm")
TEXT = """
StreamingLLM's paper measures language modelling, and so does this: nats of filler behind filler, in contexts of {length}
tokens that are read {block} at a time under a budget; the last {counted} count, {rows} rows. Differences: of a window from
the full cache, of `streaming_llm` from the full cache, and of `streaming_llm` from the window; below zero it is better.
"""


def rows_of(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Contexts without a question [B,T], and which of the counted tokens are filler behind filler [B,C]."""
    tokens_BT = tasks.needle(random.Random("reading"), rows, context=LENGTH, questions=0).tokens_BT
    filler_BT = (tokens_BT >= tasks.FILLER.start) & (tokens_BT < tasks.FILLER.stop)
    return tokens_BT, (filler_BT[:, 1:] & filler_BT[:, :-1])[:, -COUNTED:]


def measure(model: PreTrainedModel, setting: Setting, rows: int = ROWS) -> list[float]:
    """Of each row the mean."""
    tokens_BT, mask_BC = rows_of(rows)
    with setting.patched(model):
        nats_BC = nats(model, tokens_BT, COUNTED, "block")
    return [one[mask].mean().item() for one, mask in zip(nats_BC, mask_BC, strict=True)]


@cache
def found(name: str) -> dict[tuple[str, int], list[float]]:
    """Of a shipped model every row's mean by policy and budget; the full cache's budget is 0."""
    model, _ = tasks.load(name)
    torch.set_num_threads(1)
    cells = {(policy, k): Setting(policy, k, {"block": BLOCK}) for k in BUDGETS for policy in POLICIES}
    return {(FULL.policy, 0): measure(model, FULL)} | {cell: measure(model, setting) for cell, setting in cells.items()}


def table(groups: dict[str, Sequence[str]]) -> str:
    """A row per group and per model."""
    several = [(title, names) for title, names in groups.items() if names]
    several += [(name, (name,)) for names in groups.values() for name in names]
    rows = []
    for title, names in several:
        bootstrap = Bootstrap([(name.rpartition("-")[0], name) for name in names for _ in range(ROWS)])
        full, *others = (
            torch.tensor([nat for name in names for nat in found(name)[cell]], dtype=torch.double)
            for cell in ((FULL.policy, 0), *((policy, k) for k in BUDGETS for policy in POLICIES))
        )
        row = [title, shown(bootstrap.estimate(full.tolist()))]
        for window, streaming in zip(others[::2], others[1::2], strict=True):
            steps = (window - full, streaming - full, streaming - window)
            row += [shown(bootstrap.estimate(step.tolist()), signed=True) for step in steps]
        rows.append(row)
    columns = [f"{what}, {k} tokens" for k in BUDGETS for what in ("window", "`streaming_llm`", "`streaming_llm` less window")]
    return markdown(("", "full cache", *columns), rows)


def section(groups: dict[str, Sequence[str]]) -> str:
    """What is measured, and the table."""
    text = TEXT.strip().format(length=LENGTH, block=BLOCK, counted=COUNTED, rows=ROWS)
    return f"### Reading without the first token\n\n{text}\n\n{table(groups)}"
