"""One attention module as the core sees it: the adapter's answers, for this module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..backends.protocol import Geometry
from .adapter import Adapter


@contextmanager
def _evaluating(attn: nn.Module) -> Iterator[None]:
    training = [module for module in attn.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Site:
    """A module and its adapter. H is the module's number of KV heads."""

    def __init__(self, adapter: Adapter, attn: Any, H: int) -> None:
        self.adapter, self.attn, self.H = adapter, attn, H

    def geometry(self, device: torch.device) -> Geometry:
        """How the layer attends."""
        slopes = self.adapter.slopes(self.attn)
        if slopes is not None:
            slopes = slopes.to(device).unflatten(0, (self.H, -1))
        sinks = self.adapter.sinks(self.attn)
        if sinks is not None:
            sinks = sinks.to(device).unflatten(0, (self.H, -1))
            sinks = sinks if torch.is_grad_enabled() else sinks.detach()
        return Geometry(
            self.adapter.scale(self.attn), slopes, self.adapter.sliding(self.attn), self.adapter.softcap(self.attn), sinks
        )

    def rotate(self, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Keys or queries with the positions `places` applied."""
        return self.adapter.rotate(self.attn, x_BHTD, places_BHT, table)

    def output_rows(self, like: Tensor, group: int) -> tuple[Tensor, bool]:
        """The rows of the output projection that belong to each query head [H,G,D,E], without the bias, and whether they had
        to be worked out. `like`: the values.

        A plain projection shows its weight; of any other (LoRA, quantized, offloaded) it is asked what it does to unit
        vectors.
        """
        module = getattr(self.attn, self.adapter.projection) if self.adapter.projection else None
        inputs, worked_out = self.H * group * like.shape[-1], False
        if type(module) is nn.Linear and not hasattr(module, "_hf_hook"):
            weight = module.weight.T
        elif type(module) is Conv1D and not hasattr(module, "_hf_hook"):
            weight = module.weight
        else:
            unit, worked_out = torch.eye(inputs, dtype=like.dtype, device=like.device)[None], True
            run = module if module is not None else lambda y: self.adapter.output(self.attn, y)
            with _evaluating(self.attn):  # a dropout on the way is no part of the weight
                weight = (run(unit) - run(torch.zeros_like(unit[:, :1])))[0]
        return rearrange(weight.detach(), "(h g d) e -> h g d e", h=self.H, g=group), worked_out
