"""docs/results.md: the first screen, the tables and the claims, from lines of JSON."""

from __future__ import annotations

from pathlib import Path

from . import answers
from .choices import K, write_tables
from .claims import write_claims
from .page import USES, Results, write_section
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
model. [Small models](small-models.md) have
what is not measured here: long traces, and budgets by mass. `refit`'s ridge and number of queries were chosen on the
first 16 texts of the question after compression and of the text that goes on; [its own table](policies/combine.md#refit)
leaves these out.

**How to read the tables.** Loss: nats of the right answer per token (or digit) above the full cache's, the mean over
samples with its 95% interval (bootstrap over samples). The model is given the start of the right answer, and only the
tokens after it count, so that all of them are predicted from what is left of the cache. Gain kept: 1 for the full cache, 0
for a model that has not read the text. Bytes are a share of the full cache's once the prompt is evicted. **Bold** loses
less than the null, *slanted* more: paired over samples, p below 0.05 after Holm's correction over the table. The null,
`{null}`, evicts at random and spares the first four and the last 64 tokens: it shows how much these
alone explain. `k` is a share of the prompt; at k = 0.1 they fill the null's budget, which makes it a window. Numbers
of samples are those at a fifth. Other budgets have 16 or more, from which the table of uses takes its shares there.
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

What a single option of a policy does at k = {k:g}, all else at its default: the loss of the policy, and what the option adds to
it, sample by sample. Below zero it helps. **Bold**: p below 0.05 after Holm's correction over all of these tables. The options
are measured by `python -m tools.evidence run asked document --choices --budgets {k:g} --samples 12`.
"""


def describe_use(results: Results, k: float) -> str:
    """One sentence: what keeps how much, and what is not better than the null."""
    sides = results.compare_with_null()
    kept = {label: one.mean for label in LABELS if (one := results.kept((label, k)))}
    order = sorted(kept, key=lambda label: -kept[label])
    better, worse = ([label for label in order if sides.get((label, k)) == side] for side in (-1, 1))
    shares = {label: f"`{label}` {100 * mean:.0f}%" for label, mean in kept.items()}
    said = ", ".join(shares[label] for label in better[:5]) or "no policy is surely above it"
    text = f"**{results.use.title}:** the null keeps {100 * kept[NULL]:.0f}% of the full cache's gain; {said}."
    if more := better[5:]:
        text += f" {len(more)} more {'is' if len(more) == 1 else 'are'} above the null."
    if below := [shares[label] for label in worse if label != "random"]:
        text += f" Below it: {', '.join(below[:4])}."
    return text


def write_page(folder: Path, docs: Path) -> None:
    """Write docs/results.md and its picture."""
    (docs / "results").mkdir(parents=True, exist_ok=True)
    draw(folder, PICTURED, docs / "results" / FILE)
    measured = [results for use in USES if MIDDLE in (results := Results(folder, use)).budgets]
    counts = {len(results.values((NULL, MIDDLE))) for results in measured} or {0}
    ends = " to ".join(map(str, sorted({min(counts), max(counts)})))
    sentences = [f"{i}. {describe_use(results, MIDDLE)}" for i, results in enumerate(measured, 1)]
    first = "\n".join([f"At a fifth of the prompt, {ends} samples a use:", "", *sentences])
    text = HEAD.format(file=FILE, sentences=first, link=LINK, null=NULL)
    text += f"\n{CLAIMED.format(k=MIDDLE)}\n{write_claims(folder, MIDDLE)}\n\n## Tables\n\n{write_section(folder)}\n"
    if (answered := folder / "answers.jsonl").exists():
        told = ANSWERED.format(prompt=answers.PROMPT, tokens=answers.TOKENS, k=answers.K)
        text += f"\n{told}\n{answers.write_table(answered)}\n"
    if choices := write_tables(folder):
        text += f"\n{CHOSEN.format(k=K)}\n{choices}\n"
    (docs / "results.md").write_text(text, encoding="utf-8")
