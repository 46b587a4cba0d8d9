"""Training rows, made in turn, or ahead of time by another process while a GPU computes.

Rows are made by Python loops. On the CPU that costs little beside a step; a GPU would wait for them.
Dimension key: B rows, T tokens.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

Stages = Sequence[tuple[int, ...]]
"""Of every stage of a curriculum what its rows are made with: row length, or nodes and exits, and tokens per step."""

Make = Callable[..., tuple[Tensor, Tensor]]
"""From a random.Random and what a stage names to tokens and loss weights [B, T]."""

Rows = Callable[[int, int], tuple[Tensor, Tensor]]
"""From step and stage to tokens and loss weights [B, T]."""


class Ahead:
    """`make(step, stage)` for this step and the next ones, called in another process.

    Which stage the next steps belong to is a guess: what was made for a stage that has been passed is thrown away, so
    the results are those of calling `make` in turn.
    """

    def __init__(self, make: Callable[[int, int], Any], depth: int = 4) -> None:
        self.make, self.depth = make, depth
        self.pending: dict[tuple[int, int], Future[Any]] = {}
        # a forked process has imported everything already; it must be forked before this one touches the GPU
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
        self.request(1, 0)

    def request(self, step: int, stage: int) -> None:
        wanted = [(step + i, stage) for i in range(self.depth)]
        for passed in self.pending.keys() - set(wanted):
            self.pending.pop(passed).cancel()
        for key in wanted:
            if key not in self.pending:
                self.pending[key] = self.pool.submit(self.make, *key)

    def __call__(self, step: int, stage: int) -> Any:
        self.request(step, stage)
        return self.pending[step, stage].result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class InTurn:
    """Rows made when they are asked for; `rng` says where their sequence is."""

    def __init__(self, make: Make, stages: Stages, seed: int) -> None:
        self.make, self.stages, self.rng = make, stages, random.Random(seed)

    def __call__(self, step: int, stage: int) -> tuple[Tensor, Tensor]:
        return self.make(self.rng, *self.stages[stage])


def batch(make: Make, stages: Stages, seed: int, step: int, stage: int) -> tuple[Any, Any]:
    """The rows of one step, as arrays: they travel between processes by value. Each step has a seed of its own."""
    tokens_BT, weights_BT = make(random.Random(f"{seed}/{stage}/{step}"), *stages[stage])
    return tokens_BT.numpy(), weights_BT.numpy()


@contextmanager
def training_rows(make: Make, stages: Stages, seed: int, device: str) -> Iterator[Rows]:
    """Where the rows of a training run come from. The rows of a CPU run and of a GPU run differ."""
    if device == "cpu":
        yield InTurn(make, stages, seed)
        return
    ahead = Ahead(partial(batch, make, stages, seed))

    def rows(step: int, stage: int) -> tuple[Tensor, Tensor]:
        tokens_BT, weights_BT = ahead(step, stage)
        return torch.from_numpy(tokens_BT).to(device), torch.from_numpy(weights_BT).to(device)

    try:
        yield rows
    finally:
        ahead.close()
