"""The undo log: data overwritten by decode steps, to roll them back exactly. Assisted decoding takes back rejected drafts."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..policies.needs import Note
from .modes import Mode
from .slots import Slots
from .tensors import HEAD_TENSORS

UNDO_STEPS = 256  # decode steps that the undo log holds: more than any draft


class Recorded(Protocol):
    """A layer's fields that a decode step overwrites (cache/layer.py describes them)."""

    mode: Mode
    columns_used: int
    first_croppable: int
    positions: Tensor
    state: dict[str, Tensor]
    kv: Slots
    need_notes: dict[str, Note]

    def free_rows(self) -> Tensor:
        """Return the free slots as indices [B*H] into the rows of keys and values."""


@dataclass
class Undo:
    """Entry of the undo log: the data that one decode step overwrote.

    slot: key and value that the new token overwrote in each head. heads: the former tensors of `HeadTensor`s that steps
    replace. moved: columns [B,H,M] that an eviction of several tokens overwrote or emptied, with their keys and values.
    need_notes: the former ones, by name.
    """

    columns_used: int
    mode: Mode
    slot: tuple[Tensor, Tensor] | None
    positions: Tensor
    state: dict[str, Tensor]
    shared_score: Tensor | None
    heads: dict[str, Tensor | None]
    moved: tuple[Tensor, Tensor, Tensor] | None = None
    need_notes: dict[str, Any] = field(default_factory=dict)


def record_step(layer: Recorded, shared: Tensor | None) -> Undo:
    """For `SlotLayer.log_undo`: return what the coming decode step of `layer` will overwrite.

    Called before each step if `activate_past_recording()` was called. shared: the score that all layers share, or None.
    """
    # the stored key and value in each head's free slot, into which the step's token goes
    entries = None
    if layer.mode.fills_free_slots:
        entries = layer.kv.read_at(layer.free_rows())
    state = {name: tensor.clone() for name, tensor in layer.state.items()}
    shared = None if shared is None else shared.clone()
    positions = layer.positions.clone()
    # with a number per head; steps replace these tensors, so that no copy is needed
    head_tensors = {head_tensor.name: getattr(layer, head_tensor.name) for head_tensor in HEAD_TENSORS if head_tensor.stepped}
    return Undo(layer.columns_used, copy(layer.mode), entries, positions, state, shared, head_tensors)


def restore_step(layer: Recorded, undo: Undo) -> Tensor | None:
    """Restore `layer` to its state before the newest decode step, for `SlotLayer.crop`.

    Returns the score that all layers shared then, or None. undo: what `record_step` returned before that step.
    """
    # buffers have grown since, or an earlier rollback has shrunk them: the columns cut off were empty
    C = min(undo.positions.shape[-1], layer.positions.shape[-1])
    layer.mode = undo.mode
    for name, tensor in undo.heads.items():
        setattr(layer, name, tensor)
    layer.columns_used = layer.positions.shape[-1] if undo.mode.fills_free_slots else undo.columns_used
    layer.first_croppable = min(layer.first_croppable, layer.columns_used)
    layer.positions[:, :, :C], layer.positions[:, :, C:] = undo.positions[:, :, :C], -1
    for name, tensor in undo.state.items():
        layer.state[name][:, :, :C] = tensor[:, :, :C]
    if undo.slot is not None:
        layer.kv.write_at(layer.free_rows(), *undo.slot)
    # keys and values of columns that an eviction of several tokens overwrote or emptied
    if undo.moved is not None:
        columns, k, v = undo.moved
        layer.kv.write_at(layer.kv.rows_of(columns), k, v)
    for name, overwritten in undo.need_notes.items():  # what the policy remembers of the layer
        layer.need_notes[name].restore(overwritten)
    return undo.shared_score
