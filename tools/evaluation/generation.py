"""Text under a budget beside the text of the full cache: summaries, contexts written again, answers to instructions.

RoCo [5, Tables 2 to 5] takes what the full cache generates as the reference, so that the model's own quality does not
count; Keyformer [4.1, Figures 7 and 8, Table 3] takes people's. Here is both: `rouge1 ... meteor` and `agree` are
against the full cache's text, `ref_...` against references where there are any. The headline is ROUGE-L against the
full cache: with ROUGE-1 and BLEU it is what all of RoCo's tables have, and it heeds the order of words. A text that is
the full cache's own scores 1 everywhere.

Everything is generated greedily [RoCo 5.1.5]. The shipped models summarize (which value stood beside each mark? half
the words are the marks) and reconstruct (all tokens again) in the words of tools/training/tasks.py, or go on from Python
source. Your own prompts come with --data: a file (see data.py) or the name of a data set. Long ones lose their middle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor

from kvpatch.errors import KVPatchError
from tools.training import tasks, train

from . import data, templates, textmetrics
from .greedy import Tokens, generate, number
from .task import FULL, POLICIES, PYTHON, Request, Sample, Setting, Subject, Task, digest
from .together import ROWS_PER_DRAW, seed_of, together

_AGAINST_FULL = {name: f"{words}, against the full cache's text" for name, words in textmetrics.WORDS.items()}
_AGAINST_REFERENCE = {f"ref_{name}": f"{words}, best over the references" for name, words in textmetrics.WORDS.items()}
_OWN_DATA = "give --data FILE.jsonl with your own (tools/evaluation/data.py says what is in it)."


@dataclass(frozen=True)
class Asked:
    """A prompt, how many tokens may follow, and what should. draw: see together.py."""

    ids: Tokens
    new: int
    references: tuple[str, ...]
    where: str
    draw: int

    @property
    def shape(self) -> int:
        """Rows of a batch write equally many tokens: a longer text beside them might not fit into the positions."""
        return self.new


class Generation(Task):
    """new: tokens that are generated from prompts of the user's own."""

    metric = "rougeL"
    metrics: ClassVar[dict[str, str]] = (
        _AGAINST_FULL | {"agree": "share of places where the token is the full cache's"} | _AGAINST_REFERENCE
    )
    options: ClassVar[dict[str, Any]] = {"max_new_tokens": None, "template": "auto", "schedule": "prompt"}
    new: ClassVar[int] = 128

    def __init__(self) -> None:
        self._full: WeakKeyDictionary[Any, dict[str, Tokens]] = WeakKeyDictionary()

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        schedule = {"schedule": self.option(request, "schedule")}
        settings = super().settings(request, subject)
        return [one if one is FULL else replace(one, options=one.options | schedule) for one in settings]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        tokenizer, count = templates.tokenizer_of(subject, self.name), request.count or self.count
        if request.data is None:
            return self._made(subject, count, seed, request)
        new = number(self, request, "max_new_tokens", self.new)
        around = templates.frame(self.option(request, "template"), tokenizer, *templates.INSTRUCTIONS[self.name])
        found, lengths = [], []
        for i, row in enumerate(data.rows(request.data, count)):
            ids, _ = templates.encode(subject, around, row.prompt)
            lengths.append(len(ids))
            ids, _ = templates.fit(subject, ids, new)
            found.append(self._sample(i, ids, new, self._references(row), row.where))
        templates.say_cut(subject, lengths, new)
        return found

    def _references(self, row: data.Row) -> tuple[str, ...]:
        return row.references

    def _sample(self, i: int, ids: Tokens, new: int, references: tuple[str, ...], where: str) -> Sample:
        asked = Asked(ids, new, references, where, i // ROWS_PER_DRAW)
        return Sample(str(i), len(ids), asked, {}, digest(ids, new, references))

    def _made(self, subject: Subject, count: int, seed: int, request: Request) -> list[Sample]:
        """Samples where the user gave none."""
        raise NotImplementedError

    def _words(self, subject: Subject, batch: tasks.Batch, request: Request) -> list[Sample]:
        """Rows of tools/training/tasks.py: the context and what asks for it, and as reference what should follow."""
        if not subject.synthetic:
            raise KVPatchError(f"{subject.name} has not learned {self.name} in tools/training/tasks.py: {_OWN_DATA}")
        new = number(self, request, "max_new_tokens", batch.continuation_BT.shape[1])
        decode = templates.tokenizer_of(subject, self.name).decode
        rows = zip(batch.prompt_BT.tolist(), batch.continuation_BT.tolist(), strict=True)
        return [self._sample(i, ids, new, (decode(tail),), str(i)) for i, (ids, tail) in enumerate(rows)]

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        own = self._own(subject, samples, request.batch)
        full_itself = ((sample, own[sample.digest]) for sample in samples)
        written = self._written(subject, samples, setting, request.batch, seed)
        for sample, tokens in full_itself if setting.policy == "full" else written:
            yield self._values(subject, sample, tokens, own[sample.digest])

    def _written(
        self, subject: Subject, samples: list[Sample], setting: Setting, size: int, seed: int
    ) -> Iterator[tuple[Sample, Tokens]]:
        for part, draw in together(samples, size, setting):
            with setting.patched(subject.model, seed_of(seed, draw)):
                texts = generate(subject, [sample.data.ids for sample in part], part[0].data.new)
            yield from zip(part, texts, strict=True)

    def _own(self, subject: Subject, samples: list[Sample], size: int) -> dict[str, Tokens]:
        """The full cache's tokens by digest. They are generated again where an earlier run is gone on from, for its
        lines have the text alone, which another encoding may divide differently."""
        known = self._full.setdefault(subject.model, {})
        missing = [sample for sample in samples if sample.digest not in known]
        known |= {sample.digest: tokens for sample, tokens in self._written(subject, missing, FULL, size, 0)}
        return known

    def _values(self, subject: Subject, sample: Sample, tokens: Tokens, own: Tokens) -> dict[str, Any]:
        decode, where = templates.tokenizer_of(subject, self.name).decode, sample.data.where
        text, wanted = (decode(row, skip_special_tokens=True) for row in (tokens, own))
        if text == wanted:
            values: dict[str, Any] = dict.fromkeys(textmetrics.names(), 1.0)
        elif not wanted.strip():
            values = dict.fromkeys(textmetrics.names(), 0.0)
        else:
            values = dict(textmetrics.scores(text, [wanted], where))
        same = sum(mine == its for mine, its in zip(tokens, own, strict=False))
        values |= {"agree": same / max(len(tokens), len(own)), "text": text}
        if sample.data.references:
            found = textmetrics.scores(text, sample.data.references, where)
            values |= {f"ref_{name}": value for name, value in found.items()}
        return values


class Summarize(Generation):
    """Eviction after the prompt [RoCo]; `-o schedule=both` goes on while the text is written [Keyformer]."""

    name, about = "summarize", "A summary under a budget, beside the full cache's and the reference."
    source = "[RoCo 5, Table 2, Figure 4; Keyformer 4.1, Figures 7, 8, Table 3]"

    def _made(self, subject: Subject, count: int, seed: int, request: Request) -> list[Sample]:
        return self._words(subject, tasks.summary(random.Random(f"{self.name} {seed}"), count, in_prompt=True), request)


class Reconstruct(Generation):
    """The reference is the context itself."""

    name, about = "reconstruct", "The context written again from a cache under a budget."
    source = "[RoCo 5, Table 3]"
    new = 512

    def _references(self, row: data.Row) -> tuple[str, ...]:
        return (row.prompt,)

    def _made(self, subject: Subject, count: int, seed: int, request: Request) -> list[Sample]:
        return self._words(subject, tasks.copy(random.Random(f"{self.name} {seed}"), count), request)


@cache
def _held_out(tokenizer: Any) -> Tensor:
    return train.text_stream(tokenizer, train.python_sources(held_out=True))


class Instruct(Generation):
    """Eviction of generated tokens alone: the prompt stays whole, and k counts generated tokens. By default the
    language model goes on from 128 tokens of Python that it has not seen; the reference is how the file goes on."""

    name, about = "instruct", "A long answer, whose own tokens are evicted; k counts those that stay."
    source = "[RoCo 5, Tables 4, 5]"
    new = 256
    models = (PYTHON,)
    policies = tuple(name for name in POLICIES if not name.endswith(("snapkv", "adakv")))  # those score prompts alone
    budgets = (16, 32, 48, 64)
    options: ClassVar[dict[str, Any]] = Generation.options | {"schedule": "decode"}

    def _made(self, subject: Subject, count: int, seed: int, request: Request) -> list[Sample]:
        if not subject.python:
            raise KVPatchError(f"{subject.name} has no prompts of its own for {self.name}: {_OWN_DATA}")
        new, rng = number(self, request, "max_new_tokens", 96), random.Random(f"{self.name} {seed}")
        tokenizer: Any = subject.tokenizer
        stream = _held_out(tokenizer)
        starts = [rng.randrange(len(stream) - train.TEXT_LENGTH) for _ in range(count)]
        rows = train.text_rows(stream, starts, tokenizer.bos_token_id).tolist()
        tails = [tokenizer.decode(row[128 : 128 + new], skip_special_tokens=True) for row in rows]
        return [self._sample(i, row[:128], new, (tails[i],), str(i)) for i, row in enumerate(rows)]
