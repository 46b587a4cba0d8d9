"""An agent drops old tool results from its history: what that costs the next call, beside keeping them and reading anew.

BFCL's conversations (tasks/tools.py) with prose and code as the results of their calls, 4,000 to 4,800 tokens in all. Before
the user's last message all results but the newest STAY go:

    kept            nothing is dropped: the full cache
    read anew       what comes after the first of them is read again without them, on what stands before
    forgotten       `cache.forget()`: what was read after a result has seen it, and stays
    summary         `patch.replace()`: each result's first tokens stay in its place, and some tokens after it are read again
    budget          h2o with 1,024 tokens a head, which evicts by itself; the same, and results are forgotten too

Judged are the right calls after the last message. Time is that of the process from the edit to the end of this message; bytes
are those of keys and values then.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvpatch

from .chat import Frame
from .measure import count_bytes, judge, read_ids
from .runs import Line, read_lines
from .samples import Sample
from .statistics import estimate
from .tables import markdown, shown
from .tasks import tools
from .texts import functions, group_parts, sentences

STAY, SUMMARY, BUDGET, LEAST, MOST = 3, 48, 1024, 4000, 4800
ANEW = "read anew"
AGAIN = {"summary in place": 0, "summary, and 64 tokens read again": 64, "summary, and 256 read again": 256}
"""Tokens after a result that are read again."""
WHOLE, BUDGETED = ("kept", "forgotten", *AGAIN), ("budget", "budget, forgotten")
WAYS = ("kept", ANEW, "forgotten", *AGAIN, *BUDGETED)

Span = tuple[int, int]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A conversation of an agent.

    sample: its turns are the history up to the last message, and this; the probe is what is called then.
    spans: of the results, positions of the text.
    """

    sample: Sample
    spans: tuple[Span, ...]

    @property
    def dropped(self) -> tuple[Span, ...]:
        """The results that go before the last message."""
        return self.spans[:-STAY]


def make_loops(tokenizer: Any, count: int) -> list[Loop]:
    """Make loops of BFCL's conversations that have more results than stay; these are cut from one text, one after another."""
    draw, found, encode = random.Random("agents"), list[Loop](), Frame(tokenizer).encode
    parts = zip(group_parts(tokenizer, sentences(), 200, " "), group_parts(tokenizer, functions(), 200, "\n"), strict=False)
    pool = [token for pair in parts for part in pair for token in encode(" ".join(part) + "\n")]
    samples = tools.make_samples(tokenizer, 10**6)
    draw.shuffle(samples)
    for sample in samples:
        calls = [tokenizer.decode(turn).partition("<|im_end|>")[0].split("\n") for turn in sample.turns[1:]]
        if (results := sum(map(len, calls))) > STAY and len(found) < count:
            size = (draw.randrange(LEAST, MOST) - sum(map(len, sample.turns))) // results
            found.append(_put_results(tokenizer, sample, calls, [pool[i * size : (i + 1) * size] for i in range(results)]))
            pool = pool[results * size :] + pool[: results * size]
    return found


def _put_results(tokenizer: Any, sample: Sample, calls: list[list[str]], pages: list[list[int]]) -> Loop:
    """Put a page after each call of a conversation."""
    encode = Frame(tokenizer).encode
    end, ids, spans, left, message = "<|im_end|>\n<|im_start|>", sample.turns[0], list[Span](), iter(pages), Ids()
    for turn, own in zip(sample.turns[1:], calls, strict=True):
        ids += message
        for i, call in enumerate(own):
            ids += encode((f"{end}assistant\n" if i else "") + f"{call}{end}tool\n")
            page = tuple(next(left))
            spans.append((len(ids), len(ids) + len(page)))
            ids += page
        message = encode("<|im_end|>" + tokenizer.decode(turn).partition("<|im_end|>")[2])
    return Loop(Sample(sample.name, (ids, message), sample.probes), tuple(spans))


class Meter:
    """Measures the last message of a loop in several ways."""

    def __init__(self, model: Any, loop: Loop) -> None:
        self.model, self.loop = model, loop
        self.history, self.message = loop.sample.turns
        self.full: torch.Tensor | None = None
        self.found: dict[str, dict[str, float]] = {}

    def measure(self, way: str, cache: Any, edit: Callable[[Any], None], ids: Ids) -> None:
        """Edit a cache, read ids, and judge the call."""
        began = time.process_time()
        edit(cache)
        read_ids(self.model, ids, cache)
        seconds, size = time.process_time() - began, count_bytes(cache)
        ((judged, logp),) = judge(self.model, self.loop.sample.probes[:1], cache, [self.full])
        self.full = logp if self.full is None else self.full
        found = {"nats": judged.nats, "kl": judged.kl, "right": judged.right}
        self.found[way] = {name: round(value, 5) for name, value in found.items()} | {"seconds": seconds, "bytes": size}

    def read_anew(self) -> None:
        """Read what comes after the first result without those that go, by the unpatched model: others stand beside it."""
        (start, at), *others = self.loop.dropped
        _, cache = read_ids(self.model, self.history[:start], None)
        left: Ids = ()
        for span in others:
            left, at = left + self.history[at : span[0]], span[1]
        self.measure(ANEW, cache, lambda _: None, left + self.history[at:] + self.message)

    def go_on(self, policy: str, k: Any, ways: tuple[str, ...]) -> None:
        """Read the history once, and go on from it in each way."""
        with kvpatch.patched(self.model, policy, k) as patch:
            first, _ = self.loop.spans[0]
            _, cache = read_ids(self.model, self.history[:first], None)
            for start, stop in itertools.pairwise([first, *(stop for _, stop in self.loop.spans), len(self.history)]):
                if start < stop:
                    read_ids(self.model, self.history[start:stop], cache)
            for way in ways:
                self.measure(way, cache.clone(), lambda own, way=way: self._edit(patch, own, way), self.message)

    def _edit(self, patch: Any, cache: Any, way: str) -> None:
        if way.endswith("forgotten"):
            cache.forget(self.loop.dropped)
        for start, stop in self.loop.dropped if way in AGAIN else ():
            patch.replace(cache, (start, stop), list(self.history[start:stop][:SUMMARY]))
            if again := AGAIN[way]:  # a cache that evicts nothing keeps no ids, by which reread= would do the same
                patch.replace(cache, (stop, stop + again), list(self.history[stop : stop + again]))


@torch.no_grad()
def measure_loop(model: Any, loop: Loop) -> dict[str, dict[str, float]]:
    """Measure all ways."""
    meter = Meter(model, loop)
    meter.read_anew()
    meter.go_on("full", 1.0, WHOLE)
    meter.go_on("h2o", BUDGET, BUDGETED)
    return {way: meter.found[way] for way in WAYS}


def measure(model: Any, tokenizer: Any, count: int, lines: list[Line]) -> Iterator[list[Line]]:
    """Measure the loops that the lines lack, a line for each."""
    known = {line["digest"] for line in lines}
    for loop in make_loops(tokenizer, count):
        if loop.sample.digest not in known:
            tokens, dropped = sum(map(len, loop.sample.turns)), sum(stop - start for start, stop in loop.dropped)
            line = {"sample": loop.sample.name, "digest": loop.sample.digest, "tokens": tokens, "dropped": dropped}
            yield [line | {"ways": measure_loop(model, loop)}]


def write_table(path: Path) -> str:
    """A row for each way: nats of the next call and right calls, beside reading anew; seconds and bytes of the turn."""
    lines, rows = read_lines(path), []
    for way in WAYS:
        own = [line["ways"][way] for line in lines]
        nats, right, kl, size = (estimate([one[name] for one in own]) for name in ("nats", "right", "kl", "bytes"))
        apart = estimate([line["ways"][way]["nats"] - line["ways"][ANEW]["nats"] for line in lines])
        beside = ["", ""] if way == ANEW else [shown(apart, signed=True), f"{kl.mean:.3f}"]
        seconds = sorted(one["seconds"] for one in own)[len(own) // 2]
        rows.append([way, f"{nats.mean:.3f}", *beside, f"{right:.0%}", f"{seconds:.2f}", f"{size.mean / 2**20:.0f}"])
    tokens = sorted(line["tokens"] for line in lines)
    dropped = sum(line["dropped"] for line in lines) / max(len(lines), 1)
    said = f"{len(lines)} conversations of {tokens[0]} to {tokens[-1]} tokens, of which {dropped:.0f} on average are dropped."
    header = ["before the last message", "nats a token", "beside reading anew", "KL from it", "right calls", "seconds", "MiB"]
    return f"{said}\n\n{markdown(header, rows)}"
