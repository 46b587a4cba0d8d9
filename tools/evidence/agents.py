"""An agent drops a tool result from its history: what that costs the next call, beside keeping it and reading anew.

BFCL's conversations (tasks/tools.py) with a page of prose as the result of their first calls. Before the last turn it goes:

    kept        nothing is dropped: the full cache
    read anew   the conversation is read again without the page
    forgotten   `cache.forget()`: what was read behind the page has seen it, and stays
    summary, read anew; summary in place    the same with the page's first tokens in its place, the latter by `patch.replace()`

Judged are the last turn's right calls. Time is that of the process from the edit to the end of the last turn.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvpatch

from .measure import judge, read_ids
from .runs import cut_unfinished_line, read_lines
from .samples import Sample
from .statistics import estimate
from .tables import markdown
from .tasks import tools
from .texts import group_parts, sentences

PAGE, SUMMARY = 500, 48
ANEW, SHORT = "read anew", "summary, read anew"
WAYS = {"kept": ANEW, ANEW: "", "forgotten": ANEW, SHORT: "", "summary in place": SHORT}
"""With each way the one that it stands beside."""


@dataclass(frozen=True)
class Conversation:
    """A sample whose second turn holds a page at `span`, positions of the whole text."""

    sample: Sample
    span: tuple[int, int]


def make_conversations(tokenizer: Any, count: int) -> list[Conversation]:
    """Put a page behind the first calls of each of BFCL's conversations; no two get the same page."""
    pages = group_parts(tokenizer, sentences(), PAGE, " ")
    found = []
    for i, sample in enumerate(tools.make_samples(tokenizer, min(count, len(pages)))):
        first, second, *rest = sample.turns
        calls, _, question = tokenizer.decode(second).partition("<|im_end|>")
        encode = lambda text: tuple(tokenizer(text, add_special_tokens=False).input_ids)  # noqa: E731
        before = encode(calls + "<|im_end|>\n<|im_start|>tool\n")
        page, after = encode(" ".join(pages[i])), encode("<|im_end|>" + question)
        start = len(first) + len(before)
        turns = (first, before + page + after, *rest)
        found.append(Conversation(Sample(sample.name, turns, sample.probes), (start, start + len(page))))
    random.Random("agents").shuffle(found)
    return found


@torch.no_grad()
def measure_conversation(model: Any, conversation: Conversation) -> dict[str, dict[str, float]]:
    """Judge the last turn in each way; return nats, KL from reading anew, and seconds."""
    *history, last = conversation.sample.turns
    start, stop = conversation.span
    probe, text = conversation.sample.probes[0], tuple(token for turn in history for token in turn)
    summary, found, anew = text[start:stop][:SUMMARY], dict[str, dict[str, float]](), {}
    for way, new in ((ANEW, ()), (SHORT, summary)):
        began = time.process_time()
        _, cache = read_ids(model, text[:start] + new + text[stop:] + last, None)
        seconds = time.process_time() - began
        judged, anew[way] = judge(model, probe, cache, None)
        found[way] = {"nats": judged.nats, "kl": 0.0, "seconds": seconds}
    with kvpatch.patched(model, "full", 1.0) as patch:
        for way, beside in WAYS.items():
            if not beside:
                continue
            _, cache = read_ids(model, text, None)
            began = time.process_time()
            if way == "forgotten":
                cache.forget([conversation.span])
            elif way != "kept":
                patch.replace(cache, conversation.span, list(summary))
            _, cache = read_ids(model, last, cache)
            seconds = time.process_time() - began
            judged, _ = judge(model, probe, cache, anew[beside])
            found[way] = {"nats": judged.nats, "kl": judged.kl, "seconds": seconds}
    return found


def run(model: Any, tokenizer: Any, count: int, path: Path) -> Iterator[dict[str, Any]]:
    """Measure the conversations that the file lacks, and append a line for each."""
    cut_unfinished_line(path)
    known = {line["digest"] for line in read_lines(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for one in make_conversations(tokenizer, count):
            if one.sample.digest in known:
                continue
            tokens, dropped = sum(map(len, one.sample.turns)), one.span[1] - one.span[0]
            line = {"sample": one.sample.name, "digest": one.sample.digest, "tokens": tokens, "dropped": dropped}
            line |= {"ways": measure_conversation(model, one)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            yield line


def write_table(path: Path) -> str:
    """A row for each way: nats of the next call, beside reading anew, and seconds."""
    lines, rows = read_lines(path), []
    for way, other in WAYS.items():
        anew = [line["ways"][other or way] for line in lines]
        own = [line["ways"][way] for line in lines]
        nats, kl = estimate([one["nats"] for one in own]), estimate([one["kl"] for one in own])
        apart = estimate([one["nats"] - its["nats"] for one, its in zip(own, anew, strict=True)])
        seconds = sorted(one["seconds"] for one in own)[len(own) // 2]
        beside = [f"{apart.mean:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}]", f"{kl.mean:.3f}"] if other else ["", ""]
        rows.append([way, f"{nats.mean:.3f}", *beside, f"{seconds:.2f}"])
    tokens = sorted(line["tokens"] for line in lines)
    dropped = sum(line["dropped"] for line in lines) / max(len(lines), 1)
    said = f"{len(lines)} conversations of {tokens[0]} to {tokens[-1]} tokens, of which {dropped:.0f} on average are dropped."
    header = ["before the last turn", "nats a token", "beside reading anew", "KL from it", "seconds"]
    return f"{said}\n\n{markdown(header, rows)}"
