"""Decode steps as CUDA graphs of our own: the model's uncompiled step is captured once, and replayed over tokens and prompts.

A captured step reads and changes tensors by address, so it must be one that holds in tensors all that changes from step to
step: the step that torch.compile traces (cache/compiled.py). Its cache's tensors stay where they are. The next prompt's cache,
if it has the same shapes and facts, is copied into them and lives there from then on; another gets a capture of its own.
Slots are rounded up to classes (capacity.py), so that prompts of similar lengths have the same shapes.

generate() runs its steps by such graphs (generate_steps.py), and Patch.graph() gives them to loops of the user's own.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..arch.upstream import cache_argument
from ..attention.attend import is_autocasting
from ..cache import compiled
from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..policies.served import refuse
from . import ownership
from .capacity import round_capacities
from .recorder import CudaRecorder, Recorder, find_limit
from .state import NotCaptured, PatchState

_LOG = logging.getLogger(__name__)
KINDS = 16  # of steps whose graphs are kept: each holds a cache's memory, and under a share of the prompt every class is a kind
COUNTS = ("columns_read", "first_croppable", "slack", "grown", "steps")  # a traced step reads none of these numbers
NO_DEVICE = (
    "patch.graph() captures steps in CUDA graphs, and {}. Call the model itself, or compile its step: "
    "torch.compile(model.forward) over a cache of patch.new_cache(room=...)."
)
Place = tuple[dict[str, Any], str]
Inputs = dict[str, Tensor]


class _Captured:
    """A captured step, and the memory that it works on.

    tensors: of the cache that lives there, in the order of `_places`. owner: that cache. left: steps that can be replayed until
    the host must check the cache again. inputs, logits: of the step.
    """

    def __init__(self, recorder: Recorder, cache: EvictingCache, inputs: Inputs) -> None:
        """Note a cache's tensors, and copy a step's inputs to memory of their own, for `StepGraph._capture`."""
        self.recorder, self.tensors = recorder, [holder[name] for holder, name in _places(cache)]
        self.owner, self.inputs = weakref.ref(cache), {name: tensor.clone() for name, tensor in inputs.items()}
        self.logits: Tensor  # from the capture on
        self.seen_B = cache.seen_B  # any pass or change but a replay gives the cache another tensor
        self.left = 0  # replays until the cache must be checked again

    @property
    def nbytes(self) -> int:
        """Bytes of the cache's memory."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in self.tensors}
        return sum(storages.values())

    def goes_on(self, inputs: Inputs, cache: EvictingCache) -> bool:
        """Tell if the next step can be replayed without a check of the cache: nobody has read or changed it since the last."""
        alike = self.owner() is cache and cache.seen_B is self.seen_B and _shapes(inputs) == _shapes(self.inputs)
        untouched = self.left > 0 and cache.counters.has_uncounted_steps  # the latter is False once anyone reads the cache
        return untouched and alike and not is_autocasting(inputs["input_ids"].device.type)

    def holds(self, cache: EvictingCache) -> bool:
        """Tell, before a replay, if the cache's tensors are the ones that the graph works on."""
        pairs = zip(_places(cache), self.tensors, strict=True)
        return self.owner() is cache and all(holder[name] is tensor for (holder, name), tensor in pairs)

    def take_in(self, cache: EvictingCache) -> None:
        """Copy a cache's tensors into the graph's memory, for `_find_captured`; the cache that was there gets clones."""
        before = self.owner()
        if before is not None and before is not cache:
            before.unstack_layers(due=before.stacked)
            for holder, name in _places(before):  # where the cache's objects refer to tensors
                if any(holder[name] is tensor for tensor in self.tensors):
                    holder[name] = holder[name].clone()
        cache.unstack_layers(due=cache.stacked)  # a stack holds all layers' tensors as one
        for (holder, name), tensor in zip(_places(cache), self.tensors, strict=True):
            if holder[name] is not tensor:
                tensor.copy_(holder[name])
                holder[name] = tensor
        self.owner = weakref.ref(cache)

    def replay(self, inputs: Inputs, cache: EvictingCache) -> None:
        """Run the captured step on new inputs, for `step`. It advances counters on the device; the host's are marked stale."""
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        cache.counters.has_uncounted_steps, self.left = True, self.left - 1
        self.recorder.replay()


class StepGraph:
    """Decode steps of a patched model by graphs: `step(ids [B,1], cache)` returns the logits [B,1,V] of the next token.

    The logits are overwritten by the next step. A step that cannot be captured (cache/compiled.py can_trace: buffers that will
    move, renumbered positions, joined rows, roll-back, autocast) is an ordinary call of the model, and so are all once a
    capture failed. The graphs of the KINDS kinds of steps that ran last are kept, with the memory that they work on, as long
    as that is within `limit` bytes. captures: graphs so far; replays: steps that one of them ran.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        state: PatchState,
        make: Callable[[torch.device], Recorder] = CudaRecorder,
        limit: int = sys.maxsize,
    ) -> None:
        """Begin without a graph, for `graph` and `GenerateSteps._find_graph`. make: returns a device's Recorder of graphs."""
        self.model, self.state, self.make, self.limit = model, state, make, limit
        self.cache_name = cache_argument(type(model).forward if isinstance(model, nn.Module) else model)
        self.captures = self.replays = 0
        self._known: OrderedDict[object, _Captured | None] = OrderedDict()  # by kind of step, last used last; None: seen once
        self._failed = False  # a capture failed: the model runs all steps
        self._newest: _Captured | None = None  # the graph of the last step

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the graphs work on, without a step's intermediate results."""
        return sum(captured.nbytes for captured in self._known.values() if captured is not None)

    def __call__(self, ids_B1: Tensor, cache: EvictingCache) -> Tensor:
        """Feed one token of each row to the model, by a graph if possible; return logits [B,1,V]. Called by the user."""
        inputs = {"input_ids": ids_B1}
        logits = self.step(inputs, cache)
        if logits is None:
            with torch.inference_mode(False), torch.no_grad():
                logits = self._call_model(inputs, cache)
        return logits

    def step(self, inputs: Inputs, cache: EvictingCache) -> Tensor | None:
        """Run a step by a graph, and return its logits [B,1,V]; None if the caller must call the model.

        `__call__` and `GenerateSteps._step_by_graph` call it; the cache takes up the token. inputs: input_ids [B,1], and
        position_ids where they are not the cache's next ones.
        """
        with torch.inference_mode(False), torch.no_grad():
            captured = self._newest
            if captured is None or not captured.goes_on(inputs, cache):  # else: nobody has used the cache since the last step
                ownership.check(cache, self.state)
                cache.catch_up()  # adds replayed steps to the host's counters
                left = 0 if self._failed else self._count_steps(cache, inputs["input_ids"])  # steps until the next such check
                if not left:
                    return None
                captured = self._find_captured(inputs, cache)
                if captured is None:
                    return self._trace(inputs, cache)
                captured.left, self._newest = left, captured
            captured.replay(inputs, cache)
            self.replays += 1
            return captured.logits

    def drop(self, limit: int = 0) -> None:
        """Drop the graphs that were used longest ago, until the others' memory is within `limit` bytes."""
        while self._known and self.nbytes > limit:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, oldest = self._known.popitem(last=False)
        if oldest is self._newest:
            self._newest = None

    def give_up(self) -> None:
        """Leave all steps to the model from now on."""
        self._failed = True
        self.drop()

    def _find_captured(self, inputs: Inputs, cache: EvictingCache) -> _Captured | None:
        """Find or capture the graph for `step`, and move the cache's tensors into it; None: the caller runs the step itself.

        None for the first step of a kind (with these shapes and `_facts`), and if the capture fails: no other is tried then.
        """
        round_capacities(cache)
        kind = (_shapes(inputs), _facts(cache))
        if kind not in self._known:  # the first step runs as usual: kernels are compiled and loaded, which no capture may do
            self._known[kind] = None
            self._keep_newest()
            return None
        self._known.move_to_end(kind)
        captured = self._known[kind]
        if captured is None:
            try:
                captured = self._known[kind] = self._capture(inputs, cache)
            except RuntimeError as error:  # such as of a model that reads a value on the host
                del self._known[kind]
                self._failed = True
                _LOG.warning(f"[kvpatch] No step of this model can be captured, so it runs them all itself: {error}")
                return None
            self._keep_newest()
        elif not captured.holds(cache):
            captured.take_in(cache)
        return captured

    def _keep_newest(self) -> None:
        """Drop the kinds of steps that ran longest ago, down to KINDS and to `limit` bytes of memory; the newest one stays."""
        while len(self._known) > KINDS or (len(self._known) > 1 and self.nbytes > self.limit):
            self._drop_oldest()

    def _capture(self, inputs: Inputs, cache: EvictingCache) -> _Captured:
        """Capture a decode step as a CUDA graph, without running it, for `_find_captured`, at the second step of a kind."""
        cache.unstack_layers(due=cache.stacked)  # the graph keeps tensors' addresses: layers must not be views of a stacked one
        captured = _Captured(self.make(inputs["input_ids"].device), cache, inputs)

        def run() -> None:
            captured.logits = self._call_model(captured.inputs, cache, capturing=True)

        captured.recorder.capture(run)
        self.captures += 1
        return captured

    def _trace(self, inputs: Inputs, cache: EvictingCache) -> Tensor:
        """Run the first step of a kind, for `step`, as it will be captured: kernels get compiled. Errors break the cache."""
        try:
            return self._call_model(inputs, cache, capturing=True)
        except NotCaptured:
            raise
        except BaseException:  # how far it has come is unknown
            cache.in_progress.setdefault("change", ["step for a graph"])
            raise

    def _call_model(self, inputs: Inputs, cache: EvictingCache, capturing: bool = False) -> Tensor:
        """Run the model for `__call__`, `_capture` and `_trace`; return logits. capturing: begin it as a traceable step."""
        call: dict[str, Any] = {**inputs, self.cache_name: cache, "use_cache": True}
        if capturing and "position_ids" in self.state.decoder_parameters:
            call.setdefault("position_ids", _positions(cache, len(inputs["input_ids"])))
        self.state.capturing.cache = cache if capturing else None
        try:
            return self.model(**call).logits
        finally:
            self.state.capturing.cache = None

    def _count_steps(self, cache: EvictingCache, ids_B1: Tensor) -> int:
        """Return, for `step`, how many steps can be replayed until buffers move, positions end or the tape is full; or 0."""
        # not captured: ranks of keys, which differ each step; rows at different positions; casts of weights under autocast
        varies = cache.settings.renumbered or cache.rows.concatenated or is_autocasting(ids_B1.device.type)
        if varies or ids_B1.ndim != 2 or not compiled.can_trace(cache, *ids_B1.shape):
            return 0
        # ids are on a tape (a tensor of the steps' token ids) that is read before it is full
        left = [cache.counters.tensors.tape_BN.shape[1], *(layer.mode.writes_left for layer in cache.layers)]
        if self.state.max_positions is not None:
            left.append(self.state.max_positions - cache.columns_read)
        return max(min(left), 0)


def graph(model: nn.Module, state: PatchState, device: torch.device) -> StepGraph:
    """Make the StepGraph of a model on a CUDA device, for `Patch.graph`; nothing is captured yet.

    Raises:
        KVPatchError: there is no CUDA device, the model is on several, it is a hybrid, or it takes no position_ids.
    """
    refuse("graph()", state.list_features())
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise KVPatchError(NO_DEVICE.format(f"a graph is of one device, but this model is on {', '.join(sorted(devices))}"))
    if not torch.cuda.is_available():
        raise KVPatchError(NO_DEVICE.format("torch finds no CUDA device here"))
    if device.type != "cuda":
        raise KVPatchError(NO_DEVICE.format(f"this model is on {device}"))
    return StepGraph(model, state, limit=find_limit(device))


def _shapes(inputs: Inputs) -> tuple[object, ...]:
    return tuple((name, one.shape, one.dtype, one.device) for name, one in inputs.items())


def _positions(cache: EvictingCache, B: int) -> Tensor:
    """Return the next token's positions [B,1], for `StepGraph._call_model`: the model would compute them on the host."""
    if not cache.rows.by_columns:  # else positions count padding columns too, as in the unpatched model
        return cache.next_positions()
    return cache.counters.tensors.columns.expand(B, 1).clone()


def _places(cache: EvictingCache) -> list[Place]:
    """Return (dictionary, name) of each of a cache's tensors, which a graph works on, in an order that equal caches share."""
    found = compiled.list_holders(cache)
    return [(holder, name) for holder in found for name in sorted(holder) if isinstance(holder[name], Tensor)]


def _facts(cache: EvictingCache) -> object:
    """Return what a captured step takes for constant, such as shapes, for `_find_captured`; equal facts share a graph."""
    facts: list[object] = [type(layer.mode) for layer in cache.layers]  # the mode: how steps store and evict
    for holder in compiled.list_holders(cache):  # the cache and each object in it that holds tensors, as {attribute: value}
        for name in sorted(holder):
            value = holder[name]
            if isinstance(value, Tensor):
                facts.append((name, tuple(value.shape), value.stride(), value.dtype, value.device))
            elif name == "steps_until_full":  # of a mode; a step that evicts is another graph
                facts.append((name, value > 0))
            # settings and numbers on the host, which the step has taken for constant; the cache's own are left out
            elif isinstance(value, bool | int | float | str) and name not in COUNTS and holder is not vars(cache):
                facts.append((name, value))
    return tuple(facts)
