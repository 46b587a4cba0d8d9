"""docs/results.md: the first screen, the tables and the claims, from lines of JSON."""

from __future__ import annotations

from pathlib import Path

from . import answers
from .choices import K, write_tables
from .claims import write_claims
from .page import USES, Results, Use, beats_null, write_section
from .picture import draw
from .settings import LABELS, MIDDLE, NULL

PICTURED = (USES[0], USES[1], USES[2], USES[4])
FILE = "real.png"

HEAD = """\
# Results

![What policies keep of the full cache's gain, over the bytes that they hold](results/{file})

{sentences}

Made by `make results`; change `tools/evidence`, not this page. The model is [SmolLM2-135M-Instruct]({link}), a Llama of 30
layers with 9 query and 3 KV heads, in float32; the package that brings its weights (`make real`) rounded them to 4 bits. It
reads prose and source of this repository, which it was not trained on, in its chat template. One model of this size is one
model: a large one remembers more, and finds more of what is left. [Small models](small-models.md) have
what is not measured here: long traces, and budgets by mass. `refit`'s ridge and number of queries were chosen on the
first 16 texts of the question after compression and of the text that goes on; [its own table](policies/combine.md#refit)
leaves these out.

**How to read the tables.** Loss: nats of the right answer per token (or digit) above the full cache's, the mean over
samples with its 95% interval (bootstrap over samples). The model is given the start of the right answer, and only the
tokens behind it count, so that all of them are predicted from what is left of the cache. Gain kept: 1 for the full cache, 0
for a model that has not read the text. Bytes are a share of the full cache's once the prompt is evicted. **Bold** loses
less than the null, *slanted* more: paired over samples, p below 0.05 after Holm's correction over the table. The null,
`{null}`, evicts at random and spares the first four and the last 64 tokens: it shows how much these
alone explain. `k` is a share of the prompt; at k = 0.1 they fill the null's budget, which makes it a window. Samples are
counted at a fifth; other budgets have 16 or more.
"""
LINK = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"

CLAIMED = """\
## What the papers say

The loss of the first policy minus that of the second, in nats, at k = {k:g}: below zero the paper's policy is better. **Bold**
agrees and *slanted* contradicts, after Holm's correction over the whole table.
"""


ANSWERED = """\
## Long answers

A request after {prompt} tokens of prose, and an answer of {tokens} tokens that the full cache's own predictions drew; each
policy reads it token by token, within k = {k:g} of the prompt. Nats: how far its predictions are from the full cache's, a token
(the mean with its interval; **bold**: less than the null's, *slanted*: more, after Holm's correction), over the answer and over
its first and last quarter. Then the share of tokens whose likeliest successor is the full cache's, the answers of the policy's
own, written greedily, that end in a loop, and the bytes at the end as a share of the full cache's: `snapkv` and `kvzip` evict
the prompt alone, and hold the answer whole. `python -m tools.evidence answers`.
"""

CHOSEN = """\
## One choice at a time

What a single option of a policy does at k = {k:g}, all else as it comes: the loss of the policy, and what the option adds to
it, sample by sample. Below zero it helps. **Bold**: p below 0.05 after Holm's correction over all of these tables. The options
are measured by `python -m tools.evidence run asked document --choices --budgets {k:g} --samples 12`.
"""


def best_rows(results: Results, use: Use, k: float) -> tuple[list[str], list[str]]:
    """Labels that beat the null at a budget, best first; and those that it beats."""
    sure = beats_null(results, use)
    kept = {label: one.mean for label in LABELS if (one := results.kept(use, label, k))}
    order = sorted(kept, key=lambda label: -kept[label])
    return [label for label in order if sure.get((label, k), 0) > 0], [label for label in order if sure.get((label, k), 0) < 0]


def describe_use(results: Results, use: Use, k: float) -> str:
    """One sentence: what keeps how much, and what is not better than the null."""

    def share(label: str) -> str:
        one = results.kept(use, label, k)
        return "" if one is None else f"{100 * one.mean:.0f}%"

    better, worse = best_rows(results, use, k)
    said = ", ".join(f"`{label}` {share(label)}" for label in better[:5]) or "no policy is surely above it"
    text = f"**{use.title}:** the null keeps {share(NULL)} of the full cache's gain; {said}."
    if more := better[5:]:
        text += f" {len(more)} more {'is' if len(more) == 1 else 'are'} above the null."
    if worse := [label for label in worse if label != "random"]:
        text += f" Below it: {', '.join(f'`{label}` {share(label)}' for label in worse[:4])}."
    return text


def count_samples(folder: Path) -> str:
    """Say how many samples the uses have: one number, or the fewest and the most."""
    counts = {len(Results(folder / f"{use.task}.jsonl").values(NULL, MIDDLE, use)) for use in USES} - {0}
    ends = sorted({min(counts), max(counts)}) if counts else [0]
    return " to ".join(str(count) for count in ends)


def write_page(folder: Path, docs: Path) -> None:
    """Write docs/results.md and its picture."""
    (docs / "results").mkdir(parents=True, exist_ok=True)
    draw(folder, PICTURED, docs / "results" / FILE)
    sentences: list[str] = []
    for use in USES:
        results = Results(folder / f"{use.task}.jsonl")
        if MIDDLE in results.budgets:
            sentences.append(f"{len(sentences) + 1}. {describe_use(results, use, MIDDLE)}")
    first = "\n".join([f"At a fifth of the prompt, {count_samples(folder)} samples a use:", "", *sentences])
    text = HEAD.format(file=FILE, sentences=first, link=LINK, null=NULL)
    text += f"\n{CLAIMED.format(k=MIDDLE)}\n{write_claims(folder, MIDDLE)}\n\n## Tables\n\n{write_section(folder)}\n"
    if (answered := folder / "answers.jsonl").exists():
        told = ANSWERED.format(prompt=answers.PROMPT, tokens=answers.TOKENS, k=answers.K)
        text += f"\n{told}\n{answers.write_table(answered)}\n"
    if choices := write_tables(folder):
        text += f"\n{CHOSEN.format(k=K)}\n{choices}\n"
    (docs / "results.md").write_text(text, encoding="utf-8")
