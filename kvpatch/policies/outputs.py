"""The score of what attention gives out: how far the outputs of an observation window move if one token is lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .context import EvictionContext, Observed
from .needs import AnyNeed, WindowAttention
from .scores import ObservationWindow

_EPS = 1e-6  # of 1 - a, which is 0 where a row attends to one token alone


@dataclass(frozen=True)
class OutputChange(ObservationWindow):
    """Change of an observation window's outputs if a token is lost [DropKV].

    Without token i the other probabilities of row t grow by 1 / (1 - a[t,i]), so that its output o_t moves by
    a[t,i] / (1 - a[t,i]) (o_t - v_i). s[i] = the sum of the squared lengths of these moves over the last `window` rows t of the
    prompt, averaged over the query heads of the group, then pooled over neighbouring tokens, those of the window included.

    Differs from the paper: nothing that is known; pooling, and 1e-6 in the denominator, are those of the authors' code.

    Attributes:
        window: query rows in the observation window.
        kernel: odd number of neighbouring tokens that are pooled.
        pooling: "avg", "max", or None for no pooling.
    """

    pooling: str | None = "avg"

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (WindowAttention(self.window, self._reduce_rows, "sum", protected=True),)

    def _reduce_rows(self, rows: Observed) -> Tensor:
        """Return how far (squared) a window's outputs move if a key is lost, for each key: [N,M].

        `WindowAttention.read` has it called, as its `fold`, for each block of the window's rows as a prompt ends. The sum over
        rows t of (a / (1 - a))^2 |o_t - v_i|^2, with a the attention of row t to key i, multiplied out. N: KV heads of all
        batch rows. L: rows of all query heads that share one.
        """
        # differences of large numbers where a row looks at little else
        p_NGRM, v_NMD = rows.p_NGRM.double(), rows.values().double()
        out_NLD, p_NLM = p_NGRM @ v_NMD[:, None], p_NGRM.flatten(1, 2)
        out_NLD = out_NLD.flatten(1, 2)
        weight_NML = (p_NLM / (1 - p_NLM + _EPS)).square().transpose(1, 2)
        v_v = weight_NML.sum(-1) * v_NMD.square().sum(-1)
        v_o = ((weight_NML @ out_NLD) * v_NMD).sum(-1)
        o_o = (weight_NML @ out_NLD.square().sum(-1, keepdim=True)).squeeze(-1)
        return ((v_v - 2 * v_o + o_o).clamp_min(0) / p_NGRM.shape[1]).to(rows.p_NGRM.dtype)

    def _may_pool(self, position: Tensor, context: EvictionContext) -> Tensor:
        """Return True for all held tokens [B,H,T], those of the window too: their scores are pooled with their neighbours'."""
        return torch.ge(position, 0)
