"""Samples that run together, and known answers fed to a model row by row.

Dimension key: B rows, T tokens, A answers of a row, W tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpatch import get_policy
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.policies.decoding import SampledAttention
from kvpatch.policies.scores import GumbelSoftmax, Random
from tools.training import tasks

from ..settings import Setting
from .task import UNPATCHED, Sample, patch, tell_length

ROWS, ROWS_PER_DRAW = 32, 8
"""Samples that run together, and those that may lose the same places: what counts lies at other places in each."""


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
    noise = Random | GumbelSoftmax | SampledAttention
    return setting != UNPATCHED and isinstance(get_policy(setting.row.policy).score, noise)


def together(samples: list[Sample], setting: Setting) -> Iterator[tuple[list[Sample], int]]:
    """Samples in order, `ROWS` at a time at most and of one shape, with the seed of the policy's noise.

    `sample.data` has a `shape` and a `draw`.
    """
    apart = noisy(setting)

    def key(sample: Sample) -> Hashable:
        return sample.data.shape, sample.data.draw if apart else 0

    for _, same in groupby(samples, key):
        whole = list(same)
        for start in range(0, len(whole), ROWS):
            part = whole[start : start + ROWS]
            yield part, part[0].data.draw if apart else 0


def feed_answers(model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[Tensor]:
    """Which answers of each sample's row are right, bool [A]. The prompt is read at once, all that follows one by one.

    The true tokens are fed: an answer that is right throughout is the one that greedy decoding gives. A token alone is
    a decode step, so policies that evict once leave a question behind the prompt whole, and under the others the budget
    holds.
    """
    for part, draw in together(samples, setting):
        first = part[0].data.rows
        tokens_BT = torch.cat([sample.data.rows.tokens_BT for sample in part])
        batch = tasks.Batch(tokens_BT, first.prompt_length, first.answers_AW)
        told = tell_length(setting, tokens_BT.shape[1] - 1 - batch.prompt_length)
        with patch(told, model, draw):
            fed = feed(model, tokens_BT[:, :-1], batch.prompt_length)
        yield from batch.correct(fed.logits_BSV.argmax(-1))
