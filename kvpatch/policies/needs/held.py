"""Keys and values of the tokens that a layer holds, read where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..context import EvictionContext
from .base import Need


@dataclass(frozen=True)
class Held(Need[tuple[Tensor, Tensor]]):
    """Keys and values of all slots: context.view(Held) returns both [B,H,T,D]; those of empty slots may be anything."""

    def view(self, context: EvictionContext) -> tuple[Tensor, Tensor]:
        return context.layer_read.held()


@dataclass(frozen=True)
class PlainKeys(Need[Tensor]):
    """Keys without their rotation: context.view(PlainKeys) returns them [B,H,T,D], in the scores' dtype."""

    @property
    def lookahead(self) -> int:
        return 0

    @property
    def refuses(self) -> Mapping[str, str]:
        return ROTATED

    def view(self, context: EvictionContext) -> Tensor:
        return context.layer_read.plain_keys()


ROTATED = {
    "renumbered": "which undoes rotations at original positions",
    "vllm": "it undoes rotations, for which vLLM has no table: use 'key_diff' or 'key_norm'",
}
"""Refusals of needs that undo rotations."""
