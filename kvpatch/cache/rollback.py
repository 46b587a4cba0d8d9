"""What decode steps overwrote, so that they can be rolled back exactly: assisted decoding takes back what it drafted."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .modes import Mode
from .slots import Slots

JOURNAL = 256  # decode steps that can be rolled back while recording: longer than any draft


class Recorded(Protocol):
    """A layer, as far as a decode step overwrites it (cache/layer.py describes the fields)."""

    mode: Mode
    used: int
    positions: Tensor
    state: dict[str, Tensor]
    kv: Slots

    def free_rows(self) -> Tensor: ...


@dataclass
class Undo:
    """What one decode step overwrote."""

    used: int
    mode: Mode
    slot: tuple[Tensor, Tensor] | None
    positions: Tensor
    state: dict[str, Tensor]
    shared: Tensor | None


def record(layer: Recorded, shared: Tensor | None) -> Undo:
    """What the coming step of `layer` will overwrite."""
    slot = None
    if layer.mode.slotted:
        slot = layer.kv.read_at(layer.free_rows())
    state = {name: tensor.clone() for name, tensor in layer.state.items()}
    shared = None if shared is None else shared.clone()
    positions = layer.positions.clone()
    return Undo(layer.used, copy(layer.mode), slot, positions, state, shared)


def restore(layer: Recorded, undo: Undo) -> Tensor | None:
    """Put `layer` back to where it stood, and return the shared score that stood then."""
    # buffers have grown since, or have been cut to what an earlier roll-back left in them: what was cut off was empty
    C = min(undo.positions.shape[-1], layer.positions.shape[-1])
    layer.mode = undo.mode
    layer.used = layer.positions.shape[-1] if undo.mode.slotted else undo.used
    layer.positions[:, :, :C], layer.positions[:, :, C:] = undo.positions[:, :, :C], -1
    for name, tensor in undo.state.items():
        layer.state[name][:, :, :C] = tensor[:, :, :C]
    if undo.slot is not None:
        layer.kv.write_at(layer.free_rows(), *undo.slot)
    return undo.shared
