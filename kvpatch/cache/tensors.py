"""Tensors that a layer has one number of for each KV head: a row each, from which their moves, files and checks follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .settings import CacheSettings

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class HeadTensor:
    """Description of a tensor with a number for each KV head: an attribute of SlotLayer, None in layers that need none.

    Attributes:
        name: the attribute; its end says what the axes are, as in keep_BH1.
        dtypes: the dtypes that it may have in a file.
        stepped: True if decode steps change it, by another tensor in its place, so that roll-back puts the old one back.
        missing: the number that stands for it in a text without it, if that is joined with texts that have it; None: the
            joined text has none either.
        wanted: "evicting" if each layer whose policy evicts has it, "weighing" if layers may have it whose budget follows from
            scores; "": any layer may have it.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    stepped: bool = False
    missing: float | None = None
    wanted: str = ""

    def join(self, layers: Sequence[Any]) -> Tensor | None:
        """For `_join_layer`: return this tensor, a number per KV head, of all rows. layers: the same of each cache.

        None if no layer has it, or if some layer lacks it and no number stands for it (`missing`).
        """
        tensors = [getattr(layer, self.name) for layer in layers]
        if all(tensor is None for tensor in tensors) or (self.missing is None and any(tensor is None for tensor in tensors)):
            return None
        return torch.cat(
            [self._fill_missing(layer) if tensor is None else tensor for tensor, layer in zip(tensors, layers, strict=True)]
        )

    def _fill_missing(self, layer: Any) -> Tensor:
        """Return the tensor of a layer that lacks it, filled with `missing`, for `join`."""
        B, H = layer.positions.shape[:2]
        return torch.full(self.shape(B, H), self.missing or 0, device=layer.positions.device)

    def shape(self, B: int, H: int) -> tuple[int, ...]:
        """Return the tensor's shape for B rows and H KV heads, by the letters at the end of its name: keep_BH1 has [B,H,1]."""
        return tuple({"B": B, "H": H, "1": 1}[axis] for axis in self.name.rpartition("_")[2])

    def may_be(self, settings: CacheSettings, layer: int, cuts: bool) -> bool:
        """Tell the check of a file if a layer may have this tensor. cuts: the layer may evict, and a prompt has ended."""
        return not self.wanted or (cuts and (self.wanted == "evicting" or settings.rules[layer].weighs))

    def must_be(self, cuts: bool) -> bool:
        """Tell the check of a file if a layer has this tensor in any case. cuts: as in `may_be`."""
        return cuts and self.wanted == "evicting"


HEAD_TENSORS = (
    HeadTensor("keep_BH1", (torch.int64,), wanted="evicting"),
    HeadTensor("lost_BH1", FLOATS[:2], stepped=True, wanted="weighing"),
    HeadTensor("mass_BH", FLOATS, missing=1.0),  # None: all of that prompt was kept
    HeadTensor("unfitted_BH", (torch.int64,), missing=0),
)
