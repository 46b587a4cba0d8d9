"""Calibration: one pass over text, piece by piece, that measures the queries of each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..hooks.target import Target
from ..patching import patched
from ..policies.calibration import Calibration, Recall
from ..policies.policy import Policy
from ..storage.calibration import made

_KEEPS_ALL = 1 << 20  # tokens, more than a piece of text has


@torch.no_grad()
def calibrate(model: Any, pieces: Sequence[Tensor], on_piece: Callable[[], None] = lambda: None) -> Calibration:
    """Measure the queries that a model asks over some text.

    Args:
        model: not patched.
        pieces: token ids [1,n] of pieces of text, each read by itself.
        on_piece: called after each.
    """
    target, squares = Target.find(model), dict[int, Tensor]()
    sums = dict[int, Tensor]()
    policy = Policy("calibration", Recall(max(piece.shape[1] for piece in pieces)))
    with patched(model, policy, _KEEPS_ALL) as patch:
        for piece in pieces:
            cache = patch.new_cache()
            model(piece, past_key_values=cache)
            for index, layer in enumerate(cache.layers):
                if layer.recent is not None:
                    _add(index, layer.recent.q_BHGWD[0][:, :, layer.recent.positions_BW[0] >= 0], sums, squares)
            on_piece()
    directions = {index: _direction(squares[index], sums[index]) for index in squares}
    return made(target.identity(), directions, sum(piece.shape[1] for piece in pieces))


def _add(index: int, q_HGWD: Tensor, sums: dict[int, Tensor], squares: dict[int, Tensor]) -> None:
    """Add the queries of a layer's piece, those of a group to their KV head's: sums [H,D], and of products [H,D,D]."""
    q = q_HGWD.flatten(1, 2).float()
    total, products = q.sum(1).double().cpu(), (q.transpose(1, 2) @ q).double().cpu()
    sums[index] = sums[index] + total if index in sums else total
    squares[index] = squares[index] + products if index in squares else products


def _direction(squares_HDD: Tensor, sum_HD: Tensor) -> Tensor:
    """Return the first right singular vectors [H,D], turned to the side of the mean."""
    first = torch.linalg.eigh(squares_HDD).eigenvectors[..., -1]  # in ascending order
    side = (first * sum_HD).sum(-1, keepdim=True)
    return (first * torch.where(side < 0, -1.0, 1.0)).float()
