"""Samples that run together, and known answers fed to a model row by row.

Dimension key: B rows, T tokens, A answers of a row, W tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
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


def together(samples: list[Sample], setting: Setting) -> Iterator[tuple[tasks.Batch, int]]:
    """Rows of the samples in order, `ROWS` at a time at most and of one shape, with the seed of the policy's noise.

    Random numbers of a policy belong to positions, and rows under one seed share them: all such rows lose the same places.
    So its samples take several seeds, and always the same, however many rows run at a time.
    """
    noise = Random | GumbelSoftmax | SampledAttention
    apart = setting != UNPATCHED and isinstance(get_policy(setting.row.policy).score, noise)

    def key(known: Known) -> tuple[Hashable, int]:
        return known.shape, known.draw if apart else 0

    for (_, draw), same in groupby((sample.data for sample in samples), key):
        rows = [known.rows for known in same]
        for start in range(0, len(rows), ROWS):
            tokens_BT = torch.cat([one.tokens_BT for one in rows[start : start + ROWS]])
            yield replace(rows[0], tokens_BT=tokens_BT), draw


def feed_answers(model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[Tensor]:
    """Which answers of each sample's row are right, bool [A]. The prompt is read at once, all that follows one by one.

    The true tokens are fed: an answer that is right throughout is the one that greedy decoding gives. A token alone is
    a decode step, so policies that evict once leave a question after the prompt whole, and under the others the budget
    holds.
    """
    for batch, draw in together(samples, setting):
        with patch(tell_length(setting, batch.continuation_BT.shape[1] - 1), model, draw):
            fed = feed(model, batch.tokens_BT[:, :-1], batch.prompt_length)
        yield from batch.correct(fed.logits_BSV.argmax(-1))
