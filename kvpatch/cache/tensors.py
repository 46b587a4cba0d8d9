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
    """One such tensor, an attribute of SlotLayer that is None where nothing asks for it.

    Attributes:
        name: the attribute; its end says what the axes are, as in keep_BH1.
        dtypes: that it may have in a file.
        stepped: whether decode steps change it, by another tensor in its place, so that roll-back puts the old one back.
        missing: its number for texts that have none, where others that have some are joined with them; None if then none has.
        wanted: "evicting" if layers have it whose policy evicts, "weighing" if those may whose budget follows from scores.
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
        B, H = layer.positions.shape[:2]
        return torch.full(self.shape(B, H), self.missing or 0, device=layer.positions.device)

    def shape(self, B: int, H: int) -> tuple[int, ...]:
        """Return its shape."""
        return tuple({"B": B, "H": H, "1": 1}[axis] for axis in self.name.rpartition("_")[2])

    def may_be(self, settings: CacheSettings, layer: int, cuts: bool) -> bool:
        """Tell if a layer may have it. cuts: the policy has evicted from it."""
        return not self.wanted or (cuts and (self.wanted == "evicting" or settings.rules[layer].weighs))

    def must_be(self, cuts: bool) -> bool:
        """Tell if a layer has it in any case."""
        return cuts and self.wanted == "evicting"


HEAD_TENSORS = (
    HeadTensor("keep_BH1", (torch.int64,), wanted="evicting"),
    HeadTensor("lost_BH1", FLOATS[:2], stepped=True, wanted="weighing"),
    HeadTensor("mass_BH", FLOATS, missing=1.0),  # None: all of that prompt was kept
    HeadTensor("unfitted_BH", (torch.int64,), missing=0),
)
