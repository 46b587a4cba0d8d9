"""The papers' own tables: their rows, columns and numbers (published.json), and what each cell is measured by.

A job is what is run once for many cells: a model, one of tools/evaluation's tasks or one of lm-evaluation-harness', its data.
tables.py runs jobs and puts the papers' numbers beside ours. A figure without numbers in print has none here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvpatch.errors import KVPatchError, suggest

from .longbench_sets import SETS
from .task import FULL, Setting

HARNESS = "lm_eval"
"""The task of a job that lm-evaluation-harness runs; its data names the harness' task."""

MODELS: dict[str, tuple[str, float]] = {
    "Cerebras-GPT-6.7B": ("cerebras/Cerebras-GPT-6.7B", 6.7e9),
    "MPT-7B": ("mosaicml/mpt-7b", 6.7e9),
    "MPT-7B-chat": ("mosaicml/mpt-7b-chat", 6.7e9),
    "GPT-J-6B": ("EleutherAI/gpt-j-6b", 6.1e9),
    "LLaMa2-7B-chat": ("meta-llama/Llama-2-7b-chat-hf", 6.7e9),
    "WizardLM-7B": ("WizardLMTeam/WizardLM-7B-V1.0", 6.7e9),
    "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B-Instruct", 8.0e9),
    "Mistral-7B": ("mistralai/Mistral-7B-Instruct-v0.3", 7.2e9),
}
"""The papers' names: name on the hub, parameters. No paper says where its weights are; --model NAME=PATH takes others."""


@dataclass(frozen=True)
class Job:
    """prompt, new: about how many tokens a sample reads and writes, for the estimate alone. read: the harness' metric."""

    model: str
    task: str
    data: str
    samples: int
    prompt: int
    new: int
    options: tuple[tuple[str, Any], ...] = ()
    read: str = ""
    chat: bool = False


@dataclass(frozen=True)
class Cell:
    """The mean of `metric` over jobs, times `scale`; over: another setting's value over this one's."""

    jobs: tuple[Job, ...]
    setting: Setting
    metric: str = "value"
    where: dict[str, Any] = field(default_factory=dict)
    scale: float = 100.0
    over: Setting | None = None

    @property
    def settings(self) -> list[Setting]:
        return [self.setting] if self.over is None else [self.over, self.setting]


Row = tuple[tuple[str, ...], tuple[float | None, ...]]
"""What stands at the left of a row, and the paper's numbers."""


@dataclass(frozen=True)
class Published:
    """One table of a paper. cell: what fills the cell of a row (its labels) in a column."""

    name: str
    title: str
    notes: tuple[str, ...]
    cell: Callable[[tuple[str, ...], str], Cell]
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def cells(self) -> Iterator[tuple[tuple[str, ...], str, float | None, Cell]]:
        for labels, numbers in self.rows:
            for column, number in zip(self.columns, numbers, strict=True):
                yield labels, column, number, self.cell(labels, column)


# ---- Keyformer ----

_BEAMS = "The paper writes with 4 beams; this is greedy."
_BOTH: dict[str, Any] = {"schedule": "both"}
_NEWS: dict[str, Any] = {"samples": 1000, "prompt": 1000, "new": 128}
"""CNN/DailyMail: some 780 words an article. The paper does not say how many it takes."""


def _keyformer_2(labels: tuple[str, ...], column: str) -> Cell:
    task, attention = labels
    model, shots = column.removesuffix(" shots").split(", ")
    job = Job(model, HARNESS, task.lower(), 500, 40 * (1 + int(shots)), 0, (("num_fewshot", int(shots)),), "acc")
    policy = {"Full": FULL, "H2O": Setting("h2o", 0.5, {"block": 4}), "Keyformer": Setting("keyformer", 0.5, {"block": 4})}
    return Cell((job,), policy[attention])


_TABLE_3 = {
    "Full": FULL,
    "Window": Setting("window", 0.6, _BOTH),
    "H2O": Setting("h2o", 0.6, _BOTH),
    "StreamingLLM": Setting("streaming_llm", 0.6, _BOTH),
    "Keyformer (New Pos), Per-Layer": Setting("keyformer", 0.6, _BOTH | {"positions": "renumbered"}, "keyformer, renumbered"),
    "Keyformer (Org Pos), Per-Layer": Setting("keyformer", 0.6, _BOTH),
    "Keyformer (Org Pos), Shared": Setting("keyformer", 0.6, _BOTH | {"shared": True}, "keyformer, shared"),
}
_ROUGE = {"ROUGE-1": "ref_rouge1", "ROUGE-2": "ref_rouge2", "ROUGE-L": "ref_rougeL"}


def _keyformer_3(labels: tuple[str, ...], column: str) -> Cell:
    attention, score, _ = labels
    job = Job("MPT-7B", "summarize", "cnn_dailymail", **_NEWS)
    if attention == "Full (99% Accuracy)":
        return Cell((job,), FULL, _ROUGE[column], scale=99.0)
    return Cell((job,), _TABLE_3.get(f"{attention}, {score}") or _TABLE_3[attention], _ROUGE[column])


def _keyformer_4(labels: tuple[str, ...], column: str) -> Cell:
    job = Job(labels[0], "summarize", "cnn_dailymail", **_NEWS)
    noise = column.lower()
    own = Setting("keyformer", 0.6, _BOTH | {"noise": noise}, f"keyformer, {noise}")
    return Cell((job,), Setting("h2o", 0.6, _BOTH) if noise == "none" else own, "ref_rouge2")


def _keyformer_7(labels: tuple[str, ...], column: str) -> Cell:
    model, data, attention = labels
    about: dict[str, Any] = _NEWS if data == "CNN/DailyMail" else {"samples": 1000, "prompt": 200, "new": 128}
    job = Job(model, "summarize", {"CNN/DailyMail": "cnn_dailymail", "SODA": "soda"}[data], **about)
    k = int(column.removesuffix("%")) / 100
    return Cell((job,), FULL if attention == "Full" else Setting(attention.lower(), k, _BOTH), "ref_rouge2")


# ---- RoCo ----

_METHODS = {name: name.lower() for name in ("Random", "ScissorHands", "H2O", "TOVA", "RoCo")} | {"StreamLLM": "streaming_llm"}
_AGAINST_FULL = {"BLEU": "bleu", "Meteor": "meteor", "R-1": "rouge1", "R-2": "rouge2", "R-L": "rougeL"}
_AGAINST_FULL |= {f"ROUGE-{n}": f"rouge{n}" for n in "12L"}
_XSUM: dict[str, Any] = {"samples": 1000, "prompt": 560, "new": 128}


def _tokenwise(policy: str, block: int = 1) -> Setting:
    """The prompt is read `block` tokens at a time, with eviction after each block."""
    label = policy if block == 1 else f"{policy}, block {block}"
    return Setting(policy, 0.5, {"schedule": "prompt", "block": block}, label)


def _roco_2(labels: tuple[str, ...], column: str) -> Cell:
    model, method = labels
    data, metric = column.split(" ")
    name, about = ("xsum", _XSUM) if data == "XSum" else ("cnn_dailymail", _NEWS)
    job = Job(model, "summarize", name, **about)
    return Cell((job,), _tokenwise(_METHODS[method]), _AGAINST_FULL[metric])


def _roco_3(labels: tuple[str, ...], column: str) -> Cell:
    job = Job(labels[0], "reconstruct", "cnn_dailymail", 1000, 1000, 512)
    return Cell((job,), _tokenwise(_METHODS[labels[1]]), _AGAINST_FULL[column])


def _roco_4(labels: tuple[str, ...], column: str) -> Cell:
    job = Job(labels[0], "instruct", "alpaca_eval", 805, 50, 500, (("max_new_tokens", 500),))
    return Cell((job,), Setting(_METHODS[labels[1]], 250, {"schedule": "decode"}), _AGAINST_FULL[column])


def _roco_6(labels: tuple[str, ...], column: str) -> Cell:
    job, setting = Job("LLaMa2-7B-chat", "summarize", "xsum", **_XSUM), _tokenwise("roco", int(labels[0]))
    if column == "speed up":
        return Cell((job,), setting, "prompt_seconds", {"scenario": "timing"}, 1.0, _tokenwise("roco"))
    return Cell((job,), setting, _AGAINST_FULL[column])


# ---- CriticalKV ----

_DOMAINS = {
    "Single-Doc. QA": "single-document QA", "Multi-Doc. QA": "multi-document QA", "Summarization": "summarization",
    "Few-shot": "few-shot", "Synthetic": "synthetic", "Code": "code",
}  # fmt: skip
_MEAN_TOKENS = 6711
"""Over LongBench's sixteen sets, as the paper gives it."""


def _two_stage(column: str) -> Setting:
    """ "SnapKV 20% w/" and its kin."""
    if column == "Full cache":
        return FULL
    base, share, which = column.split(" ")
    name = ("critical_" if which == "w/" else "") + base.lower()
    return Setting(name, int(share.removesuffix("%")) / 100, {"schedule": "prompt", "window": 32, "kernel": 7})


def _longbench(model: str, labels: tuple[str, ...], column: str) -> Cell:
    """Regular compression by the harness' own tasks; questions after compression, which it has not, by longbench.py."""
    scenario, domain = labels
    sets = [name for name, one in SETS.items() if domain == "Ave." or one.domain == _DOMAINS[domain]]
    if scenario == "Regular":
        jobs = tuple(
            Job(model, HARNESS, f"longbench_{name}", 200, _MEAN_TOKENS, SETS[name].new, (), "score", SETS[name].template)
            for name in sets
        )
        return Cell(jobs, _two_stage(column))
    jobs = tuple(
        Job(model, "longbench", "hub", 200, _MEAN_TOKENS, SETS[name].new, (("sets", name), ("scenario", "context")))
        for name in sets
    )
    return Cell(jobs, _two_stage(column), "score", scale=1.0)


def _needles(labels: tuple[str, ...], column: str) -> Cell:
    model, test = labels
    task = {"Single retrieval": "niah_single_2", "Multi retrieval": "niah_multiquery"}[test]
    return Cell((Job(model, HARNESS, task, 100, 32768, 128, (), "32768"),), _two_stage(column))


def _figure_5(labels: tuple[str, ...], column: str) -> Cell:
    job = Job("Llama-3.1-8B", "by_token", "hub", 200, 2113, 5)
    return Cell((job,), Setting("critical_snapkv", 0.2, {"window": 32, "kernel": 7}), f"heads_lower_{labels[0]}")


_QUESTIONS = (
    "A request is read 4 tokens at a time, with eviction after each; half the cache is half of the request. The paper does "
    "not say.",
    "The harness is today's; the paper's is of 2021. `acc`, not normalised by length.",
)
_TOKENWISE = ("References are the full cache's texts; prompts are read token by token, with eviction at each.",)
_LONGBENCH = (
    "Regular: lm-evaluation-harness' own tasks, its prompts. Context-only: tools/evaluation/longbench.py, for the harness "
    "has none.",
)

_ROWS: tuple[tuple[str, str, tuple[str, ...], Callable[[tuple[str, ...], str], Cell]], ...] = (
    ("keyformer-2", "Keyformer, Table 2: few-shot accuracy, H2O and Keyformer at 50%", _QUESTIONS, _keyformer_2),
    ("keyformer-3", "Keyformer, Table 3: summaries of CNN/DailyMail by MPT-7B", (_BEAMS,), _keyformer_3),
    ("keyformer-4", "Keyformer, Table 4: ROUGE-2 by what is added to the logits, 60% of the cache",
     (_BEAMS, "None is H2O, as in the paper. The paper's GPT-J was fine-tuned on summaries; it is not published."),
     _keyformer_4),
    ("keyformer-figure-7", "Keyformer, Figure 7: ROUGE-2 by the share of the cache",
     (_BEAMS, "The paper prints no numbers; it says that Keyformer reaches 99% of the full cache's at 70%, and others not at "
      "90%."),
     _keyformer_7),
    ("roco-2", "RoCo, Table 2: summaries at half the cache", _TOKENWISE, _roco_2),
    ("roco-3", "RoCo, Table 3: the context written again at half the cache", _TOKENWISE, _roco_3),
    ("roco-4", "RoCo, Table 4: answers to AlpacaEval with 250 generated tokens in the cache", _TOKENWISE[:0], _roco_4),
    ("roco-6", "RoCo, Table 6: summaries of XSum, prompts read in blocks",
     ("Speed up: a prompt's time with blocks of 1 over its time with this block.",), _roco_6),
    ("criticalkv-1", "CriticalKV, Table 1: LongBench, Llama", _LONGBENCH, partial(_longbench, "Llama-3.1-8B")),
    ("criticalkv-2", "CriticalKV, Table 2: LongBench, Mistral",
     (*_LONGBENCH, "Numbers stand under the scenarios as printed; by the paper's text (4.5, Appendix C) the two have changed "
      "places."),
     partial(_longbench, "Mistral-7B")),
    ("criticalkv-figures-1-2", "CriticalKV, Figures 1 and 2: RULER's needles in 32K tokens, regular compression",
     ("lm-evaluation-harness' RULER: niah_single_2 and niah_multiquery. Of the paper's numbers those that its text names.",),
     _needles),
    ("criticalkv-figure-5", "CriticalKV, Figure 5: share of heads whose output two-stage selection moves less, SnapKV at 20%",
     ("MultiNews, and the full cache's first tokens. Tokens as in the figure; the paper's text calls them 1, 2 and 3.",),
     _figure_5),
)  # fmt: skip


def _read() -> dict[str, Published]:
    numbers = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    found = {}
    for name, title, notes, cell in _ROWS:
        one = numbers[name]
        size = len(one["labels"])
        rows = tuple((tuple(row[:size]), tuple(row[size:])) for row in one["rows"])
        found[name] = Published(name, title, notes, cell, tuple(one["labels"]), tuple(one["columns"]), rows)
    return found


PUBLISHED = _read()


def get(name: str) -> Published:
    """Raises KVPatchError for a name that is no table's."""
    if name not in PUBLISHED:
        raise KVPatchError(f"Unknown table {name!r}.{suggest(name, PUBLISHED)} Known: {', '.join(PUBLISHED)}.")
    return PUBLISHED[name]
