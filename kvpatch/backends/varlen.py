"""A decode step over heads of different lengths as one variable-length flash-attention call: every KV head is a sequence.

The kernel is FlashAttention 2 as torch ships it for CUDA. Sequence i of the flat rows starts at cum_seq_k[i] and ends after
seqused_k[i] tokens, so that free slots behind a head's own need no mask; its one query token has the group's G heads.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..ragged import Extents

_LOG = logging.getLogger(__name__)
_refused: list[str] = []


def serves(q_BHGD: Tensor) -> bool:
    """Whether the kernel takes these queries: a half dtype on CUDA, a head size of at most 256 that is a multiple of 8."""
    D = q_BHGD.shape[-1]
    half = q_BHGD.dtype in (torch.float16, torch.bfloat16)
    return q_BHGD.device.type == "cuda" and half and D % 8 == 0 and D <= 256 and not _refused and not q_BHGD.requires_grad


def step(q_BHGD: Tensor, k_RD: Tensor, v_RD: Tensor, extents: Extents, grown: int, scale: float) -> Tensor | None:
    """Output [B,H,G,D]; each head attends to the first `filled + grown` slots of its stretch. None where the kernel refuses."""
    B, H, G, D = q_BHGD.shape
    order, starts, filled = extents.sequences()
    once = torch.arange(B * H + 1, dtype=torch.int32, device=q_BHGD.device)
    longest = max(extents.filled) + grown
    try:
        out_NGD = torch.ops.aten._flash_attention_forward(
            q_BHGD.flatten(0, 1)[order],
            k_RD[:, None],
            v_RD[:, None],
            once,
            starts,
            1,
            longest,
            0.0,
            False,
            False,
            scale=scale,
            seqused_k=filled + grown,
        )[0]
    except RuntimeError as error:
        _refused.append(str(error))
        _LOG.warning("Attention over heads of different lengths goes head by head: flash attention refused (%s).", error)
        return None
    out = torch.empty_like(out_NGD)
    out[order] = out_NGD
    return out.view(B, H, G, D)
