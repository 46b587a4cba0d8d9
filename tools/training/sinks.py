"""Sinks: how much attention goes to the first token, and how small is its value?

Dimension key: B rows, T tokens, L layers, H heads that hold keys and values, G query heads of each, D head size, E width.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tools.training import tasks

AFTER = 64
"""Queries from this position on are looked at."""


@torch.no_grad()
def sinks(model: PreTrainedModel, tokens_BT: Tensor) -> dict[str, Tensor]:
    """attention [L,H*G], the mean share of it that the first token gets from position AFTER on; value [L,H], the norm of the first
    token's value against the median of all tokens'; residual [L+1], the same of what enters each layer and leaves the last."""
    model.set_attn_implementation("eager")
    out = model(tokens_BT, past_key_values=DynamicCache(), use_cache=True, output_attentions=True, output_hidden_states=True)
    model.set_attn_implementation("sdpa")

    def ratio(x: Tensor) -> Tensor:
        """Norms [B,...,T,E] of the first token over the median, means over rows."""
        norm = x.norm(dim=-1)
        return (norm[..., 0] / norm.median(-1).values).mean(0)

    return {
        "attention": torch.stack([a_BHTT[:, :, AFTER:, 0].mean((0, 2)) for a_BHTT in out.attentions]),
        "value": torch.stack([ratio(layer.values) for layer in out.past_key_values.layers]),
        "residual": torch.stack([ratio(hidden_BTE) for hidden_BTE in out.hidden_states]),
    }


def show(model):
    found = sinks(model, tasks.recall(random.Random(1234), 16).tokens_BT)
    g = found["attention"].shape[1] // found["value"].shape[1]
    v = found["value"].repeat_interleave(g, 1)
    real = ((found["attention"] > 0.3) & (v < 0.25)).float().mean().item()
    for l in range(len(v)):
        print("  layer", l, "att", [f"{x:.2f}" for x in found["attention"][l]], "val", [f"{x:.2f}" for x in v[l]])
    print("  residual", [f"{x:.2f}" for x in found["residual"]], "att>.3", (found["attention"]>.3).float().mean().item(), "real", real, flush=True)
    return real
