"""What a budget costs a language model in nats per token [RoCo Figure 5].

A window of text is read in one of two ways, and the loss of its last `stride` tokens is counted: the same tokens in
both ways and under every budget. A budget's share is of the whole window.

    block   one pass that evicts after every `block` tokens, from the first block on; block=1 is token by token
    token   all but the last `stride` tokens are a prompt, the others come one by one, with eviction at each
            (schedule="both" unless another is given: policies that only know prompts, such as snapkv, do not run)

RoCo evicts while a text is read; `block` is that. Windows start `stride` tokens apart, so that no token is counted
twice, and the samples are windows drawn from all. Each begins with <bos> where the tokenizer has one.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpatch.errors import KVPatchError
from kvpatch.evaluation.teacher_forcing import feed, positions_of, wide
from kvpatch.policies.budgets import share
from tools.training import train

from .data import documents
from .task import FULL, PYTHON, Request, Sample, Setting, Subject, Task, digest
from .together import ROWS_PER_DRAW, seed_of, together

WAYS = ("block", "token")  # what does not run token by token is measured block by block first
LONGEST = 2048
MOST_LOGITS = 2**28
"""Numbers held at a time: a large vocabulary takes fewer rows together."""


@dataclass(frozen=True)
class Window:
    """ids_T: the text. counted: how many of its last tokens. draw: see together.py."""

    ids_T: Tensor
    counted: int
    way: str
    draw: int

    @property
    def shape(self) -> Hashable:
        return len(self.ids_T), self.counted, self.way


def texts_of(subject: Subject, data: str | None) -> list[Tensor]:
    """Token ids of the documents of `data`, else of the files of Python's library that llama-python never saw.

    Raises:
        KVPatchError: the model reads no text, or there is none.
    """
    tokenizer: Any = subject.tokenizer
    if tokenizer is None:
        raise KVPatchError(f"{subject.name} has no tokenizer, and perplexity needs text: give a model with one.")
    if subject.synthetic:
        raise KVPatchError(f"{subject.name} is no language model: give --models llama-python, or a model of your own.")
    if data is not None:
        texts = documents(data)
    elif subject.python:
        return [train.text_stream(tokenizer, train.python_sources(held_out=True))]
    else:
        texts = ["\n".join(train.python_sources(held_out=True))]
    return [torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in texts]


def windows(texts: list[Tensor], own: int, stride: int) -> list[tuple[int, int]]:
    """Text and first token of every window of `own` tokens."""
    return [(i, start) for i, ids in enumerate(texts) for start in range(0, len(ids) - own + 1, stride)]


class Perplexity(Task):
    name = "perplexity"
    about = "Nats per token of a language model that reads under a budget."
    source = "[RoCo Figure 5]"
    metric = "nats"
    better = "lower"
    split = ("way",)
    metrics: ClassVar[dict[str, str]] = {
        "nats": "nats per counted token, a window's mean; perplexity is exp of the mean over windows"
    }
    models = (PYTHON,)
    count = 48
    options: ClassVar[dict[str, Any]] = {"window": None, "stride": None, "block": 16}

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """`count` windows, each in both ways.

        Raises:
            KVPatchError: no such windows, or a model that reads no text.
        """
        texts = texts_of(subject, request.data)
        window, stride = self.sizes(subject, request)
        bos = subject.tokenizer.bos_token_id  # type: ignore[union-attr]
        own = window - (bos is not None)
        found = windows(texts, own, stride)
        if not found:
            longest = max(map(len, texts)) + window - own
            raise KVPatchError(f"No text has {window} tokens: give -o window={longest} or less, or longer texts.")
        random.Random(f"perplexity {seed}").shuffle(found)
        samples = []
        for way in WAYS:
            for index, (i, start) in enumerate(found[: request.count or self.count]):
                ids_T = texts[i][start : start + own]
                ids_T = ids_T if bos is None else F.pad(ids_T, (1, 0), value=bos)
                data = Window(ids_T, stride, way, index // ROWS_PER_DRAW)
                samples.append(Sample(f"{way}/{i}/{start}", window, data, {"way": way}, digest(ids_T, stride)))
        return samples

    def sizes(self, subject: Subject, request: Request) -> tuple[int, int]:
        """Tokens of a window, and how many of them count."""
        limit = positions_of(subject.model)
        trained_on = train.RECIPES[subject.recipe].length if subject.python else limit
        usual = min(trained_on or LONGEST, LONGEST)
        window = usual if (given := self.option(request, "window")) is None else given
        if not isinstance(window, int) or window < 2 or (limit is not None and window > limit):
            raise KVPatchError(f"window={window}: {subject.name} has {limit} positions; give -o window={usual}.")
        stride = window // 2 if (given := self.option(request, "stride")) is None else given
        if not isinstance(stride, int) or not 0 < stride < window:
            raise KVPatchError(f"stride={stride} must be from 1 to {window - 1}; give -o stride={window // 2}.")
        return window, stride

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        block = self.option(request, "block")
        for way in WAYS:  # samples are in this order
            here = [sample for sample in samples if sample.data.way == way]
            if not here:
                continue
            counted, vocabulary = here[0].data.counted, subject.model.get_input_embeddings().num_embeddings
            size = max(1, min(request.batch, MOST_LOGITS // (vocabulary * counted)))
            for part, draw in together(here, size, setting):
                ids_BT = torch.stack([sample.data.ids_T for sample in part]).to(subject.model.device)
                own = in_way(setting, way, ids_BT.shape[1], block).told(counted - 1)
                with own.patched(subject.model, seed_of(seed, draw)):
                    nats_BC = nats(subject.model, ids_BT, counted, way)
                yield from ({self.metric: one} for one in nats_BC.mean(1).tolist())


def in_way(setting: Setting, way: str, window: int, block: int) -> Setting:
    """The setting in one of the two ways. A share of the window becomes tokens: the prompt is less than a window."""
    if setting.policy == FULL.policy:
        return setting
    given = {"block": block} if way == "block" else {"schedule": "both"}
    k = setting.k
    tokens = max(1, share(k, window)) if isinstance(k, float) and 0 < k < 1 else k
    return replace(setting, k=tokens, options={**given, **setting.options})


@torch.no_grad()
def nats(model: Any, ids_BT: Tensor, counted: int, way: str) -> Tensor:
    """Cross entropy of the last `counted` tokens, [B,C], under whatever patch is in force."""
    n = ids_BT.shape[1] - counted
    if way == "token":
        logits_BCV = feed(model, ids_BT[:, :-1], n).logits_BSV
    else:
        fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
        given = {"logits_to_keep": counted + 1} if fewer else {}
        logits_BCV = model(ids_BT, use_cache=False, **given).logits[:, -counted - 1 : -1]
    return F.cross_entropy(wide(logits_BCV).mT, ids_BT[:, n:], reduction="none")
