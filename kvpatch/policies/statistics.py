"""Statistics: sums per cached key, over query rows and the query heads of a group.

A function takes a Block and the need (needs.Sums), and returns increments [N,M] over the block's rows; it sees every
attention probability of those rows exactly once. To add a statistic, set `STATISTICS["cubes"] = cubes` and name it in a need,
Sums("cubes"). Torch computes it; kernels compute only rows of type Statistic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..errors import KVPatchError, suggest
from .context import Block


@dataclass(frozen=True)
class Statistic:
    """Row of STATISTICS whose function kernels compute too.

    The kernel's name belongs to this function: if the row is replaced by another function, every backend computes that one.

    Attributes:
        function: computes the increments in torch.
        kernel: name of the same computation in kernels.
    """

    function: Callable[[Block, Any], Tensor]
    kernel: str

    def __call__(self, block: Block, need: Any) -> Tensor:
        return self.function(block, need)


def kernel_of(name: str) -> str | None:
    """Return the kernels' name of the statistic `name`, or None if only torch computes it."""
    row = STATISTICS[name]
    return row.kernel if isinstance(row, Statistic) else None


def check_names(names: tuple[str, ...], of: str) -> None:
    """Raise KVPatchError, for `Policy.__post_init__`, if a name is not in STATISTICS. of: the policy, for the message."""
    for name in names:
        if not callable(STATISTICS.get(name)):
            raise KVPatchError(
                f"Policy {of!r} sums the statistic {name!r}, which is no function in kvpatch.policies.statistics.STATISTICS."
                f"{suggest(name, STATISTICS)} Add it first: STATISTICS[{name!r}] = my_function, of (block, need)."
            )


def _sum_rows(block: Block, need: Any) -> Tensor:
    """Sum the probabilities that each key gets over a block's rows and the group's query heads, [N,M]: the statistic "sum"."""
    if block.grouped:
        return block.group_NRM.sum(1)
    return block.p_NGRM.flatten(1, 2).sum(1)  # one axis is summed faster than two


def _sum_squares(block: Block, need: Any) -> Tensor:
    """Sum over a block's rows, [N,M], the square of the probability averaged over the group: the statistic "squares"."""
    return block.group_NRM.square().sum(1) / block.p_NGRM.shape[1] ** 2


def _count_rows(block: Block, need: Any) -> Tensor:
    """Count the rows and query heads of a block that give a key [N,M] more than an even share (1 / number of keys).

    The statistic "count": `Call.sums` calls it for a block of a prompt's rows or a decode step where no kernel computes it.
    """

    def count(rows: slice) -> Tensor:
        ratio_NGRM = block.p_NGRM[:, :, rows] * block.keys_NR[:, None, rows, None]  # to an even share
        return ratio_NGRM.gt_(1.0).flatten(1, 2).sum(1)

    return _add_pieces(block, count)


def _sum_noisy(block: Block, need: Any) -> Tensor:
    """Sum softmax((x + noise) / tau) over queries, [N,M]: proportional to (p * exp(noise)) ** (1 / tau), p = softmax(x).

    The statistic "gumbel": `Call.sums` calls it for a block of a prompt's rows or a decode step where no kernel computes it.
    need: the NoisySums. fresh: each query draws noise; else exp(noise) is stored with each key (`noise_NMG`).
    """
    p, weight = block.p_NGRM, None
    if need.fresh:
        p = p * torch.exp(need.draw_for_rows(block))
    elif block.noise_NMG is not None:
        weight = rearrange(block.noise_NMG, "n m g -> n g 1 m").to(p.dtype)
    at_one = not isinstance(block.tau, Tensor) and block.tau == 1.0  # the temperature changes nothing
    if weight is not None and at_one:
        # column sums of p*w / rowsum(p*w) as two matrix-vector products, without a second matrix
        total = (p @ weight.transpose(-1, -2)).clamp_min(_TINY)
        return ((total.reciprocal().transpose(-1, -2) @ p) * weight).sum((1, 2))
    p = p if weight is None else p * weight
    if at_one:
        return (p / p.sum(-1, keepdim=True).clamp_min(_TINY)).sum((1, 2))

    def add(rows: slice) -> Tensor:
        """Sum over some of the block's rows, at a temperature other than 1."""
        # a row of padding is all -inf, so the softmax makes it NaN: set it to zero. A row that was NaN before stays NaN
        some_NGRM = p[:, :, rows]
        empty = some_NGRM.amax(-1, keepdim=True) == 0
        return some_NGRM.log().div_(block.tau).softmax(-1).masked_fill_(empty, 0.0).flatten(1, 2).sum(1)

    return _add_pieces(block, add)


def _sum_area(block: Block, need: Any) -> Tensor:
    """Sum over rows and group, [N,M], each probability times the share of windows that would miss the key.

    A row at position p could have a window of its 0 to p newest tokens; (p - key + 1) / (p + 1) of these lengths do not reach
    the key. The statistic "area": `Call.sums` calls it as `kvpatch calibrate` reads a text, for WholeHeads.
    """
    _, row_NR, key_NM = block.place()  # positions of query rows and of keys

    def weigh(rows: slice) -> Tensor:
        row_NR1 = row_NR[:, rows, None]
        weight_NRM = (row_NR1 - key_NM[:, None] + 1) / (row_NR1 + 1).clamp(min=1)
        return (block.p_NGRM[:, :, rows].sum(1) * weight_NRM).sum(1)

    return _add_pieces(block, weigh)


def _add_pieces(block: Block, increment: Callable[[slice], Tensor]) -> Tensor:
    """Add up the increments [N,M] of a few rows at a time on a CPU, where a whole block's temporary tensors are slow to make.

    `_count_rows`, `_sum_noisy` and `_sum_area` call it. increment(rows): computes the sum over a slice of the block's rows.
    """
    n, G, R, M = block.p_NGRM.shape
    size = max(1, _AT_ONCE // max(n * G * M, 1)) if block.p_NGRM.device.type == "cpu" else R
    total_NM = increment(slice(0, size))
    for start in range(size, R, size):
        total_NM += increment(slice(start, start + size))
    return total_NM


_AT_ONCE = 1 << 18  # probabilities: 1 MiB of float32, about a core's L2 cache
_TINY = 1e-30  # divisor of a row of padding, whose sum is zero
STATISTICS: dict[str, Callable[[Block, Any], Tensor]] = {
    "sum": Statistic(_sum_rows, kernel="sum"),
    "squares": Statistic(_sum_squares, kernel="squares"),
    "count": Statistic(_count_rows, kernel="count"),
    "gumbel": Statistic(_sum_noisy, kernel="gumbel"),
    "area": _sum_area,
}
