"""Samples that run together, and known answers fed to a model row by row.

Dimension key: B rows, T tokens, A answers of a row, W tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kvpatch import get_policy
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.policies.decoding import SampledAttention
from kvpatch.policies.scores import GumbelSoftmax, Random
from tools.training import tasks

from .task import Sample, Setting, Subject, batches

ROWS_PER_DRAW = 8
"""Samples that may lose the same places: enough to run together, where what counts lies at other places in each."""


@dataclass(frozen=True)
class Known:
    """A sequence whose answers are known. rows: a Batch of one. draw: samples of another one lose other places."""

    rows: tasks.Batch
    draw: int

    @property
    def shape(self) -> Hashable:
        """What rows must share to be fed together."""
        return self.rows.tokens_BT.shape, self.rows.prompt_length, tuple(self.rows.answers_AW.flatten().tolist())


def noisy(setting: Setting) -> bool:
    """Whether the policy draws random numbers.

    They belong to positions, and rows under one seed share them: all such rows lose the same places. So the samples of
    a noisy policy take several seeds, and always the same, however many rows run at a time.
    """
    return setting.policy != "full" and isinstance(get_policy(setting.policy).score, Random | GumbelSoftmax | SampledAttention)


def together(samples: list[Sample], size: int, setting: Setting) -> Iterator[tuple[list[Sample], int]]:
    """Samples in order, at most `size` at a time and of one shape, with the number of the draw that they take.

    `sample.data` has a `shape` and a `draw`.
    """
    apart = noisy(setting)

    def key(sample: Sample) -> Hashable:
        return sample.data.shape, sample.data.draw if apart else 0

    for _, same in groupby(samples, key):
        for part in batches(list(same), size):
            yield part, part[0].data.draw if apart else 0


def seed_of(seed: int, draw: int) -> int:
    """The seed of a policy's noise: another for each draw, and for each seed of the samples."""
    return 100_003 * seed + draw


def feed_answers(
    subject: Subject, setting: Setting, samples: list[Sample], size: int, seed: int
) -> Iterator[tuple[Sample, Tensor]]:
    """Which answers of each sample's row are right, bool [A]. The prompt is read at once, all that follows one by one.

    The true tokens are fed: an answer that is right throughout is the one that greedy decoding gives. A token alone is
    a decode step, so policies that evict once leave a question behind the prompt whole, and under the others the budget
    holds.
    """
    for part, draw in together(samples, size, setting):
        first = part[0].data.rows
        tokens_BT = torch.cat([sample.data.rows.tokens_BT for sample in part])
        batch = tasks.Batch(tokens_BT, first.prompt_length, first.answers_AW)
        told = setting.told(tokens_BT.shape[1] - 1 - batch.prompt_length)
        with told.patched(subject.model, seed_of(seed, draw)):
            fed = feed(subject.model, tokens_BT[:, :-1].to(subject.model.device), batch.prompt_length)
        yield from zip(part, batch.correct(fed.logits_BSV.argmax(-1).cpu()), strict=True)
