"""Decode steps of generate() as graphs (graph.py), on a device that has them, without a change of the caller's code.

generate() calls the model for a prompt, and asks it for `__call__` for the steps that follow. While generate() runs, a function
is there that takes the steps that a graph can run, and hands on all others. Beam search does not ask, and assisted decoding
asks for passes that no graph can run.
A graph repeats what the device did. It does not run the model's Python code, so the code must have no effects of its own, and
whatever it reads must be as it was at the capture: `describe_model` looks at both before each generate().
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from transformers.utils import ModelOutput

from ..arch.refusals import HOMES, home_of
from ..arch.upstream import CACHE_NAMES, STEP_CALL, cache_of
from ..cache.cache import EvictingCache
from ..policies.served import why_not
from .graph import StepGraph
from .recorder import CudaRecorder, Recorder, find_limit
from .state import NotCaptured, PatchState

RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}  # by the type of the device
HOOKS = ("kvpatch", "transformers")  # the latter's do nothing where nothing more than logits is asked for
INPUTS = {"input_ids", "position_ids", "attention_mask", "use_cache", "return_dict", "logits_to_keep", *CACHE_NAMES}
"""Arguments of a plain decode step; a pass with any other runs without a graph."""
_COMMON = vars(nn.Module()).keys() - {"training"}  # attributes that every module has, such as its hooks


class GenerateSteps:
    """CUDA graphs of generate()'s decode steps. One run at a time has them; a second thread's run calls the model."""

    def __init__(self, state: PatchState) -> None:
        """Begin without a CUDA graph; `wrap_generate` calls it as a model is patched."""
        self.state, self._lock = state, threading.Lock()  # one generate() at a time uses the graphs
        self._graph: StepGraph | None = None
        self._described: object = None  # what `describe_model` returned when the graph was made
        self._output: ModelOutput | None = None  # of the newest `_run_model`
        self._make_output: Callable[..., ModelOutput]  # (logits, cache) -> an output of the model's class, for replayed steps

    @contextmanager
    def with_graphs(self, model: nn.Module, cache: EvictingCache) -> Iterator[None]:
        """Run generate()'s decode steps over `cache` by CUDA graphs inside the with-block, where model and patch allow graphs.

        `_run_with_cache` enters it. Inside, the model has `_call` as an attribute that generate() calls for its steps. If
        another thread's generate() is using the graphs, this one calls the model. At the end graphs are dropped until they fit
        the memory limit.
        """
        graph = None
        if not self._lock.acquire(blocking=False):
            yield
            return
        try:
            graph = self._find_graph(model)
            if graph is not None:
                vars(model)[STEP_CALL] = functools.partial(self._call, model, graph, cache)
            yield
        finally:
            self._output = None
            if graph is not None:
                vars(model).pop(STEP_CALL, None)
                graph.drop(graph.limit)
            self._lock.release()

    def _find_graph(self, model: nn.Module) -> StepGraph | None:
        """Return the model's graphs, for `with_graphs`; new ones if it has changed, None if its steps run without graphs.

        A change is another address, dtype or shape of a weight, another class of a module, or another attribute.
        """
        state, device = self.state, next(model.parameters()).device
        make = RECORDERS.get(device.type)  # makes what records a graph; None: no graphs on such a device
        if not state.options.graphs or make is None or STEP_CALL in vars(model):
            return None
        # a policy or feature whose steps cannot be captured (untraced: the reason why)
        if state.settings.untraced or why_not("graph()", state.list_features()):
            return None
        described = describe_model(model, device, state.overrides)
        if described is None or described != self._described:
            self._graph, self._described = None, described
        if described is not None and self._graph is None:
            run = functools.partial(self._run_model, weakref.ref(model))
            self._graph = StepGraph(run, state, make, find_limit(device))
        return self._graph

    def _call(self, model: nn.Module, graph: StepGraph, cache: EvictingCache, /, *args: Any, **inputs: Any) -> Any:
        """Run one pass of generate(), which calls this instead of the model: by a graph if it is a decode step over `cache`."""
        # foreign: of another cache than the one of this generate(), such as an assistant model's
        foreign = bool(args) or cache_of(inputs) is not cache
        reads = cache.columns_read < (cache.plans.prompt_len or 0)  # a prompt in pieces, the last of which may be one token
        taken = None if foreign or reads else _take_inputs(inputs)
        output = None if taken is None else self._step_by_graph(graph, taken, cache)
        return type(model).__call__(model, *args, **inputs) if output is None else output

    def _step_by_graph(self, graph: StepGraph, inputs: dict[str, Tensor], cache: EvictingCache) -> ModelOutput | None:
        """Run a decode step by a CUDA graph, captured first if need be, for `_call`; return its output, None if none ran."""
        replays = graph.replays
        try:
            logits = graph.step(inputs, cache)
        except NotCaptured:  # raised before anything has changed
            return None
        output, self._output = self._output, None
        if logits is None:
            return None
        self.state.log.time_step(cache)
        if graph.replays > replays:  # a graph was replayed, so that the model's code made no output
            return self._make_output(logits=logits.clone(), cache=cache)
        assert output is not None, "the model ran"
        # a replayed step has logits alone: if this model's output has more, generate() may read that, so no graph may run
        if output.keys() - {"logits", *CACHE_NAMES}:
            graph.give_up()
        kind, name = type(output), next(name for name in CACHE_NAMES if name in output)
        self._make_output = lambda logits, cache: kind(logits=logits, **{name: cache})
        return output

    def _run_model(self, model: weakref.ref[nn.Module], **call: Any) -> ModelOutput:
        """Call the model for `StepGraph._call_model`, and keep its output in `_output`: a graph returns logits alone."""
        alive = model()
        assert alive is not None, "it generates"
        self._output = alive(**call, return_dict=True)
        return self._output


def _take_inputs(inputs: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the ids and positions that a graph needs, for `GenerateSteps._call`; None if it is no plain step of one token."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    others = any(value is not None and value is not False for name, value in inputs.items() if name not in INPUTS)
    if others or ids is None or ids.shape[1:] != (1,) or inputs.get("use_cache") is False:
        return None
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        return None
    taken = {"input_ids": ids, "position_ids": inputs.get("position_ids")}
    return {name: tensor for name, tensor in taken.items() if tensor is not None}


# ---- the model ----


def describe_model(model: nn.Module, device: torch.device, changing: Mapping[str, object]) -> object:
    """Describe all of a model that a captured step takes for constant; None if a graph would skip code that must run each step.

    `GenerateSteps._find_graph` compares it before each generate(): graphs of a model that has changed are dropped. changing:
    names of attributes that passes change themselves.
    """
    # watched: someone observes all modules or operations of the process (as profilers do), and would not see a replayed step
    watched = (
        torch._C._len_torch_dispatch_stack() or module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks
    )
    facts: list[object] = [weakref.ref(model)]
    for module in [] if watched else model.modules():
        attributes = vars(module)
        tensors = [tensor for kind in ("_parameters", "_buffers") for tensor in attributes[kind].values() if tensor is not None]
        if module.training or not _only_computes(module) or any(tensor.device != device for tensor in tensors):
            return None
        if any(type(tensor) not in (nn.Parameter, Tensor) for tensor in tensors):  # sharded or quantized
            return None
        facts.append((id(module), type(module), *((tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors)))
        facts += [(name, _describe(attributes[name])) for name in sorted(attributes.keys() - _COMMON - changing.keys())]
    return None if watched else facts


def _only_computes(module: nn.Module) -> bool:
    """Tell `describe_model` if graphs may skip a module's Python code: class, forwards and hooks come from known packages."""
    attributes = vars(module)
    code = [type(module), type(module).forward, attributes.get("forward"), attributes.get("_old_forward")]
    hooks = [*attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values()]
    return all(home_of(one) in HOMES for one in code if one is not None) and all(home_of(one) in HOOKS for one in hooks)


def _describe(value: object) -> object:
    """Return the `value` of a module's attribute in a form that `describe_model` can compare later; of most objects the id."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_describe, value))
    if isinstance(value, dict):
        return tuple((name, _describe(one)) for name, one in value.items())
    return id(value)
