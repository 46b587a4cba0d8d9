"""Which texts the measures of attention look at. Dimension key: B rows, T tokens of a text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpatch.errors import KVPatchError
from tools.training import tasks, train

from .task import Request, Sample, Subject, batches


def stream(subject: Subject, data: str | None) -> Tensor:
    """Real text as one sequence of token ids: the file `data`, else the held-out sources for the code model.

    Raises:
        KVPatchError: there is neither, no such file, or nothing to split it into tokens with.
    """
    if subject.tokenizer is None:
        raise KVPatchError(f"{subject.name} has no tokenizer, so no text can be read: save one beside the model.")
    if data is None and subject.python:
        return train.text_stream(subject.tokenizer, train.python_sources(held_out=True))
    if data is None:
        raise KVPatchError(f"{subject.name} does not know the synthetic words: give a text with --data FILE.txt.")
    if not Path(data).is_file():
        raise KVPatchError(f"--data {data} is no file: give a text in UTF-8.")
    return torch.tensor(subject.tokenizer(Path(data).read_text(encoding="utf-8"), add_special_tokens=False).input_ids)


def windows(subject: Subject, data: str | None, rng: random.Random, count: int, length: int) -> Tensor:
    """`count` windows of real text at random places, [B,T], each after <bos> where the tokenizer has one."""
    ids = stream(subject, data)
    bos = subject.tokenizer.bos_token_id  # type: ignore[union-attr]
    own = length - (bos is not None)
    if len(ids) < own:
        most = len(ids) + length - own
        raise KVPatchError(f"The text has {len(ids)} tokens, too few for windows of {length}: give -o length={most} or less.")
    starts = [rng.randrange(len(ids) - own + 1) for _ in range(count)]
    rows = torch.stack([ids[start : start + own] for start in starts])
    return rows if bos is None else F.pad(rows, (1, 0), value=bos)


def rows_of(subject: Subject, request: Request, seed: int, count: int, length: int) -> Tensor:
    """`count` texts of `length` tokens, [B,T]: recall and the answers to its questions, or windows of real text.

    Raises:
        KVPatchError: `length` is more than the model has positions for.
    """
    config = subject.model.config
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or length
    if length > most:
        raise KVPatchError(f"length={length}: {subject.name} has {most} positions; give -o length={most} or less.")
    rng = random.Random(seed)
    if request.data is not None or not subject.synthetic:
        return windows(subject, request.data, rng, count, length)
    questions = max(1, min(8, length // 32))
    return tasks.recall(rng, count, context=length - 5 * questions, questions=questions).tokens_BT


def alike(samples: list[Sample], size: int) -> Iterator[list[Sample]]:
    """Batches of at most `size` neighbours of one group that are equally long, so that none is padded."""
    for _, same in groupby(samples, key=lambda sample: (sample.n, len(sample.data[0]), sample.group)):
        yield from batches(list(same), size)
