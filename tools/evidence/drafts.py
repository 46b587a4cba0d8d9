"""How many tokens a pass over the full cache verifies, if a budgeted cache drafts them: what `lossless=True` is decided on.

The full cache writes TOKENS tokens, greedily. Each policy then reads the same tokens one by one from its own cache, and a line
takes down where its likeliest next token was the full cache's. A run of agreements is a draft that is accepted, so one
reading gives the tokens of a pass for drafts of any length. Entries of accepted tokens are the draft's own here, where the
library puts the full cache's in their place: what it reaches is not lower.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kvpatch

from .chat import Frame
from .measure import Shared, read_ids
from .page import markdown
from .runs import cut_unfinished_line, read_lines
from .settings import ROWS
from .tasks import code
from .texts import group_parts, sentences

TOKENS = 64
BUDGETS = (0.05, 0.1, 0.2, 0.3)
LENGTHS = (2, 4, 8, 16)  # of drafts
POLICIES = ("random, ends kept", "streaming_llm", "h2o", "roco", "keyformer", "snapkv", "critical_adakv", "kvzip")
HEAD, ASK = "Read this text.\n\n", "\n\nExplain to a beginner what this text says."
FLOOR = 3.0
"""Tokens of a pass at a tenth of the prompt below which drafting is not worth two caches."""

Text = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def make_texts(tokenizer: Any, count: int) -> list[Text]:
    """Return (name, kind, prompt, what is read after compression) for `count` texts of each kind."""
    frame, found = Frame(tokenizer), list[Text]()
    ask = frame.encode(ASK) + frame.after

    def add(kind: str, tokens: int, later: bool) -> None:
        for i, parts in enumerate(group_parts(tokenizer, sentences(), tokens, " ")[:count]):
            text = frame.before + frame.encode(HEAD + " ".join(parts))
            found.append((f"{kind} {i}", kind, text, ask) if later else (f"{kind} {i}", kind, text + ask, ()))

    add("question in the prompt", 800, False)
    add("question later", 900, True)
    add("long prompt", 3000, False)
    for sample in code.make_samples(tokenizer, count):
        found.append((sample.name, "code", sample.turns[0], ()))
    return found


@torch.no_grad()
def _write(model: Any, prompt: tuple[int, ...], later: tuple[int, ...]) -> tuple[Shared, list[int]]:
    """Read a prompt with the unpatched model and write TOKENS tokens."""
    with Shared.record(model.base_model) as shared:
        logits_1V, cache = read_ids(model, prompt, None)
    if later:
        logits_1V, cache = read_ids(model, later, cache)
    written: list[int] = []
    for _ in range(TOKENS):
        written.append(int(logits_1V[-1].argmax()))
        logits_1V, cache = read_ids(model, (written[-1],), cache)
    return shared, written


@torch.no_grad()
def _agree(model: Any, text: Text, shared: Shared, written: list[int], label: str, k: float) -> str:
    """Return a digit for each token after the first: 1 where a budgeted cache's likeliest is what was written."""
    row, (_, _, prompt, later) = ROWS[label], text
    with kvpatch.patched(model, row.policy, k, seed=0, **row.options):
        with shared.replayed(model.base_model):
            _, cache = read_ids(model, prompt, None)
        if later:
            _, cache = read_ids(model, later, cache)
        digits = []
        for token, following in zip(written, written[1:], strict=False):
            logits_1V, cache = read_ids(model, (token,), cache)
            digits.append(int(logits_1V[-1].argmax()) == following)
    return "".join(map(str, map(int, digits)))


def run(model: Any, tokenizer: Any, count: int, path: Path) -> Iterator[dict[str, Any]]:
    """Measure what the file lacks, text by text, and append a line for each policy and budget."""
    cut_unfinished_line(path)
    known = {(line["text"], line["label"], line["k"]) for line in read_lines(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for text in make_texts(tokenizer, count):
            wanted = [(label, k) for k in BUDGETS for label in POLICIES if (text[0], label, k) not in known]
            if not wanted:
                continue
            shared, written = _write(model, *text[2:])
            for label, k in wanted:
                agreed = _agree(model, text, shared, written, label, k)
                line = {"text": text[0], "kind": text[1], "tokens": len(text[2]), "label": label, "k": k, "agreed": agreed}
                file.write(json.dumps(line) + "\n")
                file.flush()
                yield line


def tokens_a_pass(agreed: str, length: int) -> float:
    """Return the tokens of a verifying pass with drafts of `length`: those accepted, and the one that the pass itself gives."""
    at = passes = 0
    while at + length <= len(agreed):
        accepted = len(agreed[at : at + length].split("0")[0])
        at, passes = at + accepted + 1, passes + 1
    return at / max(passes, 1)


def write_table(path: Path, length: int = 8) -> str:
    """Rows of policies, columns of budgets and kinds of text: mean tokens a pass."""
    lines = read_lines(path)
    kinds = list(dict.fromkeys(line["kind"] for line in lines))

    def mean(label: str, k: float, kind: str | None, g: int) -> str:
        own = [line for line in lines if line["label"] == label and line["k"] == k and kind in (None, line["kind"])]
        found = [tokens_a_pass(line["agreed"], g) for line in own]
        return f"{sum(found) / len(found):.1f}" if found else ""

    header = ["policy", *(f"k = {k}" for k in BUDGETS), *(f"{kind}, k = 0.1" for kind in kinds)]
    header += [f"drafts of {g}, k = 0.1" for g in LENGTHS if g != length]
    rows = [
        [label, *(mean(label, k, None, length) for k in BUDGETS), *(mean(label, 0.1, kind, length) for kind in kinds)]
        + [mean(label, 0.1, None, g) for g in LENGTHS if g != length]
        for label in POLICIES
    ]
    return markdown(header, rows)
