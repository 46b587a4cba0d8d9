"""What quotas and a protected system message do for the worst instruction: lines of JSON, and a table of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvpatch.hooks.transcript import Template, Transcript

from .measure import Bench, Judged
from .runs import Line, read_lines
from .samples import Sample
from .settings import Row, Setting
from .statistics import estimate, judge_all
from .tasks import instructions

K, POLICIES = 0.2, ("snapkv", "h2o", "streaming_llm")
FULL, PLAIN, MESSAGES, RULES, SYSTEM = "full", "alone", "a quota of each message", "a quota of each instruction", "protected"
WAYS = (PLAIN, MESSAGES, RULES, SYSTEM)


def find_spans(tokenizer: Any, i: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the tokens of a sample's system message, with its header, and the span of each instruction in it."""
    rules, system = instructions.write_system(i)
    template, spans = Template(tokenizer, {}), []
    rendered = template.render([{"role": "system", "content": system}, {"role": "user", "content": ""}])
    tokens = template.tokenize(rendered, Transcript())[1][1]
    places = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    for topic, words in rules:
        rule = instructions.RULE.format(topic=topic, words=words)
        begin = rendered.text.index(rule)
        inside = [at for at, (_, stop) in enumerate(places) if begin < stop <= begin + len(rule)]
        spans.append((inside[0], inside[-1] + 1))
    return tokens, spans


def list_options(tokenizer: Any, i: int, sample: Sample) -> dict[str, dict[str, Any]]:
    """Return the options of each way, for one sample."""
    (system, rules), n = find_spans(tokenizer, i), len(sample.turns[0])
    return {
        PLAIN: {},
        MESSAGES: {"quota": [(0, system), (system, n)]},
        RULES: {"quota": rules},
        SYSTEM: {"protect": torch.arange(n) < system},
    }


def _write_line(sample: Sample, policy: str, way: str, judged: Sequence[Judged]) -> Line:
    nats = [one.nats for one in judged]
    return {
        "sample": sample.name, "digest": sample.digest, "tokens": sum(map(len, sample.turns)), "policy": policy, "way": way,
        "worst": round(max(nats), 5), "mean": round(sum(nats) / len(nats), 5),
    }  # fmt: skip


def measure(model: Any, tokenizer: Any, count: int, lines: list[Line]) -> Iterator[list[Line]]:
    """Measure what the lines lack of each sample."""
    known = {(line["digest"], line["policy"]) for line in lines}
    for i, sample in enumerate(instructions.make_samples(tokenizer, count)):
        missing = [policy for policy in (FULL, *POLICIES) if (sample.digest, policy) not in known]
        if not missing:
            continue
        bench = Bench(model, sample)
        new = [_write_line(sample, FULL, FULL, bench.judged)] if FULL in missing else []
        options = list_options(tokenizer, i, sample)
        for policy in [one for one in missing if one != FULL]:
            for way, given in options.items():
                judged, _ = bench.measure(Setting(Row(way, policy, given), K))
                new.append(_write_line(sample, policy, way, judged))
        yield new


def write_table(path: Path) -> str:
    """Return the table of docs/policies/definitions.md: nats of the worst instruction, beside what the policy gives alone."""
    lines = read_lines(path)
    worst = {(line["policy"], line["way"], line["sample"]): line["worst"] for line in lines}
    names = sorted({line["sample"] for line in lines})
    gains = {
        (policy, way): [worst[policy, way, name] - worst[policy, PLAIN, name] for name in names]
        for policy in POLICIES
        for way in WAYS[1:]
    }
    ps = judge_all(gains)
    rows = ["| | nats of the worst instruction | against the policy alone | p |", "|---|---|---|---|"]
    rows.append(f"| full cache | {estimate([worst[FULL, FULL, name] for name in names])} | | |")
    for policy in POLICIES:
        for way in WAYS:
            mean = estimate([worst[policy, way, name] for name in names])
            gain = f"{estimate(gains[policy, way])} | {ps[policy, way]:.3f}" if way != PLAIN else " | "
            rows.append(f"| `{policy}`, {way} | {mean} | {gain} |")
    return "\n".join([*rows, "", f"{len(names)} samples, k={K}"])
