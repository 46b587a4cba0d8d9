"""States of a hybrid's other layers (linear attention, state spaces, convolutions), in transformers' own cache layers.

Such a state does not grow with the text, so that no budget applies to it: it is carried along with the rows of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from ..arch.upstream import LinearAttentionLayer


@dataclass(frozen=True)
class Stack:
    """Numbers of the layers of a hybrid decoder that keep something of the text.

    attention: of the layers with keys and values, which are on the budget. states: of each layer with a state, and how many
    pairs of a convolution's and a recurrence's state it has; a layer may have both. croppable: the states are of convolutions
    alone, so that the last tokens can be taken back. readers: of each layer without keys of its own, and of the layer before
    it whose keys it uses.
    """

    attention: tuple[int, ...]
    states: tuple[tuple[int, int], ...]
    croppable: bool = False
    readers: tuple[tuple[int, int], ...] = ()

    def first(self, count: int) -> Stack:
        """Return the Stack (table of the layers with keys or states) of a decoder that drafts with its first `count` layers."""
        attention = tuple(number for number in self.attention if number < count)
        # pairs: of a layer's number, and its count of states or the number of the layer whose keys it uses
        states, readers = (tuple(pair for pair in pairs if pair[0] < count) for pairs in (self.states, self.readers))
        return Stack(attention, states, self.croppable, readers)


class RecurrentStates(Cache):
    """States of a batch. `layers` has None for a layer without a state, and is empty if the model is no hybrid.

    Models find a state by the number of its layer in the decoder.
    """

    layers: list[LinearAttentionLayer | None]  # type: ignore[assignment]

    def __init__(self, stack: Stack | None) -> None:
        """Make empty states for the layers that `stack` lists, for a new text; None if the model is no hybrid."""
        self.layer_numbers, found = stack, dict(() if stack is None else stack.states)
        layers = {number: LinearAttentionLayer(number_of_states=count) for number, count in found.items()}
        super().__init__(layers=[layers.get(number) for number in range(max(found, default=-1) + 1)])  # type: ignore[misc]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a state."""
        return tuple(number for number, layer in enumerate(self.layers) if layer is not None)

    def _list_held(self) -> Iterator[tuple[str, dict[int, Any], int]]:
        """Yield a recurrent state's name, the dictionary of transformers' layer that holds it, and its key, to read or set.

        `tensors`, `map_rows` and `kept` iterate over it.
        """
        for number in self.numbers:
            for kind in ("conv_states", "recurrent_states"):
                table = getattr(self.layers[number], kind)
                yield from ((f"{number}.{kind}.{key}", table, key) for key, state in table.items() if state is not None)

    def tensors(self) -> dict[str, Tensor]:
        """Return all states by name: the layer's number, conv_states or recurrent_states, and which of several."""
        return {name: table[key] for name, table, key in self._list_held()}

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.tensors().values())

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every state; its first axis is the batch."""
        for _, table, key in self._list_held():
            table[key] = change(table[key])

    def end_pass(self) -> None:
        """Detach the states from the autograd graph of this pass."""
        self.map_rows(lambda state: state.detach() if state.requires_grad else state)

    def copy_sharing(self) -> RecurrentStates:
        """Return a copy that shares all tensors; `map_rows` then gives the copy tensors of its own."""
        new = copy.copy(self)
        new.layers = [None if layer is None else _copy_sharing(layer) for layer in self.layers]
        return new

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run a block that reads a chunk of the prompt a second time, and put all states back as they were."""
        with torch.inference_mode(False):
            before = {name: state.clone() for name, state in self.tensors().items()}
        try:
            yield
        finally:
            for name, table, key in self._list_held():
                table[key] = before[name]

    def join(self, parts: Sequence[RecurrentStates]) -> None:
        """Fill these empty states with the rows of several others."""
        states = [part._trim_states() for part in parts]
        self.fill_states({name: torch.cat([one[name] for one in states]) for name in states[0]})

    def _trim_states(self) -> dict[str, Tensor]:
        """Return all states by name in a new dict, for `join`; those of convolutions have the kernel's width.

        The layers' own are longer where pasts are recorded for crop(), and shorter after a text of few tokens.
        """
        states = self.tensors()
        for number in self.numbers:
            layer: Any = self.layers[number]
            for key, width in layer.conv_kernel_size.items():
                name = f"{number}.conv_states.{key}"
                if name in states:
                    states[name] = F.pad(states[name], (max(width - states[name].shape[-1], 0), 0))[..., -width:]
        return states

    def fill_states(self, tensors: dict[str, Tensor]) -> None:
        """Write states into this empty object, by name as `tensors` returns them; for `join` and loading (`_restore_cache`)."""
        for name, state in tensors.items():
            number, kind, key = name.split(".")
            layer: Any = self.layers[int(number)]
            write = layer.update_conv_state if kind == "conv_states" else layer.update_recurrent_state
            write(state, int(key))

    def place(self, devices: dict[int, torch.device]) -> None:
        """Move the state of each layer to its device, for a loaded cache. devices: by the layer's number in the decoder."""
        for name, table, key in self._list_held():
            table[key] = table[key].to(devices[int(name.split(".")[0])])

    # ---- roll-back ----

    def activate_past_recording(self) -> None:
        """Let convolutions record their past, for crop(), unless the model also has recurrences, which cannot be taken back."""
        if self.layer_numbers is not None and self.layer_numbers.croppable:
            super().activate_past_recording()

    def stop_past_recording(self) -> None:
        """Record no longer, and give the states of convolutions the kernel's width again; for `WithStates`."""
        if not any(self.layers[number].record_past for number in self.numbers):  # type: ignore[union-attr]
            return
        trimmed = self._trim_states()
        with torch.inference_mode(False):
            for name, table, key in self._list_held():
                table[key] = trimmed[name].clone()  # not a view, which would hold what was recorded
        for number in self.numbers:
            self.layers[number].record_past = False  # type: ignore[union-attr]

    def can_crop(self, count: int, seen: int) -> bool:
        """Tell if the last `count` of the tokens seen can be taken back."""
        return all(_can_crop(self.layers[number], count, seen) for number in self.numbers)

    def crop(self, count: int) -> None:
        """Take back the last `count` tokens."""
        for number in self.numbers:
            self.layers[number].crop(-count)  # type: ignore[union-attr]


def _copy_sharing(layer: LinearAttentionLayer) -> LinearAttentionLayer:
    """Return a copy of one layer for `RecurrentStates.copy_sharing`: in dictionaries of its own, but with the same tensors."""
    new = copy.copy(layer)
    vars(new).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    return new


def _can_crop(layer: Any, count: int, seen: int) -> bool:
    """Tell `RecurrentStates.can_crop` if a layer's convolutions have recorded enough inputs to take back `count` tokens.

    As many columns as the kernel is wide, or as there are tokens, must be left.
    """
    if not layer.record_past or not layer.is_croppable:
        return False
    return all(
        state.shape[-1] - count >= min(layer.conv_kernel_size[key], seen - count) for key, state in layer.conv_states.items()
    )


class WithStates(Cache):
    """Base of a hybrid's caches: a model's calls about its layers with a state are handed on to `states`."""

    states: RecurrentStates

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the state of a convolution, or None before the first token."""
        return self.states.get_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the state of a recurrence, or None before the first token."""
        return self.states.get_recurrent_state(*args, **kwargs)

    @torch.inference_mode(False)
    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Write new columns of a convolution's input; return the state followed by them, allocated outside inference mode."""
        return self.states.update_conv_state(*args, **kwargs)

    @torch.inference_mode(False)
    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Write the new state of a recurrence; allocated outside inference mode."""
        return self.states.update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Tell if a layer has a state."""
        return self.states.has_previous_state(*args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Tell if a convolution records its past."""
        return self.states.is_recording_past(layer_idx)

    def activate_past_recording(self) -> None:
        """Record what roll-back needs, from now on."""
        super().activate_past_recording()
        self.states.activate_past_recording()

    def stop_past_recording(self) -> None:
        """Record no longer what roll-back needs. `_finish` calls it as assisted decoding ends, which began the recording."""
        for layer in self.layers:
            layer.record_past = False  # type: ignore[union-attr]
        self.states.stop_past_recording()
