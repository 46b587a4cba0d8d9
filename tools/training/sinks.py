"""Sinks: heads that rest on the first token while they have nothing to do, and get no value from it.

Rows of backcopies (tasks.py) give heads nothing to do at most tokens [Guo et al. 2024]. That alone makes few sinks in so few
steps, so that `Busy` makes it costly to write at every token. `measure` says which heads of a model rest on <bos>.

Dimension key: B rows, T tokens, L layers, N query heads, H heads of keys and values, D head size, E width.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpatch.arch import adapter_of
from tools.training import tasks

ATTENTION, VALUE, SHARE = 0.3, 0.25, 1 / 3
"""A sink gets more of a head's attention than the first, and its value is smaller than the second, as a share of the median
token's. A model has sinks where that holds in this share of its heads or more."""

ROWS, AFTER = 16, 64
"""Rows of recall that are measured, and the position from which on their queries count."""

Figures = dict[str, list[Any]]


class Busy:
    """How much heads write, beside what the values that they hold would let them write: watches a model until it is removed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.heads: int = model.config.num_attention_heads
        self.read: list[Tensor] = []
        self.cache = DynamicCache()
        self.hooks = [
            getattr(module, adapter.projection).register_forward_pre_hook(lambda _, args: self.read.append(args[0]))
            for module in model.modules()
            if (adapter := adapter_of(module)) is not None and adapter.projection is not None
        ]

    def new_cache(self) -> DynamicCache:
        """For the next forward pass, whose values are then known."""
        self.read.clear()
        self.cache = DynamicCache()
        return self.cache

    def penalty(self) -> Tensor:
        """Of that forward pass the mean norm of a head's output over the geometric mean of its values' norms; mean over heads.

        The first token counts on neither side: it sees itself alone, and its value may be small at no cost. Values that are
        small elsewhere save nothing.
        """
        o_LBTN = torch.stack([o_BTE.float().unflatten(-1, (self.heads, -1)).norm(dim=-1) for o_BTE in self.read])
        v_LBHT = torch.stack([layer.values.float().norm(dim=-1) for layer in self.cache.layers])
        v_LH = v_LBHT[..., 1:].clamp_min(1e-6).log().mean((1, 3)).exp()
        v_LN = v_LH.repeat_interleave(self.heads // v_LH.shape[1], 1)
        return (o_LBTN[:, :, 1:].mean((1, 2)) / v_LN).mean()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


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
