"""How is a budget divided? Over layers once per prompt, over the KV heads of a layer where a prompt or a block ends.

Both are exact: what one layer or head gets more, another gets less, and the sum is the uniform budget's to the token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import share
from .parallel import WHOLE, Parallel
from .selection import FIRST, LAST, in_top


@dataclass(frozen=True)
class Pyramid:
    """Budgets that fall linearly from the first layer to the last [PyramidKV].

    The last layer gets budget / beta, but no less than `least` tokens (the observation window and one more), and their mean
    is the uniform budget. Differs from the paper: the total is exact to the token (largest remainders first); where the
    first layer's share would exceed the prompt, the slope is made flatter, as in the authors' code.
    """

    beta: int | float = 20

    def check(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 1 <= self.beta < float("inf"):
            raise KVPatchError(f"beta={self.beta!r} must be a number of at least 1: the last layer gets budget / beta.")

    def split(self, budget: int, n_layers: int, least: int, most: int | None) -> tuple[int, ...]:
        """Tokens of each layer.

        budget: the uniform one. least: of the last layer, if the budget allows. most: tokens that a layer can hold at
        all, or None.
        """
        return _split(self.beta, budget, n_layers, least, most)


@functools.lru_cache(maxsize=1024)
def _split(beta: int | float, budget: int, n_layers: int, least: int, most: int | None) -> tuple[int, ...]:
    last = max(budget / Fraction(beta), Fraction(min(least, budget)))
    if most is not None:
        last = max(last, Fraction(2 * budget - most))
    last = min(last, Fraction(budget))
    step = (2 * budget - 2 * last) / max(n_layers - 1, 1)
    exact = [2 * budget - last - step * layer for layer in range(n_layers)] if n_layers > 1 else [Fraction(budget)]
    tokens = [int(value) for value in exact]
    by_remainder = sorted(range(n_layers), key=lambda layer: (tokens[layer] - exact[layer], layer))
    for layer in by_remainder[: n_layers * budget - sum(tokens)]:
        tokens[layer] += 1
    return tuple(tokens)


@dataclass(frozen=True)
class Adaptive:
    """The heads of a layer share one budget by their scores [AdaKV; CriticalKV Algorithm 2].

    Each head first gets `floor` of the uniform budget by its own top scores (its protected tokens among them, and
    never fewer than it must protect); the rest of H * budget goes to the highest scores of all heads together, ties to the
    higher position, then to the lower head. Allocated where a prompt (or a block) ends; while decoding, a head keeps
    its own budget. Differs from the paper: the floor is hard and the total exact, where the authors blend and round.
    """

    floor: int | float = 0.2
    schedules: ClassVar[tuple[str, ...]] = ("prompt", "both")

    def check(self) -> None:
        if isinstance(self.floor, bool) or not isinstance(self.floor, int | float) or not 0 <= self.floor <= 1:
            raise KVPatchError(f"floor={self.floor!r} must be a share of the uniform budget, in [0, 1].")

    def counts(
        self,
        order_BHT: Tensor,
        empty_BHT: Tensor | None,
        fixed_BH: Tensor,
        budget_B: list[int],
        nominal_B: list[int],
        everyone: Parallel = WHOLE,
    ) -> Tensor:
        """Tokens that each head may keep, int64 [B,H], H the heads of the whole layer.

        order: the selection's (see selection.py); of heads that several processes have (`everyone`) this one's, as is `empty`.
        fixed: tokens of each head of the layer that are kept outside the budget. nominal: protected sizes, clamped inside the
        budget.
        """
        order_BHT = everyone.heads(order_BHT, empty=FIRST)
        if empty_BHT is not None:
            empty_BHT = everyone.heads(empty_BHT, empty=True)
        B, H, T = order_BHT.shape
        at_least = [max(share(float(self.floor), b), p) for b, p in zip(budget_B, nominal_B, strict=True)]
        least_BH = fixed_BH + torch.tensor(at_least, device=order_BHT.device)[:, None]
        own = in_top(order_BHT, least_BH[..., None], None)
        order_BHT = order_BHT.masked_fill(own, LAST)
        if empty_BHT is not None:
            order_BHT = order_BHT.masked_fill(empty_BHT, FIRST)
        # stable: of equal entries the lower head's comes first
        ranked, index = order_BHT.flatten(1).sort(dim=-1, descending=True, stable=True)
        total_B1 = fixed_BH.sum(-1, keepdim=True) + H * torch.tensor(budget_B, device=order_BHT.device)[:, None]
        taken = (torch.arange(H * T, device=order_BHT.device) < total_B1) & (ranked > FIRST)
        return torch.zeros(B, H, dtype=torch.long, device=order_BHT.device).scatter_add_(1, index // T, taken.long())
