"""The sixteen English sets of LongBench under a budget, with its prompts and measures [CriticalKV 4.5, D, H].

Two scenarios [CriticalKV 4.2]. regular: the whole prompt is compressed, as most papers do. context: the prompt up to
the end of its context is compressed before the rest, the question, is seen; the question then stays whole, and k
counts the context. Both read the same tokens. Policies evict once, after the prompt, as all do in the paper; with
`-o schedule=both` they go on while the answer is written, and evict from the question too; `-o schedule=own` is each
policy's own.

--data FOLDER holds LongBench's files (NAME.jsonl); `--data hub` asks the hub for them. Without --data two sets are MADE
HERE, in LongBench's schema, from Python source that the shipped language model has not seen, and called "lcc (made
here)" and "repobench-p (made here)": their scores say nothing about LongBench. Prompts that do not fit lose their
middle; few-shot and code sets get no chat template [both as in LongBench].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from kvpatch import get_policy
from kvpatch.errors import KVPatchError, suggest

from . import templates
from .greedy import generate, number
from .longbench_sets import MADE, SETS, UNPACK, Row, made, read
from .task import FULL, PYTHON, Request, Sample, Setting, Subject, Task, digest
from .together import ROWS_PER_DRAW, seed_of, together

SCENARIOS = ("regular", "context")


@dataclass(frozen=True)
class Asked:
    """A prompt and the row it was made of. question: how many of its tokens are a turn of their own, behind the
    context's; None where there is one turn. draw: see together.py."""

    ids: list[int]
    question: int | None
    new: int
    set: str
    row: Row
    draw: int

    @property
    def shape(self) -> tuple[int | None, int]:
        return self.question, self.new


class LongBench(Task):
    """The number of samples is that of each set and scenario."""

    name, about = "longbench", "LongBench's sixteen English sets; the whole prompt compressed, or the context alone."
    source = "[CriticalKV 4.2, 4.5, Tables 1, 2, Appendix D, H]"
    metric = "score"
    metrics: ClassVar[dict[str, str]] = {"score": "LongBench's own measure of the set, 0 to 100"}
    split = ("scenario", "set")
    models, count, budgets = (PYTHON,), 32, (0.2, 0.4)
    policies = ("random", "window", "streaming_llm", "h2o", "snapkv", "critical_snapkv", "adakv", "critical_adakv")
    options: ClassVar[dict[str, Any]] = {
        "sets": None, "scenario": "both", "template": "auto", "schedule": "prompt", "max_new_tokens": None
    }  # fmt: skip

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        schedule = self.option(request, "schedule")
        found = super().settings(request, subject)
        if schedule == "own":
            return found
        return [one if one is FULL else replace(one, options=one.options | {"schedule": schedule}) for one in found]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        templates.tokenizer_of(subject, self.name)
        rows = self._rows(subject, request, seed)
        found: list[Sample] = []
        for scenario in self._scenarios(request):
            for name, some in rows.items():
                made_here = " (made here)" if request.data is None else ""
                group = {"scenario": scenario, "set": name + made_here, "domain": SETS[name].domain}
                found += self._samples(subject, request, name, some, group)
        return found

    def _scenarios(self, request: Request) -> tuple[str, ...]:
        asked = self.option(request, "scenario")
        known = {"both": SCENARIOS, "regular": SCENARIOS[:1], "context": SCENARIOS[1:]}
        if asked not in known:
            raise KVPatchError(f"-o scenario={asked} is unknown: it is regular, context or both.")
        return known[asked]

    def _rows(self, subject: Subject, request: Request, seed: int) -> dict[str, list[Row]]:
        """The rows of each set that was asked for; sets that are not there are named on standard error."""
        asked, count = self.option(request, "sets"), request.count or self.count
        names = [name.strip() for name in str(asked).split(",")] if asked else list(SETS if request.data else MADE)
        for name in names:
            if name not in SETS:
                raise KVPatchError(f"-o sets={name} is unknown.{suggest(name, SETS)} Known: {', '.join(SETS)}.")
        if request.data is None:
            return self._made(subject, names, count, seed)
        if request.data != "hub" and not Path(request.data).is_dir():
            raise KVPatchError(f"--data {request.data} is no folder: give one with NAME.jsonl in it, or --data hub.")
        found = {name: rows for name in names if (rows := read(name, request.data, count)) is not None}
        if missing := [name for name in names if name not in found]:
            print(f"{request.data} has no file (NAME.jsonl) of: {', '.join(missing)}. Left out.", file=sys.stderr)
        if not found:
            raise KVPatchError(f"--data {request.data} has no {'.jsonl, '.join(names)}.jsonl: {UNPACK}")
        return found

    def _made(self, subject: Subject, names: list[str], count: int, seed: int) -> dict[str, list[Row]]:
        if not subject.python:
            raise KVPatchError(f"What is made here suits {PYTHON}. For {subject.name}: {UNPACK}")
        if other := [name for name in names if name not in MADE]:
            raise KVPatchError(f"Only {' and '.join(MADE)} can be made here. For {', '.join(other)}: {UNPACK}")
        return {name: made(name, subject.tokenizer, count, seed) for name in names}

    def _samples(self, subject: Subject, request: Request, name: str, rows: list[Row], group: dict[str, str]) -> list[Sample]:
        one, found, lengths = SETS[name], [], []
        new = number(self, request, "max_new_tokens", one.new)
        template = self.option(request, "template") if one.template else "none"
        around = templates.frame(template, subject.tokenizer)
        for i, row in enumerate(rows):
            ids, split = templates.encode(subject, around, *one.parts(row))
            lengths.append(len(ids))
            ids, split = templates.fit(subject, ids, new, split)
            question = None if group["scenario"] == SCENARIOS[0] else len(ids) - split
            asked = Asked(ids, question, new, name, row, i // ROWS_PER_DRAW)
            content = digest(ids, question, new, row["answers"], row["all_classes"])
            n = len(ids) - (question or 0)
            found.append(Sample(f"{group['scenario']}/{name}/{i}", n, asked, group, content))
        templates.say_cut(subject, lengths, new)
        return sorted(found, key=lambda sample: sample.data.question or 0)  # equal questions side by side, for batches

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        tokenizer: Any = subject.tokenizer
        for part, draw in together(samples, request.batch, setting):
            question, new = part[0].data.shape
            with self._two_turns(setting, question).patched(subject.model, seed_of(seed, draw)) as patch:
                texts = generate(subject, [sample.data.ids for sample in part], new, question, patch)
            for sample, tokens in zip(part, texts, strict=True):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                yield {"score": SETS[sample.data.set].score(text, sample.data.row), "text": text}

    def _two_turns(self, setting: Setting, question: int | None) -> Setting:
        """Where a policy evicts after prompts, the question, a second prompt, is not one that it evicts from."""
        if question is None or setting.policy == "full":
            return setting
        schedule = setting.options.get("schedule") or get_policy(setting.policy).schedule
        return replace(setting, options=setting.options | {"turns": "first"}) if schedule == "prompt" else setting
