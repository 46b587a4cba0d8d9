"""Bound steps: a layer's part of a decode step, with everything at hand that does not change from step to step.

A step of a small batch costs what its Python costs. The first layer of a pass takes the whole way (attend.py) and decides if
the others may be bound: one token per row, no rollback, no autocast, no gradients. The last layer takes the whole way too, for
it ends the pass. A bound step does what decode.attend does for its layer, in the same order, or calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import backend
from ..cache.modes import Appending
from ..policies.context import accumulator
from . import decode
from .layer_call import Call

if TYPE_CHECKING:
    from ..cache.state import TextState
    from .stacked import LayerStack


class BoundStep:
    """A layer's part of a decode step: queries [B,H*G,1,D], keys and values [B,H,1,D] -> output [B,1,H*G*D].

    owner: the stack, or the mode of a layer without one; another owner needs another step.
    """

    def __init__(self, call: Call) -> None:
        self.attn, self.slots, self.geometry = call.bound_adapter.attn, call.slots, call.geometry
        self.owner: Any = None
        self.kv = call.slots.kv
        self.launched = call.launched
        self.dtype, self.mode = call.slots.dtype, call.slots.mode
        (B, H, self.C), D = call.slots.positions.shape, call.slots.kv.sizes[0]
        self.query, self.out = (B, H, call.group, D), (B, 1, -1)
        self.row, self.value_row = ((B * H, size) for size in call.slots.kv.sizes)

    def takes(self, attn: Any, q: Tensor) -> bool:
        """Tell if this call is of the layer that was bound."""
        return attn is self.attn and self.slots.mode is self.mode and q.dtype == self.dtype and not q.requires_grad

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Unbound(BoundStep):
    """Of any other layer: decode.attend, without asking again what the first layer has answered."""

    def __init__(self, call: Call, stack: LayerStack | None) -> None:
        super().__init__(call)
        self.call, self.stack = call, stack

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.call.begin(cache.running)
        return decode.attend(self.call, q.view(self.query), k, v, 0, self.stack).reshape(self.out)


class Stacked(BoundStep):
    """Of a layer in a stack. norms_NB: the layer's part of the stack's norms of projected values."""

    def __init__(self, call: Call, stack: LayerStack) -> None:
        super().__init__(call)
        self.call, self.stack = call, stack
        self.norms_NB = None if stack.norms_LNB is None else stack.norms_LNB[call.layer]

    def count(self, v: Tensor) -> None:
        """Count the new token and note the norms of its value."""
        self.slots.seen += 1
        if self.norms_NB is not None:
            self.call.write_norms(v, self.norms_NB)


class StackedByTorch(Stacked):
    """Writes key and value, attends, and leaves the probabilities in the stack's buffer."""

    def __init__(self, call: Call, stack: LayerStack) -> None:
        super().__init__(call, stack)
        N, D = self.row
        self.keys, self.values = call.slots.kv.flat()
        self.kt_NDC, self.v_NCV = self.keys.view(N, self.C, D).transpose(1, 2), self.values.view(N, self.C, -1)
        self.p_NGC = stack.buffer(call, self.dtype).flatten(0, 1) if call.observes else None
        self.heads = (N, call.group, D)

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = self.slots
        self.count(v)
        at = slots.free_slots()
        self.keys.index_copy_(0, at, k.reshape(self.row))
        self.values.index_copy_(0, at, v.reshape(self.value_row))
        if self.p_NGC is None:
            kv, scale = slots.kv, self.geometry.scale
            return F.scaled_dot_product_attention(q.view(self.query), kv.keys, kv.values, scale=scale).view(self.out)
        x = torch.bmm(q.reshape(self.heads) * self.geometry.scale, self.kt_NDC)
        return torch.bmm(torch.softmax(x, -1, out=self.p_NGC), self.v_NCV).view(self.out)


class StackedFilling(Stacked):
    """The same of a layer whose tokens are appended until several are evicted at once."""

    def __init__(self, call: Call, stack: LayerStack) -> None:
        super().__init__(call, stack)
        (N, D), kv = self.row, call.slots.kv
        self.kt_NDC, self.v_NCV = kv.keys.view(N, self.C, D).transpose(1, 2), kv.values.view(N, self.C, -1)
        self.heads, self.observes = (N, call.group, D), call.observes

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, kv, start = self.slots, self.slots.kv, self.slots.used
        self.count(v)
        kv.keys.narrow(2, start, 1).copy_(k)
        kv.values.narrow(2, start, 1).copy_(v)
        slots.used = start + 1
        if not self.observes:
            keys, values = kv.keys.narrow(2, 0, start + 1), kv.values.narrow(2, 0, start + 1)
            out = F.scaled_dot_product_attention(q.view(self.query), keys, values, scale=self.geometry.scale)
            return out.reshape(self.out)
        p_NGT = self.stack.buffer(self.call, self.dtype).flatten(0, 1)
        x = torch.bmm(q.reshape(self.heads) * self.geometry.scale, self.kt_NDC.narrow(2, 0, start + 1))
        return torch.bmm(torch.softmax(x, -1, out=p_NGT), self.v_NCV.narrow(1, 0, start + 1)).view(self.out)


class StackedByKernels(Stacked):
    """Kernels write, attend, add to the statistics and may name the victims."""

    def __init__(self, call: Call, stack: LayerStack) -> None:
        super().__init__(call, stack)
        kernels = backend("triton")
        self.step = kernels.step
        self.rule = kernels.rule(call.policy, call.slots, call.observes, call.evicting)

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, stack = self.slots, self.stack
        self.count(v)
        return self.step(q.view(self.query), k, v, slots, stack.newest_B, self.geometry, self.rule, stack.tau).view(self.out)


class AppendingByTorch(BoundStep):
    """Of a layer that appends and neither scores nor evicts."""

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, now = self.slots, cache.running
        start = slots.used
        if start == slots.positions.shape[2]:
            slots.reserve(start + 1)
        slots.seen, slots.used = slots.seen + 1, start + 1
        kv = slots.kv
        kv.keys.narrow(2, start, 1).copy_(k)
        kv.values.narrow(2, start, 1).copy_(v)
        slots.positions.narrow(2, start, 1).copy_(now.on(slots.device)[:, None])
        keys, values = kv.keys.narrow(2, 0, start + 1), kv.values.narrow(2, 0, start + 1)
        return F.scaled_dot_product_attention(q.view(self.query), keys, values, scale=self.geometry.scale).reshape(self.out)


class AppendingByKernels(BoundStep):
    """The same by kernels, which write key, value and position."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        kernels = backend("triton")
        self.step, self.rule = kernels.step, kernels.rule(call.policy, call.slots, False, False)

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, now = self.slots, cache.running
        slots.seen, newest_B = slots.seen + 1, now.on(slots.device)[:, 0]
        self.mode.free_BH = now.column(slots.used, slots.positions)
        slots.open_column({})
        return self.step(q.view(self.query), k, v, slots, newest_B, self.geometry, self.rule, 1.0).view(self.out)


def bind(first: Call, q_BHGD: Tensor, stack: LayerStack | None) -> None:
    """Let the layers of a pass whose first layer has run take bound steps, where they can."""
    now, cache = first.now, first.cache
    whole = now.recording or now.traced or cache.scratch or cache.settings.strict or cache.settings.renumbered
    if whole or cache.settings.record or first.bound_adapter.autocast or torch.is_grad_enabled():
        return
    between = (_step(cache.calls.get(layer), cache, q_BHGD, stack) for layer in range(1, len(cache.layers) - 1))
    now.bound = [None, *between, None]


def _step(call: Call | None, cache: TextState, q_BHGD: Tensor, stack: LayerStack | None) -> BoundStep | None:
    """Return the step of a layer, bound once for each stack or mode; None for a layer that has not run yet."""
    if call is None:
        return None
    owner, step = call.slots.mode if stack is None else stack, call.step
    if step is None or step.owner is not owner or step.launched != call.launched or step.kv is not call.slots.kv:
        call.step = step = _stacked(call, stack) if stack is not None else _alone(call, q_BHGD)
        step.owner = owner
    return step


def _stacked(call: Call, stack: LayerStack) -> BoundStep:
    slotted, kernels = call.slots.mode.slotted, stack.backend == "triton"
    alone = call.policy.stores and not call.policy.entry_by_position  # else written for all layers at once
    if alone or (kernels and not slotted) or not (kernels or _unmasked(call)):
        return Unbound(call, stack)
    return StackedByKernels(call, stack) if kernels else (StackedByTorch if slotted else StackedFilling)(call, stack)


def _alone(call: Call, q_BHGD: Tensor) -> BoundStep:
    slots = call.slots
    entry = call.policy.stores or call.policy.keeps_norms
    scores = call.observes or slots.statistics or (call.evicts and entry)
    if not isinstance(slots.mode, Appending) or scores or call.shows:
        return Unbound(call, None)
    if decode.backend_of(call, q_BHGD) == "triton":  # its first launch, which may fail, is decode.attend's
        return AppendingByKernels(call) if call.launched else Unbound(call, None)
    return AppendingByTorch(call) if _unmasked(call) else Unbound(call, None)


def _unmasked(call: Call) -> bool:
    """Tell if a step is a softmax over scaled products in one precision."""
    slots, geometry = call.slots, call.geometry
    masked = slots.holes or geometry.slopes_HG is not None or geometry.sliding is not None
    full = slots.dtype == accumulator(slots.dtype) and slots.kv.in_place and all(codec.exact for codec in slots.kv.codecs)
    return full and geometry.plain and not masked
