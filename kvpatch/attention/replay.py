"""A replay: one pass over whole texts in which each query sees what it saw when they were recorded (cache/lifetimes.py)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arch.bound import BoundAdapter
from ..backends import refusals, torch_backend
from ..backends.dispatch import Choice, backend
from ..backends.protocol import Attended, Case, Geometry, Keys
from ..cache.lifetimes import NEVER, Record
from ..cache.settings import CacheSettings


class ReplayPass:
    """A pass that follows a record. It changes nothing, so that gradient checkpointing may run its layers again.

    settings: of the patch. text_B: the recorded text of each row. positions_BQ: of the columns, -1 for padding. padded: there
    is some. ordered: none stands between two tokens. whole: columns that see all before them, as in any causal pass.
    """

    now = None  # as in a cache without a pass

    def __init__(
        self, settings: CacheSettings, record: Record, text_B: Tensor, positions_BQ: Tensor, padded: bool, ordered: bool
    ) -> None:
        """Set up the replay of recorded texts; `begin_replay` makes it as each forward inside `kvpatch.replay` begins.

        record: which tokens were evicted when. text_B: the recorded text of each row. padded: some columns are padding.
        ordered: no padding is between tokens. `first_N`: of each text, the position of the first eviction.
        """
        self.settings, self.record, self.text_B, self.positions_BQ = settings, record, text_B, positions_BQ
        self.padded, self.ordered, self.choice = padded, ordered, Choice(settings.backend)
        # first columns, before the first eviction: their queries see all keys before them, as in any causal pass
        self.whole = 0 if padded else min(int(record.first_N[text_B].min()), positions_BQ.shape[1])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
        """Attend in a layer of a replay: each query sees the keys that the recorded run still held then. Changes nothing.

        `_attend_writing` and `_attend_replay` call it. q [B,H*G,Q,D], k and v [B,H,Q,D] with positions applied -> [B,Q,H*G*D].
        A replay reads recorded texts again in one pass, as in training; the death of a key is the position at which it was
        evicted. Kernels know deaths; if they cannot serve the case, torch masks.
        """
        q, k = q.to(v.dtype), k.to(v.dtype)
        positions_BQ, H, Q = self.positions_BQ.to(q.device), k.shape[1], q.shape[2]
        q_BHGQD, geometry = rearrange(q, "b (h g) q d -> b h g q d", h=H), bound_adapter.geometry(q.device)
        positions_BHQ, n = positions_BQ[:, None].expand(-1, H, -1), self.whole  # n: first rows, of which none lacks a key
        if not geometry.plain or geometry.slopes_HG is not None or (geometry.sliding is not None and geometry.sliding < n):
            n = 0  # a plain causal mask is not enough for the first rows either
        deaths_BHQ = self._find_deaths(layer, positions_BQ) if n < Q else None
        keys = Keys(k, v, positions_BHQ, self.padded, 0, self.ordered, deaths_BHT=deaths_BHQ)
        out = None if deaths_BHQ is None else self._by_kernels(q_BHGQD, keys, positions_BQ, geometry)
        if out is None:
            out = _by_torch(q_BHGQD, keys, positions_BQ, geometry, n)
        return rearrange(out, "b h g q d -> b q (h g d)")

    def _by_kernels(self, q_BHGQD: Tensor, keys: Keys, positions_BQ: Tensor, geometry: Geometry) -> Tensor | None:
        """Return the output [B,H,G,Q,D] of kernels that hide each key from its death (eviction) on, for `attend`.

        None if no kernel serves the case, or its first launch fails: then torch computes it. Gradients flow through `_Kernels`.
        """
        _, _, group, Q, head_dim = q_BHGQD.shape
        case = Case(
            device=q_BHGQD.device.type, dtype=q_BHGQD.dtype, head_dim=head_dim, group=group, padding=self.padded,
            alibi=geometry.slopes_HG is not None, window=geometry.sliding is not None and geometry.sliding < Q, gradients=True,
            special=geometry.special, value_dim=keys.v_BHTD.shape[-1],
        )  # fmt: skip
        name = self.choice.of("replay", case)  # and records the choice
        if name == "torch":
            return None
        inputs = q_BHGQD, keys.k_BHTD, keys.v_BHTD
        return self.choice.attempt(
            "replay", case, functools.partial(_Kernels.apply, *inputs, keys, positions_BQ, geometry, name, case)
        )

    def _find_deaths(self, layer: int, positions_BQ: Tensor) -> Tensor:
        """Return each column's death, the position [B,H,Q] of the first query that no longer saw its token; NEVER if none.

        `attend` calls it in each layer. `text_B` chooses each row's text in the record; tokens after its end never die.
        """
        deaths_BHT = self.record.deaths[layer].to(positions_BQ.device)[self.text_B.to(positions_BQ.device)]
        T = deaths_BHT.shape[-1]
        index_BHQ = positions_BQ.clamp(0, T - 1)[:, None].expand(-1, deaths_BHT.shape[1], -1)
        return deaths_BHT.gather(-1, index_BHQ).masked_fill(positions_BQ[:, None] >= T, NEVER)


class _Kernels(torch.autograd.Function):
    """Attention of a replay by a backend's kernels; their gradients are computed by torch if their first launch fails."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry, name: str, case: Case
    ) -> Tensor:
        """Attend in a layer of a replay by kernels (`_by_kernels` applies it), and save in `ctx` what `backward` needs."""
        attended = backend(name).attend(q, keys, rows_BQ, geometry)
        ctx.save_for_backward(q, k, v, attended.out, attended.lse)
        ctx.rest = keys.positions_BHT, keys.deaths_BHT, keys.may_have_empty, keys.ordered, rows_BQ, geometry, name, case
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v of a replay in training, by kernels, or by torch if these cannot be launched.

        Autograd calls it. A query sees the keys that were not evicted when its text was recorded: `deaths` has the position of
        the first that no longer sees a key. A failed launch is noted in `refusals.known`. None: for the five others.
        """
        (q, k, v, out, lse), (positions, deaths, holes, ordered, rows_BQ, geometry, name, case) = ctx.saved_tensors, ctx.rest
        keys = Keys(k, v, positions, holes, 0, ordered, deaths_BHT=deaths)
        run = functools.partial(backend(name).gradients, q, keys, rows_BQ, geometry, Attended(out, lse), grad)
        gradients = refusals.attempt(f"{name} replay gradients", case, run, backend(name).advice)
        if gradients is None:  # later replays choose torch for forward, too
            refusals.known[f"{name} replay", case] = refusals.known[f"{name} replay gradients", case]
            gradients = _gradients_by_torch(q, keys, rows_BQ, geometry, grad)
        return *gradients, None, None, None, None, None


def _by_torch(q_BHGQD: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry, whole: int = 0) -> Tensor:
    """Return a replay's output [B,H,G,Q,D], computed by torch: a query sees no key that was evicted before it.

    `ReplayPass.attend` calls it where no kernel can, `_gradients_by_torch` once more. whole: number of first queries that see
    all keys before them, which costs no mask. deaths_BHT: from which position on a key is evicted.
    """
    outs, n = [], whole
    if n:
        first = replace(keys.columns(0, n), columns_before=0, may_have_empty=False, ordered=True, deaths_BHT=None)
        outs.append(torch_backend.attend(q_BHGQD[:, :, :, :n], first, rows_BQ[:, :n], geometry)[0])
    if n < q_BHGQD.shape[3]:
        outs.append(torch_backend.attend(q_BHGQD[:, :, :, n:], replace(keys, columns_before=n), rows_BQ[:, n:], geometry)[0])
    return torch.cat(outs, 3)


def _gradients_by_torch(q: Tensor, keys: Keys, rows_BQ: Tensor, geometry: Geometry, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, keys and values by torch, which computes the attention anew, for `_Kernels.backward`.

    Gradients of padding's output are set to 0.
    """
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, keys.k_BHTD, keys.v_BHTD)]
        out = _by_torch(leaves[0], replace(keys, k_BHTD=leaves[1], v_BHTD=leaves[2]), rows_BQ, geometry)
        return torch.autograd.grad(out, leaves, grad.masked_fill((rows_BQ < 0)[:, None, None, :, None], 0.0))
