"""A replay: one pass over whole texts in which each query sees what it saw when they were recorded (cache/lifetimes.py)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..arch.bound import BoundAdapter
from ..backends import torch_backend
from ..backends.protocol import Keys
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
        self.settings, self.record, self.text_B, self.positions_BQ = settings, record, text_B, positions_BQ
        self.padded, self.ordered = padded, ordered
        self.whole = 0 if padded else min(int(record.first_N[text_B].min()), positions_BQ.shape[1])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bound_adapter: BoundAdapter) -> Tensor:
        """Attend by the record: q [B,H*G,Q,D], k and v [B,H,Q,D] with positions applied -> [B,Q,H*G*D]."""
        q, k = q.to(v.dtype), k.to(v.dtype)
        positions_BQ, H = self.positions_BQ.to(q.device), k.shape[1]
        q_BHGQD, geometry = rearrange(q, "b (h g) q d -> b h g q d", h=H), bound_adapter.geometry(q.device)
        positions_BHQ, n = positions_BQ[:, None].expand(-1, H, -1), self.whole
        if not geometry.plain or geometry.slopes_HG is not None or (geometry.sliding is not None and geometry.sliding < n):
            n = 0  # it needs masks too
        outs = []
        if n:
            keys = Keys(k[:, :, :n], v[:, :, :n], positions_BHQ[..., :n], False, 0, True)
            outs.append(torch_backend.attend(q_BHGQD[:, :, :, :n], keys, positions_BQ[:, :n], geometry)[0])
        if n < q.shape[2]:
            keys = Keys(k, v, positions_BHQ, self.padded, n, self.ordered, deaths_BHT=self._deaths(layer, positions_BQ))
            outs.append(torch_backend.attend(q_BHGQD[:, :, :, n:], keys, positions_BQ[:, n:], geometry)[0])
        return rearrange(torch.cat(outs, 3), "b h g q d -> b q (h g d)")

    def _deaths(self, layer: int, positions_BQ: Tensor) -> Tensor:
        """Return the death of each column's token [B,H,Q]; of tokens behind the record it is not known, and none sees them."""
        deaths_BHT = self.record.deaths[layer].to(positions_BQ.device)[self.text_B.to(positions_BQ.device)]
        T = deaths_BHT.shape[-1]
        at = positions_BQ.clamp(0, T - 1)[:, None].expand(-1, deaths_BHT.shape[1], -1)
        return deaths_BHT.gather(-1, at).masked_fill(positions_BQ[:, None] >= T, NEVER)
