"""Decode steps as CUDA graphs of our own: the model's uncompiled step is captured once, and replayed over tokens and prompts.

A captured step reads and changes tensors by address, so it must be one that holds in tensors all that changes from step to
step: the step that torch.compile traces (cache/compiled.py). Its cache's tensors stay where they are. The next prompt's cache,
if it has the same shapes and facts, is copied into them and lives there from then on; another gets a capture of its own.
Slots are rounded up to classes (capacity.py), so that prompts of similar lengths have the same shapes.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..arch.upstream import cache_argument
from ..cache import compiled
from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..policies.served import refuse
from . import ownership
from .capacity import round_capacities
from .state import PatchState

_LOG = logging.getLogger(__name__)
KINDS = 4  # of steps whose graphs are kept: each holds a cache's memory, and under a share of the prompt every class is a kind
COUNTS = ("seen", "floor", "slack", "grown", "steps")  # a traced step reads none of these numbers
NO_DEVICE = (
    "patch.graph() captures steps in CUDA graphs, and {}. Call the model itself, or compile its step: "
    "torch.compile(model.forward) over a cache of patch.new_cache(room=...)."
)
Place = tuple[dict[str, Any], str]


class Recorder(Protocol):
    """Recorder of one step, which it can repeat."""

    def capture(self, run: Callable[[], None]) -> None:
        """Record what `run` asks of the device. Nothing of it is carried out."""

    def replay(self) -> None:
        """Carry it out, on the same memory."""


class CudaRecorder(Recorder):
    """A CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], None]) -> None:
        with torch.cuda.device(self.device), torch.cuda.graph(self.graph):
            run()

    def replay(self) -> None:
        self.graph.replay()


class _Captured:
    """A captured step, and the memory that it works on.

    tensors: of the cache that lives there, in the order of its places. owner: that cache. left: steps until something must be
    looked at that the host counts. ids, logits: of the step.
    """

    def __init__(self, recorder: Recorder, cache: EvictingCache, ids_B1: Tensor) -> None:
        self.recorder, self.tensors = recorder, [holder[name] for holder, name in _places(cache)]
        self.owner, self.ids_B1 = weakref.ref(cache), ids_B1.clone()
        self.logits: Tensor  # from the capture on
        self.left = 0

    def goes_on(self, ids_B1: Tensor, cache: EvictingCache) -> bool:
        """Tell if the next step can follow without a look at the cache, since nobody has looked since the last replay."""
        return self.left > 0 and cache.counters.behind and self.owner() is cache and ids_B1.shape == self.ids_B1.shape

    def holds(self, cache: EvictingCache) -> bool:
        """Tell if the cache's tensors are those of the graph."""
        pairs = zip(_places(cache), self.tensors, strict=True)
        return self.owner() is cache and all(holder[name] is tensor for (holder, name), tensor in pairs)

    def take_in(self, cache: EvictingCache) -> None:
        """Copy a cache into the memory of the graph, where it lives from now on; whoever lived there gets memory of its own."""
        before = self.owner()
        if before is not None and before is not cache:
            before.drop_stack(due=before.stack is not None)
            for holder, name in _places(before):
                if any(holder[name] is tensor for tensor in self.tensors):
                    holder[name] = holder[name].clone()
        cache.drop_stack(due=cache.stack is not None)  # its layers' tensors were views of the stack's
        for (holder, name), tensor in zip(_places(cache), self.tensors, strict=True):
            if holder[name] is not tensor:
                tensor.copy_(holder[name])
                holder[name] = tensor
        self.owner = weakref.ref(cache)


class StepGraph:
    """Decode steps of a patched model by graphs: `step(ids [B,1], cache)` returns the logits [B,1,V] of the next token.

    The logits are overwritten by the next step. A step that cannot be captured (cache/compiled.py can_trace: buffers that will
    move, renumbered positions, joined rows, roll-back) is an ordinary call of the model, and so are all once a capture failed.
    The graphs of the KINDS kinds of steps that ran last are kept, with the memory that they work on.

    captures: graphs so far; replays: steps that one of them ran.
    """

    def __init__(self, model: nn.Module, state: PatchState, make: Callable[[torch.device], Recorder] = CudaRecorder) -> None:
        self.model, self.state, self.make = model, state, make
        self.cache_name = cache_argument(type(model).forward if isinstance(model, nn.Module) else model)
        self.captures = self.replays = 0
        self._known: OrderedDict[object, _Captured | None] = OrderedDict()  # the one used last at the end
        self._failed = False
        self._newest: _Captured | None = None

    def __call__(self, ids_B1: Tensor, cache: EvictingCache) -> Tensor:
        """Feed one token of each row to the cache."""
        with torch.inference_mode(False), torch.no_grad():
            captured = self._captured(ids_B1, cache)
            if captured is None:
                return self._run(ids_B1, cache)
            captured.ids_B1.copy_(ids_B1)
            captured.recorder.replay()
            cache.counters.behind, captured.left, self.replays = True, captured.left - 1, self.replays + 1
            return captured.logits

    def _captured(self, ids_B1: Tensor, cache: EvictingCache) -> _Captured | None:
        """Return the graph that runs this step, its memory being the cache's; None for the first step of each kind."""
        newest = self._newest
        if newest is not None and newest.goes_on(ids_B1, cache):
            return newest
        ownership.check(cache, self.state)
        cache.catch_up()
        left = 0 if self._failed else self._steps(cache, ids_B1)
        if not left:
            return None
        round_capacities(cache)
        kind = (ids_B1.shape, ids_B1.dtype, ids_B1.device, _facts(cache))
        if kind not in self._known:  # the first step compiles and loads what a capture may not
            self._known[kind] = None
            while len(self._known) > KINDS:
                self._known.popitem(last=False)
            return None
        self._known.move_to_end(kind)
        captured = self._known[kind]
        if captured is None:
            try:
                captured = self._known[kind] = self._capture(ids_B1, cache)
            except RuntimeError as error:  # such as of a model that reads a value on the host
                del self._known[kind]
                self._failed = True
                _LOG.warning(f"[kvpatch] No step of this model can be captured, so it runs them all itself: {error}")
                return None
        elif not captured.holds(cache):
            captured.take_in(cache)
        captured.left, self._newest = left, captured
        return captured

    def _capture(self, ids_B1: Tensor, cache: EvictingCache) -> _Captured:
        cache.drop_stack(due=cache.stack is not None)
        captured = _Captured(self.make(ids_B1.device), cache, ids_B1)

        def run() -> None:
            captured.logits = self._run(captured.ids_B1, cache)

        captured.recorder.capture(run)
        self.captures += 1
        return captured

    def _run(self, ids_B1: Tensor, cache: EvictingCache) -> Tensor:
        """Call the model, with everything that changes from step to step in tensors if it can be."""
        call: dict[str, Any] = {self.cache_name: cache, "use_cache": True}
        capturing = self._steps(cache, ids_B1) > 0
        if capturing and "position_ids" in self.state.decoder_parameters:
            call["position_ids"] = _positions(cache, len(ids_B1))
        self.state.capturing = capturing
        try:
            return self.model(input_ids=ids_B1, **call).logits
        finally:
            self.state.capturing = False

    def _steps(self, cache: EvictingCache, ids_B1: Tensor) -> int:
        """Return the number of coming steps that leave all their changes in tensors: until buffers move or positions end."""
        own = cache.settings.renumbered or cache.rows.joined
        if own or ids_B1.ndim != 2 or not compiled.can_trace(cache, *ids_B1.shape):
            return 0
        left = [layer.mode.room for layer in cache.layers]
        if self.state.max_positions is not None:
            left.append(self.state.max_positions - cache.seen)
        return max(min(left, default=sys.maxsize), 0)


def graph(model: nn.Module, state: PatchState, device: torch.device) -> StepGraph:
    """Make the StepGraph of a model on a CUDA device.

    Raises:
        KVPatchError: there is none, the model is on several, it is a hybrid, or it takes no position_ids.
    """
    refuse("graph()", state.settings.combine(untold=state.places_itself))
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise KVPatchError(NO_DEVICE.format(f"a graph is of one device, but this model is on {', '.join(sorted(devices))}"))
    if not torch.cuda.is_available():
        raise KVPatchError(NO_DEVICE.format("torch finds no CUDA device here"))
    if device.type != "cuda":
        raise KVPatchError(NO_DEVICE.format(f"this model is on {device}"))
    return StepGraph(model, state)


def _positions(cache: EvictingCache, B: int) -> Tensor:
    """Return the positions [B,1] that the model would give the next token, which it would work out of a Python number."""
    if not cache.rows.by_columns:
        return cache.next_positions()
    return cache.counters.tensors.columns.expand(B, 1).clone()


def _places(cache: EvictingCache) -> list[Place]:
    """Return where the cache's tensors stand, in an order that caches of the same facts share."""
    return [(holder, name) for holder in compiled.holders(cache) for name in sorted(holder) if isinstance(holder[name], Tensor)]


def _facts(cache: EvictingCache) -> object:
    """Return what a captured step takes for constant: shapes and strides, and all plain values but counts."""
    found: list[object] = [type(layer.mode) for layer in cache.layers]
    for holder in compiled.holders(cache):
        for name in sorted(holder):
            value = holder[name]
            if isinstance(value, Tensor):
                found.append((name, tuple(value.shape), value.stride(), value.dtype, value.device))
            elif name == "filling":
                found.append((name, value > 0))
            elif isinstance(value, bool | int | float | str) and name not in COUNTS and holder is not vars(cache):
                found.append((name, value))
    return tuple(found)
