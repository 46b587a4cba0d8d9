"""Stacked layers: layers of equal shape, joined along the batch, observe and evict once per decode step instead of once each.

Between steps the layers of a uniform budget have the same shapes, limits and newest token, and differ only in their numbers.
A LayerStack holds their positions and score state as one layer with L*B rows; the layers keep views of it. In a pass each
layer only writes its key and value and attends. The probabilities of all layers land in one buffer, and after the last layer
decode.py observes and evicts on the stack as it does on a layer. Kernels observe layer by layer, into the same memory, and may
name the victims too. Layers with empty slots, rollback, beams or a score shared by layers are stepped one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..cache.layer import SlotLayer
from ..cache.modes import Evicting, Filling
from ..cache.state import TextState
from ..policies.served import why_not
from .layer_call import Call

BUFFER = 1 << 24  # probabilities of all layers, 64 MiB of float32: above it stacking saves nothing noticeable


class LayerStack:
    """Stacked state of a cache whose layers have equal shapes; `of` makes one, or returns None.

    slots: a layer without keys and values, which has the rows of all layers, layer by layer [L*B,H,C]. call: the Call of the
    whole stack. backend: runs each layer's part of a step. p_BHGT: probabilities of a step. newest_B, newest_B11: the new
    token's position, for a layer's rows and for all. tau: temperature of a step. norms_LNB: norms of the new token's projected
    values, per query head N, where the policy selects by them.
    """

    def __init__(self, cache: TextState, call: Call, backend: str) -> None:
        """Join the layers' positions and state along the batch, for `of`; the layers then hold views of the joined tensors.

        norms_LNB: norms of the new token's values; offset_LN: each layer's first slot in the flattened slots; buffer_N: memory
        for the probabilities of a step, allocated at the first one.
        """
        self.backend = backend
        self.layers, self.L = cache.layers, len(cache.layers)
        first = self.layers[0]
        B, self.H, self.C = first.positions.shape
        self.rows = [slice(index * B, (index + 1) * B) for index in range(self.L)]
        self.slots = self._join_layers(first)
        layer_B = torch.arange(self.L, device=first.device).repeat_interleave(B)
        self.call = call.copy_for_stack(self.slots, layer_B)
        self.offset_LN = torch.arange(self.L, device=first.device)[:, None] * (B * self.H * self.C)
        self.p_BHGT: Tensor | None = None
        self.buffer_N: Tensor | None = None
        self.norms_LNB: Tensor | None = None
        if call.policy.keeps_norms:
            self.norms_LNB = first.state["norm"].new_empty(self.L, self.H * call.group, B)
        for rows, layer in zip(self.rows, self.layers, strict=True):
            layer.positions, layer.in_text_order = self.slots.positions[rows], False
            layer.state = {name: tensor[rows] for name, tensor in self.slots.state.items()}
        self.share_free()

    def _join_layers(self, first: SlotLayer) -> SlotLayer:
        """Return a layer without keys, whose rows have the positions, scores and free slots of all layers, for `__init__`.

        On it `_end_step` scores and evicts for all layers at once. It copies the tensors.
        """
        slots, layers = _JoinedLayer(self.layers, first), self.layers
        slots.dtype, slots.device, slots.geometry = first.dtype, first.device, first.geometry
        slots.in_text_order, slots.columns_used, slots.columns_read = False, first.columns_used, first.columns_read
        slots.positions = torch.cat([layer.positions for layer in layers])
        slots.state = {name: torch.cat([layer.state[name] for layer in layers]) for name in first.state}
        if first.mode.fills_free_slots:  # tokens go into free slots, else they are appended until heads reach their budget
            slots.mode = Evicting(torch.cat([layer.mode.free_BH for layer in layers]))
        else:
            slots.mode = Filling(first.mode.steps_until_full)
        # all C slots are in use when heads evict: `evict_interval` tokens at once
        slots.keep_BH1 = torch.full((len(slots.positions), 1, 1), self.C - first.evict_interval, device=first.device)
        if first.limits is not None:
            slots.limits = first.limits.map_rows(lambda tensor: tensor.repeat(self.L, 1, 1))
        return slots

    @classmethod
    def of(cls, cache: TextState, call: Call, backend: str) -> LayerStack | None:
        """Stack the layers of `cache`, as `_find_stack` asks in a decode step; None if they differ, or cannot act as one.

        why_not: the reason, if the settings exclude a stack. If the mode `fills_free_slots`, all columns must be in use.
        """
        first = cache.layers[0]
        if why_not("stack", cache.settings.list_features()) is not None:
            return None
        if len(cache.layers) * first.positions.numel() * call.group > BUFFER:  # so large that stacking saves little
            return None
        alike = all(
            layer.positions.shape == first.positions.shape
            and layer.positions.device == first.positions.device
            and layer.sliding == first.sliding
            and layer.limits is first.limits
            and layer.settled  # coming steps need no more slots than there are
            and not layer.may_have_empty
            and layer.columns_used == first.columns_used
            and (not layer.mode.fills_free_slots or layer.columns_used == layer.positions.shape[2])
            for layer in cache.layers
        )
        return cls(cache, call, backend) if alike else None

    def share_free(self) -> None:
        """Tell each layer where its next token goes, for `run_step` after the stack has evicted.

        The token goes into a free slot of each head, `mode.free_BH`; local_LN are these slots as indices into the layer's
        flattened slots, which `known_free_slots` holds beside the `free_BH` that they were computed from. Or it is appended:
        then the layer's counts become the stack's (see SlotLayer and Growing).
        """
        if not self.slots.mode.fills_free_slots:
            for layer in self.layers:
                layer.columns_used, layer.first_croppable = self.slots.columns_used, self.slots.first_croppable
                layer.mode.steps_until_full = self.slots.mode.steps_until_full
            return
        free_LBH = self.slots.mode.free_BH.view(self.L, -1, self.H).unbind()
        local_LN = (self.slots.free_slots().view(self.L, -1) - self.offset_LN).unbind()
        for layer, free_BH, at_N in zip(self.layers, free_LBH, local_LN, strict=True):
            layer.mode.free_BH, layer.known_free_slots = free_BH, (free_BH, at_N)

    def begin(self, call: Call, k_BH1D: Tensor, v_BH1D: Tensor) -> dict[str, Tensor]:
        """Begin a layer's part of a decode step: count the new token; return the state that its score derives from its key.

        `run_step` calls it in each layer. The first layer also writes the token's position, and the state that follows from
        the position alone (`entry_by_position`), for all layers.
        """
        if call.layer == 0:
            self._open_step(call)
        call.slots.columns_read += 1
        if self.norms_LNB is not None:
            call.write_norms(v_BH1D, self.norms_LNB[call.layer])
        if self.call.policy.entry_by_position:
            return {}
        return call.score_entry(k_BH1D, v_BH1D, call.positions_BQ)

    def _open_step(self, call: Call) -> None:
        """Begin a decode step of all layers: `begin` calls it in the first. Sets `newest_B`, `newest_B11` and `tau`.

        It writes the new token's position, unless kernels do, and the state that follows from the position alone.
        """
        self.newest_B, self.tau = call.positions_BQ[:, 0], call.cache.temperature(1) if call.observes else 1.0
        self.newest_B11 = call.positions_BQ[:, None].repeat(self.L, 1, 1)
        self.call.now, self.call.positions_BQ = call.now, self.newest_B11[:, 0]
        self.slots.columns_read += 1
        if self.backend != "triton":
            self.slots.write_position(self.call.positions_BQ)
        if blank := self.slots.make_blanks():  # zeros for state that few tokens have
            self.slots.write_entry(blank)
        if self.call.policy.entry_by_position:
            like = torch.empty(1, device=self.slots.device).expand(len(self.slots.positions), self.H, 1, 1)
            self.slots.write_entry(self.call.entry_ahead(like, self.call.positions_BQ))

    def close(self) -> None:
        """Write norms of the token's values for all layers, and count its column; `run_step` then lets the stack evict."""
        if self.norms_LNB is not None:
            norm_LBH = self.norms_LNB.unflatten(1, (self.H, -1)).mean(2).transpose(1, 2)
            self.slots.write_entry({"norm": norm_LBH.reshape(-1, self.H, 1)})
        self.slots.columns_used += not self.slots.mode.fills_free_slots  # 1 if the token was appended

    def leave_kernels(self, backend: str) -> None:
        """Go on with another backend, as `run_step` could not launch the first layer's kernel; write the token's position."""
        self.backend = backend
        self.slots.write_position(self.call.positions_BQ)

    def view_probabilities(self, call: Call, dtype: torch.dtype) -> Tensor:
        """Return a layer's view [B,H,G,T] of the buffer for the attention probabilities of all layers in a decode step.

        `_run_torch` and FusedByTorch call it in each layer, whose softmax is written there. After the last layer the stack adds
        the whole buffer to its scores' sums. The first call allocates it; `p_BHGT` is the part of the present T columns.
        """
        T = self.slots.columns_used + (not self.slots.mode.fills_free_slots)  # 1 more if the token is appended
        if self.p_BHGT is None or self.p_BHGT.shape[-1] != T:
            shape = len(self.slots.positions), self.H, call.group
            if self.buffer_N is None:
                dtype = torch.promote_types(dtype, torch.float32)
                self.buffer_N = torch.empty(math.prod(shape) * self.C, dtype=dtype, device=self.slots.device)
            self.p_BHGT = self.buffer_N[: math.prod(shape) * T].view(*shape, T)
        return self.p_BHGT[self.rows[call.layer]]


class _JoinedLayer(SlotLayer):
    """The slots of stacked layers as rows of one layer; keys and values stay with the layers."""

    def __init__(self, layers: list[SlotLayer], like: SlotLayer) -> None:
        super().__init__(like.statistics, every=like.evict_interval)
        self.layers, self.first_croppable = layers, like.first_croppable

    def move_entries(self, into_BHM: Tensor, out_BHM: Tensor) -> None:
        """Move keys and values in each layer from columns `out_BHM` to `into_BHM`; `drop` calls it when several are evicted."""
        L = len(self.layers)
        for layer, into, out in zip(self.layers, into_BHM.chunk(L), out_BHM.chunk(L), strict=True):
            layer.move_entries(into, out)
