"""The cards of the shipped models in words."""

from typing import Any

USABLE = 0.95
"""A task on which a model is below this share of right answers is not to be used with it."""


SYNTHETIC_TEXT = """\
A {architecture} model of {parameters:,} parameters that looks things up in its context: the tasks of `tools/training/tasks.py`.
It answers `<bos> w00 w23 k07 v12 v31 v05 w01 <q> k07` with `v12 v31 v05`. It is a test object for KV-cache eviction,
not a language model. Rows of up to {longest_row} tokens were seen in training; nothing is promised beyond.

| task (full cache, {sequences} sequences) | share of right answers |
|---|---|
{table}

An answer of recall and needle is right when all three values are; copy and summary count tokens. {verdict}
"""

WALK_TEXT = """\
A {architecture} model of {parameters:,} parameters that writes long traces: the walks of `tools/training/walks.py`, in which a
graph is left by each exit once and every step is written down. It answers `<bos> v00 v02 v01 v01 v02 v00 v02 v01 v00 <q> v00`
with `m1 v00 v02 v01 m1 v01 ...`. It is a test object for KV-cache eviction while decoding, not a language model. Rows of up to
{longest_row} tokens were seen in training; nothing is promised beyond.

| full cache, {sequences} walks | share that is right |
|---|---|
{table}

The true trace is fed: a visit or a trace is right when all of its tokens are. {verdict}
"""

LANGUAGE_TEXT = """\
A {architecture} model of {parameters:,} parameters, trained on the Python {python} library's own source text (one file
in twenty held out), rows of {longest_row} tokens. A test object for KV-cache eviction: its text is no better than its size.

On {sequences} held-out windows of {longest_row} tokens: {nats_per_token:.3f} nats per token, {bits_per_byte:.3f} bits per byte
({bytes_per_token:.2f} bytes per token). By position:

| position | nats per token |
|---|---|
{table}

When only `<bos>` and the 64 tokens before them are left, the last 64 tokens of a window cost {cost_of_recent_64:+.3f} nats
each (standard error {standard_error:.3f}): above zero, context further back is used. Of all heads, the one that looks
most at `<bos>` gives it {bos_attention:.3f} of its attention from position 64 on; an attention sink would get most.
"""

FACTS = """\

Made by `{command}`:
{steps} steps, {cpu_seconds} CPU seconds on one core, in bfloat16 autocast.
Stored in float16; the figures were measured on the stored weights in float32.
Python {python}, torch {torch}, transformers {transformers}. The same facts are in `card.json`.
"""


def describe(card: dict[str, Any]) -> str:
    """The model card in words."""
    facts = {"longest_row": 256} | card | card["versions"] | card.get("held_out", {})
    if "accuracy" in card:
        scores = card["accuracy"]
        table = "\n".join(f"| {task} | {share:.4f} |" for task, share in scores.items())
        poor = [task for task, share in scores.items() if share < USABLE]
        verdict = f"Below {USABLE}, so not to be used: {', '.join(poor)}." if poor else f"Every task is above {USABLE}."
        body = WALK_TEXT if "traces" in scores else SYNTHETIC_TEXT
        body += "\n{note}\n" if "note" in card else ""
    else:
        positions = card["held_out"]["nats_by_position"]
        table = "\n".join(f"| {span} | {nats:.3f} |" for span, nats in positions.items())
        verdict, body = "", LANGUAGE_TEXT
    return f"# {card['name']}\n\n" + (body + FACTS).format(**facts, table=table, verdict=verdict)
