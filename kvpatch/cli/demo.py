"""Implementation of `kvpatch demo`: several policies on prompts that need their cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import plotting
from ..evaluation.teacher_forcing import Fed, feed
from ..patching import patched
from ..report import Report
from . import demo_view as view
from .demo_view import DemoOutcome
from .loading import MODELS, load_model, load_tokenizer
from .needles import TextBatch, cut_excerpts, read_needles
from .output import make_console, make_folder, make_progress_bar, print_json

POLICIES: dict[str, dict[str, Any]] = {
    "window": {},
    "streaming_llm": {},
    "h2o": {},
    "roco": {},
    "keyformer": {},
    "snapkv": {"window": 8},  # its 32 would fill the whole budget of a prompt as short as these
    "tova": {},
    "critical_adakv": {"window": 8},  # its heads hold different numbers of tokens
}
KS = (0.5, 0.2)

_CLOSING = (
    "What this shows: these models have about a million parameters or less and read some two hundred tokens, so the "
    "table tells exactly which tokens a policy drops and what that breaks; it does not rank policies for large models. "
    "It says nothing about speed: at this size a step is Python's own time, not attention."
)
_KEYFORMER = (
    "Every fact stands there once, so nothing points at it before the question: for those asked later, to keep the newest "
    "tokens is as good a guess as any. Where facts are mentioned more than once (docs/small-models.md, fifteen such models, "
    "k=0.2), roco answers 42% of later questions, keyformer 39% and the window 22%. Of a real model's later facts no policy "
    "that reads a text once surely keeps any; kvzip, which reads it twice, keeps 98% of the gain (docs/results.md)."
)


@dataclass(frozen=True)
class Stage:
    """A model and the text that it is run on."""

    model: Any
    text: TextBatch


def run(out: Path, json: bool = False) -> None:
    """Run `kvpatch demo` without a model: print a table of results and what each policy kept of a prompt; save a picture.

    typer's command `demo` calls it.

    Args:
        out: folder of the picture.
        json: print the table's rows to stdout as JSON, and everything else to stderr.

    Raises:
        KVPatchError: `out` cannot be written, or matplotlib is missing.
    """
    console = make_console(stderr=json)
    make_folder(out)
    stages = _load_shipped(console)  # small models with their texts, by name
    view.show_story(console, ["full", *POLICIES])
    outcomes, reports = [], {}
    with make_progress_bar(console) as bar:
        todo = [("full", 1.0), *((policy, k) for k in KS for policy in POLICIES)]
        task = bar.add_task("", total=len(todo))
        for policy, k in todo:
            bar.update(task, description=f"{policy} k={k}")
            outcomes.append(_try_policy(policy, k, stages))
            reports[policy, k] = _report_prompt(policy, k, stages["needles"])
            bar.advance(task)
    text, picture = stages["needles"].text, out / "kept.png"
    if json:
        for one in outcomes:
            print_json(one.to_dict(outcomes[0]))
    view.show(console, outcomes, reports, text)
    plotting.save(view.draw_picture(outcomes, reports, text), picture)
    console.print(f"\nLayer by layer, for k={' and '.join(map(str, KS))}: {picture}\n")
    console.print(f"{_CLOSING}\n\n{_KEYFORMER}")


def _make_stages(model: Any) -> dict[str, Stage]:
    """Pair the small model llama-0 with its two batches of prompts, each of which hides facts and asks for one of them.

    `_load_shipped` calls it. In "needles" the question stands at the prompt's end; in "later" it is fed when the prompt has
    been read and evicted.
    """
    return {
        "needles": Stage(model, read_needles(model.device)),
        "later": Stage(model, read_needles(model.device, in_prompt=False)),
    }


def _load_shipped(console: Console) -> dict[str, Stage]:
    """Load the two small models of kvpatch, print what each is, and pair it with its texts. `run` calls it first."""
    stages = _make_stages(load_model(str(MODELS / "llama-0"), "float32"))
    console.print(f"needles: {stages['needles'].text.what}, by the small model llama-0")
    name = str(MODELS / "llama-python")
    python, tokenizer = load_model(name, "float32"), load_tokenizer(name)
    stages["source"] = Stage(python, cut_excerpts(tokenizer, python.device))
    console.print(f"source:  {stages['source'].text.what}, by the small model llama-python, which has not seen it")
    return stages


def _try_policy(policy: str, k: float, stages: dict[str, Stage]) -> DemoOutcome:
    """Run all texts under one policy and budget, for a row of the demo's table: right answers, bytes, loss, predictions.

    `run` calls it for each row. Texts that ask for hidden facts give the right answers. The text of Python code ("source")
    gives the loss, the predictions and the bytes.
    """
    fed = {name: _feed_text(stage, policy, k) for name, stage in stages.items()}
    right, later = (stages[name].text.find_right(fed[name].logits_BSV) for name in ("needles", "later"))
    text, source = stages["source"].text, fed["source"]
    logits_BSV, next_BS = source.logits_BSV[:, :-1], text.ids_BT[:, text.n :]
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), next_BS.flatten())
    return DemoOutcome(policy, k, right, source.nbytes, later, float(loss), logits_BSV.argmax(-1))


def _feed_text(stage: Stage, policy: str, k: float) -> Fed:
    """Return logits and cache of a stage's text under a policy ("full": unpatched), fed token by token after the prompt.

    `_try_policy` calls it. The model is patched only inside. POLICIES: the demo's options of each policy.
    """
    text = stage.text
    if policy == "full":
        return feed(stage.model, text.ids_BT, text.n)
    with patched(stage.model, policy, k, **POLICIES.get(policy, {})):
        return feed(stage.model, text.ids_BT, text.n)


def _report_prompt(policy: str, k: float, stage: Stage) -> Report:
    """Read the first prompt alone under a policy; return the report of which tokens its cache then holds.

    `run` calls it for the strips and the picture.
    """
    text = stage.text
    with patched(stage.model, policy, k, **POLICIES.get(policy, {})):
        return Report.of(feed(stage.model, text.ids_BT[:1, : text.n], text.n).cache)
