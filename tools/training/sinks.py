"""Sinks: heads that rest on the first token while they have nothing to do, and get no value from it.

Rows of backcopies (tasks.py) give heads nothing to do at most tokens [Guo et al. 2024]. That alone makes few sinks in so few
steps, so that `penalty` makes it costly to write at every token. `measure` says which heads of a model rest on <bos>.

Dimension key: B rows, T tokens, L layers, N query heads, H heads of keys and values, D head size, E width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tools.training import tasks

ATTENTION, VALUE, SHARE = 0.3, 0.25, 1 / 3
"""A sink gets more of a head's attention than the first, and its value is smaller than the second, as a share of the median
token's. A model has sinks where that holds in this share of its heads or more."""

BUSY = 0.2
"""The share of a head's attention that other tokens than the first may get in training at no cost."""

ROWS, AFTER = 16, 64
"""Rows of recall that are measured, and the position from which on their queries count."""

Figures = dict[str, list[Any]]


def penalty(attention_LBNTT: Sequence[Tensor], values_LBHTD: Sequence[Tensor]) -> Tensor:
    """Mean over heads of how far they write above BUSY, if every value but the first token's had the size of the median.

    Of a query that is its attention to other tokens, and its attention to the first times the size of that one's value beside
    the median. So no size of other tokens' values, large or small, saves anything: a head must rest on the first token, whose
    value must be small. Below BUSY there is nothing to save, or heads would never look at anything. The first token's own
    query does not count: it sees itself alone.
    """
    found = []
    for a_BNTT, v_BHTD in zip(attention_LBNTT, values_LBHTD, strict=True):
        v_BHT = v_BHTD.float().norm(dim=-1)
        first_BH = v_BHT[..., 0] / v_BHT[..., 1:].detach().median(-1).values
        first_BN1 = first_BH.repeat_interleave(a_BNTT.shape[1] // v_BHT.shape[1], 1)[..., None]
        on_first_BNT = a_BNTT[:, :, 1:, 0].float()
        found.append((1 - on_first_BNT + on_first_BNT * first_BN1).mean((0, 2)))
    return (torch.stack(found) - BUSY).relu().mean()


@torch.no_grad()
def measure(model: PreTrainedModel, rows: int = ROWS) -> Figures:
    """What a card reports, on rows of recall.

    attention [L][N]: the mean share of a head's attention that the first token gets from position AFTER on. value [L][H]: the
    norm of the first token's value over the median of all tokens' values. residual [L + 1]: the same of what enters each layer,
    and of what leaves the last one's norm.
    """
    tokens_BT = tasks.recall(random.Random(1234), rows).tokens_BT.to(model.device)
    model.set_attn_implementation("eager")
    out = model(tokens_BT, past_key_values=DynamicCache(), use_cache=True, output_attentions=True, output_hidden_states=True)
    model.set_attn_implementation("sdpa")

    def over_median(x: Tensor) -> list[Any]:
        """Of norms [B,...,T] the first token's over the median, means over rows."""
        norm = x.norm(dim=-1)
        return _rounded((norm[..., 0] / norm.median(-1).values).mean(0))

    return {
        "attention": [_rounded(a_BNTT[:, :, AFTER:, 0].mean((0, 2))) for a_BNTT in out.attentions],
        "value": [over_median(layer.values) for layer in out.past_key_values.layers],
        "residual": [over_median(hidden_BTE) for hidden_BTE in out.hidden_states],
    }


def _rounded(x: Tensor) -> Any:
    """As JSON has it."""
    return [round(value, 3) for value in x.tolist()] if x.ndim else round(x.item(), 3)


def by_head(found: Figures) -> list[tuple[float, float]]:
    """Attention on the first token, and the size of its value, of every query head."""
    return [
        (a, values[i * len(values) // len(attention)])
        for attention, values in zip(found["attention"], found["value"], strict=True)
        for i, a in enumerate(attention)
    ]


def is_sink(attention: float, value: float) -> bool:
    return attention > ATTENTION and value < VALUE


def share(found: Figures) -> float:
    """Of all query heads those whose first token is a sink."""
    heads = by_head(found)
    return sum(is_sink(*head) for head in heads) / len(heads)
