"""Bound steps: a layer's part of a decode step, with everything at hand that does not change from step to step.

A step of a small batch costs what its Python costs. The first layer of a pass takes the whole way (attend.py) and decides if
the others may be bound: one token per row, no rollback, no autocast, no gradients. The last layer takes the whole way too, for
it ends the pass. A bound step does what decode.run_step does for its layer, in the same order, or calls it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.dispatch import backend
from ..backends.entries import dot, mix
from ..cache.modes import Appending
from ..policies.context import accumulator
from . import decode
from .layer_call import Call
from .steps import Steps, find_steps

if TYPE_CHECKING:
    from ..cache.state import TextState
    from .stacked import LayerStack


class BoundStep:
    """A layer's part of a decode step: queries [B,H*G,1,D], keys and values [B,H,1,D] -> output [B,1,H*G*D].

    The attention module's forward calls it in place of attend.attend. stack: the LayerStack (layers that score and evict at
    once) that the step was bound for, or None. `bind_steps` makes a new step once the layer has another stack, mode or buffers.
    find_kv: returns the buffers, or None once they are gone: a step that has no views of them must not keep old buffers alive
    while all layers get larger ones.
    """

    def __init__(self, call: Call, stack: LayerStack | None) -> None:
        """Store what a layer's decode steps have in common, so that each step costs little Python time.

        In each decode step the first layer calls `bind_steps`: that makes this object for a later layer, or keeps the old one.
        `launched`: a kernel has run a step of this layer before. `find_kv`: weak reference; it tells if buffers were replaced.
        `query`, `out`: shapes of a step's queries and output.
        """
        self.call, self.stack = call, stack
        self.attn, self.slots, self.geometry = call.bound_adapter.attn, call.slots, call.geometry
        self.find_kv = weakref.ref(call.slots.kv)
        self.launched = call.launched
        self.dtype, self.mode = call.slots.dtype, call.slots.mode
        (B, H, _), D = call.slots.positions.shape, call.slots.kv.sizes[0]  # D: size of a key
        self.query, self.out = (B, H, call.group, D), (B, 1, -1)

    def takes_call(self, attn: Any, q: Tensor) -> bool:
        """Tell if the step serves this call: of the bound attention module, in the same mode and dtype, without gradients."""
        return attn is self.attn and self.slots.mode is self.mode and q.dtype == self.dtype and not q.requires_grad

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Unbound(BoundStep):
    """Step of a layer that no fused step serves: it calls decode.run_step, without the checks of the first layer."""

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.call.begin(cache.current_pass)
        return decode.run_step(self.call, q.view(self.query), k, v, 0, self.stack).reshape(self.out)


class Fused(BoundStep):
    """Step of a layer in a stack, or (stack: None) of one that appends tokens and neither scores nor evicts them.

    norms_NB: the layer's part of the stack's tensor for the norms of projected values; None if the policy needs no norms.
    """

    def __init__(self, call: Call, stack: LayerStack | None) -> None:
        super().__init__(call, stack)
        self.norms_NB = None if stack is None or stack.norms_LNB is None else stack.norms_LNB[call.layer]

    def count(self, v: Tensor) -> None:
        """Begin the layer's decode step, for `__call__` of the subclasses: count the token in `slots.columns_read`.

        If the policy selects by the norms of values, write those of the token to `norms_NB`, the stack's tensor.
        """
        self.slots.columns_read += 1
        if self.norms_NB is not None:
            self.call.write_norms(v, self.norms_NB)


class FusedByTorch(Fused):
    """Step in which torch writes key and value and attends; if scores need the probabilities, the stack's buffer gets them."""

    def __init__(self, call: Call, stack: LayerStack | None) -> None:
        """Store what the layer's decode steps have in common, and views of its buffers. `bind_steps` makes it."""
        super().__init__(call, stack)
        # observes: scores need the probabilities. A token that fills no free slot goes after the used columns
        self.observes, self.fills_free_slots = stack is not None and call.observes, self.mode.fills_free_slots
        B, H, G, D = self.query
        self.heads = B * H, G, D
        self.p_NGC = (  # this layer's part of the buffer of all layers' probabilities
            stack.view_probabilities(call, self.dtype).flatten(0, 1)
            if stack and self.observes and self.fills_free_slots
            else None
        )
        self._view_buffers()

    def _view_buffers(self) -> None:
        """Set the views of the layer's key and value buffers, for `__init__`, and for `_write_token` once buffers have grown.

        C: slots of a head. W: numbers stored per slot (packed if rounded). codecs: encode and decode rounded numbers.
        """
        N, kv = self.heads[0], self.slots.kv  # N is B*H
        self.kv, self.C, self.find_kv = kv, kv.width, weakref.ref(kv)
        self.keys_NCW, self.values_NCW = (entries.view(N, self.C, entries.shape[-1]) for entries in (kv.keys, kv.values))
        self.key_codec, self.value_codec = kv.codecs[0].of(slice(None)), kv.codecs[1].of(slice(None))  # of all heads

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run the layer's decode step: count the token, write its key and value, and return the output [B,1,H*G*D].

        The patched attention module calls it in place of `attend`. If scores need the probabilities, torch.softmax writes them
        to the stack's buffer `p_NGT`, from which the last layer updates the scores of all. W: numbers stored per slot.
        """
        self.count(v)
        T = self._write_token(cache, k, v)
        if not self.observes and self.key_codec.exact:  # no rounding, no probabilities: torch's fused attention
            keys, values = (t if T == self.C else t.narrow(2, 0, T) for t in (self.kv.keys, self.kv.values))
            return F.scaled_dot_product_attention(q.view(self.query), keys, values, scale=self.geometry.scale).reshape(self.out)
        p_NGT, keys_NTW, values_NTW = self.p_NGC, self.keys_NCW, self.values_NCW
        if T < self.C:
            keys_NTW, values_NTW = keys_NTW.narrow(1, 0, T), values_NTW.narrow(1, 0, T)
        if self.observes and p_NGT is None:
            assert self.stack is not None
            p_NGT = self.stack.view_probabilities(self.call, self.dtype).flatten(0, 1)
        x = dot(q.reshape(self.heads) * self.geometry.scale, keys_NTW, self.key_codec)  # logits; dot and mix decode
        return mix(torch.softmax(x, -1, out=p_NGT), values_NTW, self.value_codec, self.dtype).reshape(self.out)

    def _write_token(self, cache: TextState, k: Tensor, v: Tensor) -> int:
        """Write a token's key and value to free slots, or after the used columns; return the number of columns to attend to.

        `FusedByTorch.__call__` begins with it. In the second case `columns_used` grows; full buffers are replaced by larger.
        """
        slots = self.slots
        if self.fills_free_slots:  # each head has a free slot, and all columns are in use
            self.kv.write_at(slots.free_slots(), *self.kv.encode_pair(k, v))
            return self.C
        start = slots.columns_used
        if start == self.C:
            slots.reserve(start + 1)
            self._view_buffers()
        slots.columns_used = start + 1
        self.kv.make_dense(*self.query[:2]).append(start, k, v)
        if self.stack is None:  # a stack writes the position for all layers
            slots.positions.narrow(2, start, 1).copy_(cache.current_pass.positions_on(slots.device)[:, None])
        return start + 1


class FusedByKernels(Fused):
    """Step in which Triton's kernels write key and value, attend, add to the sums of attention, and may choose the victims."""

    def __init__(self, call: Call, stack: LayerStack | None) -> None:
        """Store what the layer's decode steps have in common, and the `rule` by which kernels update scores and choose victims.

        `bind_steps` makes it. Without a stack (layers joined to evict at once) the layer neither scores nor evicts.
        """
        super().__init__(call, stack)
        kernels, acts = backend("triton"), stack is not None
        self.step = kernels.step
        self.rule = kernels.rule(call.policy, call.slots, acts and call.observes, acts and call.evicting)

    def __call__(self, cache: TextState, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run the layer's decode step in Triton's kernels; return the output [B,1,H*G*D].

        The patched attention module calls it in place of `attend`. The kernels write the token, too, into each head's slot
        `mode.free_BH`: a free slot, or the column after the used ones, which `open_columns` makes room for. tau: temperature of
        Keyformer's softmax with noise. newest_B: the token's position.
        """
        slots, stack = self.slots, self.stack
        tau: float | Tensor = 1.0
        self.count(v)
        if stack is not None:
            newest_B, tau = stack.newest_B, stack.tau
        else:
            newest_B = cache.current_pass.positions_on(slots.device)[:, 0]
            self.mode.free_BH = cache.current_pass.index_column(slots.columns_used, slots.positions)  # the next column
            slots.open_columns(1, {})
        return self.step(q.view(self.query), k, v, slots, newest_B, self.geometry, self.rule, tau).view(self.out)


def bind_steps(first: Call, q_BHGD: Tensor, stack: LayerStack | None) -> None:
    """Make a bound step (a short decode step, to save Python time) for each layer between the first, which runs, and the last.

    `_attend_layer` calls it in the first layer of each decode step. The attention modules find the bound steps in
    `steps.running`, which this sets, and call them in place of `attend`. The last layer has none: `attend` ends the pass there.
    It makes none at all where a step needs more than that: a log for rollback, torch.compile, checks, autocast, gradients.
    """
    now, cache = first.now, first.cache
    needs_full_step = now.records_undo or now.traced or cache.for_one_pass or cache.settings.strict or cache.settings.renumbered
    if needs_full_step or cache.settings.records_lifetimes or first.bound_adapter.autocast or torch.is_grad_enabled():
        return
    steps = find_steps(cache)  # where the cache keeps Calls and bound steps from pass to pass
    between = [_bind_layer(steps, layer, q_BHGD, stack) for layer in range(1, len(cache.layers) - 1)]
    steps.now, steps.running = now, [None, *between, None]


def _bind_layer(steps: Steps, layer: int, q_BHGD: Tensor, stack: LayerStack | None) -> BoundStep | None:
    """Return a layer's bound step (short decode step) for `bind_steps`; None if the layer has not run yet.

    `steps.bound` keeps it. It is made anew if its Call, stack, mode or buffers changed, or a kernel was launched meanwhile.
    """
    call = steps.calls.get(layer)
    if call is None:
        return None
    step, slots = steps.bound.get(layer), call.slots
    if (
        step is not None
        and (step.call is call and step.stack is stack and step.mode is slots.mode)
        and (step.find_kv() is slots.kv and step.launched == call.launched)
    ):
        return step
    steps.bound[layer] = step = _bind_stacked(call, stack) if stack is not None else _bind_alone(call, q_BHGD)
    return step


def _bind_stacked(call: Call, stack: LayerStack) -> BoundStep:
    """Make a stacked layer's bound step for `_bind_layer`: Fused (few calls) if the stack's backend can, else Unbound.

    An Unbound step calls `run_step`.
    """
    fills_free_slots, kernels = call.slots.mode.fills_free_slots, stack.backend == "triton"
    # the policy stores with each token what depends on its key, and each layer writes that itself, in run_step; what follows
    # from positions alone the stack writes for all layers
    writes_state = call.policy.stores and not call.policy.entry_by_position
    if writes_state or (kernels and not fills_free_slots) or not (kernels or _is_plain_softmax(call)):
        return Unbound(call, stack)
    return FusedByKernels(call, stack) if kernels else FusedByTorch(call, stack)


def _bind_alone(call: Call, q_BHGD: Tensor) -> BoundStep:
    """Make the bound step of a layer in no stack: Fused (few calls) if tokens are only appended, else Unbound.

    `_bind_layer` calls it. An Unbound step calls `run_step`. `shares_keys`: later layers attend to this layer's keys, too.
    Appending: the mode where tokens are appended and none is evicted.
    """
    slots = call.slots
    stores_state = call.policy.stores or call.policy.keeps_norms  # numbers that the policy stores with each token
    scores = call.observes or slots.statistics or (call.evicts and stores_state)  # statistics: sums of attention
    if not isinstance(slots.mode, Appending) or scores or call.shares_keys:
        return Unbound(call, None)
    if decode.choose_backend(call, q_BHGD) == "triton":  # its first launch, which may fail, is decode.run_step's
        return FusedByKernels(call, None) if call.launched else Unbound(call, None)
    return FusedByTorch(call, None) if _is_plain_softmax(call) else Unbound(call, None)


def _is_plain_softmax(call: Call) -> bool:
    """Tell if FusedByTorch can run a layer's steps: a softmax of scaled products, without masks (ALiBi, window, empty slots).

    `_bind_stacked` and `_bind_alone` ask. Also, keys and scores must be of the same dtype (no 16-bit numbers), and keys are
    read from storage without a copy (`in_place`). `plain`: the model caps no logits and has no other variant of attention.
    """
    slots, geometry = call.slots, call.geometry
    masked = slots.may_have_empty or geometry.slopes_HG is not None or geometry.sliding is not None
    return slots.dtype == accumulator(slots.dtype) and slots.kv.in_place and geometry.plain and not masked
