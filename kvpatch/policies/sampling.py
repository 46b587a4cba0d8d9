"""A sample of a prompt's query rows, from which a score's sums are estimated: reading all rows costs a second attention.

The rows of a pass are cut into blocks of ROWS, counted back from its newest row. The newest block is read, and of every r
blocks before it one, which the seed chooses; r is the least number with which about READ rows are read. So a pass of up to
READ rows is read whole, and beyond that the cost grows with the text, not with its square. A key's sum is that of the rows
read times the rows that see the key, over those of them that were read; the newest row sees all, so there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import noise

ROWS, READ = 16, 1024


def sample(rows_BQ: Tensor, seed: int, layer: int) -> Tensor:
    """Choose the rows to read.

    Args:
        rows_BQ: positions of a pass's rows, int64, ascending; -1 for padding.
        seed: the policy's seed.
        layer: index of the layer.

    Returns:
        Their columns [B,R], ascending; -1 in front, in texts that read fewer rows than others.
    """
    real = rows_BQ >= 0
    count_B1 = real.sum(-1, keepdim=True)
    every_B1 = ((count_B1 + READ - 1) // READ).clamp(min=1)
    block_BQ = (count_B1 - real.long().cumsum(-1)) // ROWS  # 0 is the newest
    group_BQ, place_BQ = (block_BQ - 1) // every_B1, (block_BQ - 1) % every_B1
    drawn_BQ = noise.uniform(seed, layer, torch.tensor(-1, device=rows_BQ.device), -1, group_BQ.clamp(min=0))
    chosen = real & ((block_BQ == 0) | (place_BQ == (drawn_BQ * every_B1).long()))
    column = torch.arange(rows_BQ.shape[1], device=rows_BQ.device)
    return torch.where(chosen, column, -1).topk(int(chosen.sum(-1).max())).values.flip(-1)


def factor(positions_BHT: Tensor, rows_BQ: Tensor, read_BR: Tensor, dtype: torch.dtype) -> Tensor:
    """Return by how much sums of this dtype over the rows read are scaled up, [B,H,T].

    positions_BHT: the keys'. rows_BQ, read_BR: positions of a pass's rows and of those read; -1 for padding.
    """
    flat = positions_BHT.flatten(1)
    seen, read = (rows.shape[1] - torch.searchsorted(rows.sort(-1).values, flat) for rows in (rows_BQ, read_BR))
    return (seen.to(dtype) / read.clamp(min=1)).view(positions_BHT.shape)
