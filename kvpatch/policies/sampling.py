"""A sample of a prompt's query rows, from which a score's sums are estimated: reading all rows costs a second attention.

The rows of a pass are cut into blocks of ROWS, counted back from its newest row. The newest block is read, and of every r
blocks before it one, which the seed chooses; r is the least number with which about READ rows are read. So a pass of up to
READ rows is read whole, and beyond that the cost grows with the text, not with its square. Every block but the newest is read
with probability 1/r and then counts r times: over all seeds, sums are on average those of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import noise

ROWS, READ = 16, 1024


def sample_rows(rows_BQ: Tensor, seed: int, layer: int) -> tuple[Tensor, Tensor]:
    """Choose about READ query rows whose attention `_attend_and_sample` sums (scores="sampled"), as a prompt is read. Pure.

    Rows are cut into blocks of ROWS: the newest is taken, and of every r before it one at random.

    Args:
        rows_BQ: positions of a pass's rows, int64, ascending; -1 for padding.
        seed: the policy's seed.
        layer: index of the layer.

    Returns:
        Their columns [B,R], ascending; the last ROWS are the newest block. Texts of which fewer rows are read have -1 in front.
        And r [B,1,1]: the weight of each row before the newest block in sums.
    """
    real = rows_BQ >= 0
    count_B1 = real.sum(-1, keepdim=True)
    every_B1 = ((count_B1 + READ - 1) // READ).clamp(min=1)
    block_BQ = (count_B1 - real.long().cumsum(-1)) // ROWS  # 0 is the newest
    group_BQ, place_BQ = (block_BQ - 1) // every_B1, (block_BQ - 1) % every_B1
    u_BQ = noise.uniform(seed, layer, torch.tensor(-1, device=rows_BQ.device), -1, group_BQ.clamp(min=0))
    chosen = real & ((block_BQ == 0) | (place_BQ == (u_BQ * every_B1).long()))
    column = torch.arange(rows_BQ.shape[1], device=rows_BQ.device)
    return torch.where(chosen, column, -1).topk(int(chosen.sum(-1).max())).values.flip(-1), every_B1[:, None]
