"""Long answers: how far a budget that holds over prompt and answer leads away from the full cache, and whether answers loop.

The unpatched model draws an answer of TOKENS tokens to each prompt. Each policy reads these same tokens one by one, so that the
divergences of its predictions add up to that of whole answers; then it writes an answer of its own, greedily. Prompts have one
length, so that several are one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kvpatch

from .chat import Frame
from .measure import SEED, count_bytes, read_rows
from .runs import Line, read_lines
from .settings import FULL, NULL, ROWS
from .statistics import estimate, find_sides
from .tables import mark, markdown
from .texts import group_parts, sentences

K, PROMPT, TOKENS, ROWS_AT_ONCE = 0.2, 700, 512, 12
LABELS = (NULL, "streaming_llm", "h2o", "tova", "roco", "keyformer, no noise", "snapkv", "kvzip")
HEAD, ASK = "Read this text.\n\n", "\n\nExplain to a beginner, in detail, what this text says."
LOOP, LONGEST = 64, 32
"""An answer loops where its last LOOP tokens repeat a piece of at most LONGEST tokens."""


def make_prompts(tokenizer: Any, count: int) -> Tensor:
    """Return the ids [count,PROMPT] of texts that are cut to fit, each followed by the request."""
    frame, found = Frame(tokenizer), []
    after = frame.encode(ASK) + frame.after
    for parts in group_parts(tokenizer, sentences(), PROMPT, " ")[:count]:
        before = frame.before + frame.encode(HEAD + " ".join(parts))
        found.append(before[: PROMPT - len(after)] + after)
    return torch.tensor(found)


def loops(ids: list[int]) -> bool:
    """Say whether an answer ends in a loop."""
    last = ids[-LOOP:]
    return any(last[n:] == last[:-n] for n in range(1, LONGEST + 1))


def write_answers(model: Any, prompts_BN: Tensor, choose: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Any]:
    """Read prompts, then TOKENS tokens that `choose` (place, logits [B,V]) returns; return these [B,TOKENS] and the cache."""
    logits_B1V, cache = read_rows(model, prompts_BN, None)
    written = []
    for place in range(TOKENS):
        written.append(choose(place, logits_B1V[:, 0]))
        logits_B1V, cache = read_rows(model, written[-1][:, None], cache)
    return torch.stack(written, 1), cache


@torch.no_grad()
def measure_batch(model: Any, tokenizer: Any, prompts_BN: Tensor) -> Iterator[tuple[str, list[Line]]]:
    """Measure a batch under the full cache and each policy; yield the label and what each prompt showed."""
    end, generator = tokenizer.eos_token_id, torch.Generator().manual_seed(SEED)
    full_TBV: list[Tensor] = []

    def draw(place: int, logits_BV: Tensor) -> Tensor:
        full_TBV.append(logits_BV.log_softmax(-1))
        logits_BV[:, end] = -torch.inf  # an answer of a fixed length
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]

    def take_likeliest(place: int, logits_BV: Tensor) -> Tensor:
        logits_BV[:, end] = -torch.inf
        return logits_BV.argmax(-1)

    answer_BT, cache = write_answers(model, prompts_BN, draw)
    nbytes = count_bytes(cache)

    def judge(own_TBV: list[Tensor], share: float, greedy_BT: Tensor) -> list[Line]:
        pairs = [(own, full) for own, full in zip(own_TBV, full_TBV, strict=True)][1:]  # the first comes from the whole prompt
        kl_TB = torch.stack([F.kl_div(own, full, log_target=True, reduction="none").sum(-1) for own, full in pairs])
        agree_TB = torch.stack([(own.argmax(-1) == full.argmax(-1)).float() for own, full in pairs])
        quarters = [part_TB.mean(0) for part_TB in kl_TB.tensor_split(4)]
        return [
            {
                "bytes": round(share, 4), "kl": [round(part_B[row].item(), 5) for part_B in quarters],
                "agree": round(agree_TB[:, row].mean().item(), 5), "loops": loops(greedy_BT[row].tolist()),
            }
            for row in range(len(prompts_BN))
        ]  # fmt: skip

    yield FULL, judge(full_TBV, 1.0, write_answers(model, prompts_BN, take_likeliest)[0])
    for label in LABELS:
        own_TBV: list[Tensor] = []

        def read(place: int, logits_BV: Tensor, own_TBV: list[Tensor] = own_TBV) -> Tensor:
            own_TBV.append(logits_BV.log_softmax(-1))
            return answer_BT[:, place]

        row = ROWS[label]
        with kvpatch.patched(model, row.policy, K, seed=SEED, **row.options):
            share = count_bytes(write_answers(model, prompts_BN, read)[1]) / nbytes
            yield label, judge(own_TBV, share, write_answers(model, prompts_BN, take_likeliest)[0])


def measure(model: Any, tokenizer: Any, count: int, lines: list[Line]) -> Iterator[list[Line]]:
    """Measure the batches that the lines lack, a line for each prompt under each label."""
    known = {line["sample"] for line in lines}
    prompts_SN = make_prompts(tokenizer, count)
    for first in range(0, count, ROWS_AT_ONCE):
        if f"answer {first}" in known:
            continue
        batch = measure_batch(model, tokenizer, prompts_SN[first : first + ROWS_AT_ONCE])
        yield [
            {"sample": f"answer {first + i}", "label": label, "k": K, **one}
            for label, found in batch
            for i, one in enumerate(found)
        ]


def describe_answers(path: Path, label: str) -> str:
    """Say what a policy loses, beside the null; an empty string where it was not measured."""
    lines = read_lines(path)
    own, null = ([sum(line["kl"]) / len(line["kl"]) for line in lines if line["label"] == one] for one in (label, NULL))
    if not own:
        return ""
    return f"{TOKENS} tokens: {estimate(own):.2f} nats a token from the full cache, null {estimate(null).mean:.2f}"


def write_table(path: Path) -> str:
    """Return the table of docs/results.md: a row for each policy, those that stay nearest to the full cache first."""
    lines = read_lines(path)
    samples = sorted({line["sample"] for line in lines})
    found = {label: {line["sample"]: line for line in lines if line["label"] == label} for label in (FULL, *LABELS)}
    mean = {label: [sum(own[name]["kl"]) / 4 for name in samples] for label, own in found.items()}
    less = {label: [own - null for own, null in zip(mean[label], mean[NULL], strict=True)] for label in LABELS if label != NULL}
    sides = find_sides(less)

    def write_row(label: str) -> list[str]:
        own = [found[label][name] for name in samples]
        text = mark(str(estimate(mean[label])), sides.get(label, 0))
        quarters = [f"{sum(line['kl'][at] for line in own) / len(own):.3f}" for at in (0, 3)]
        shares = [f"{sum(line[name] for line in own) / len(own):.2f}" for name in ("agree", "bytes")]
        return [f"`{label}`", text, *quarters, shares[0], f"{sum(line['loops'] for line in own)}", shares[1]]

    header = ["policy", "nats from the full cache", "first quarter", "last quarter", "same likeliest token", "loops", "bytes"]
    order = sorted((FULL, *LABELS), key=lambda label: sum(mean[label]))
    return f"{len(samples)} texts.\n\n{markdown(header, [write_row(label) for label in order])}"
