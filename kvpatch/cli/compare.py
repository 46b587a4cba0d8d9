"""Implementation of `kvpatch compare`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from .. import __version__, plotting
from ..errors import KVPatchError, suggest
from ..evaluation.divergence import Comparison, DivergenceTable, Row
from ..policies import Policy, get_policy
from ..policies.needs import Calibrated
from ..policies.uses import CHANCE, SPARED
from . import compare_view as view
from .compare_text import ComparedText, read_text
from .loading import Source, parse_k
from .options import read_calibration
from .output import make_console, make_progress_bar, print_json, print_note, print_waiting

SETTINGS = "settings.json"
"""Name of the file of the advised settings, in the folder of the pictures."""


@dataclass(frozen=True)
class CompareOptions:
    """Arguments of a comparison.

    Attributes:
        policies: by the names that were typed.
        ks: budgets, by the texts that were typed.
        new: tokens to feed after each prompt, at most.
        schedule: of the policies; None for each policy's own.
        bits: of each key and value held; every budget is measured with each of these.
        seed: of the policies' random numbers.
        tolerance: largest KL to advise, nats per token.
        agreement: smallest share of agreeing predictions to advise.
        out: folder of the pictures and of SETTINGS.
        json: whether rows go to stdout as JSON, and everything else to stderr.
        raw: whether prompts are fed without the model's chat template.
        question: added to each prompt; None for none.
        later: a question that is fed when the prompt has been read and evicted; its answer alone counts. None for none.
        calibration: its file, for the policies that need one; None for none.
    """

    policies: dict[str, Policy]
    ks: dict[str, int | float | str]
    new: int
    schedule: str | None
    bits: tuple[int, ...]
    seed: int
    tolerance: float
    agreement: float
    out: Path
    json: bool
    raw: bool = False
    question: str | None = None
    later: str | None = None
    calibration: str | None = None


def run(asked: CompareOptions, source: Source, prompts: dict[str, str], continuation: str | None) -> None:
    """Measure each prompt, print rows as they come, save a picture per prompt, and at last the advised settings.

    The work of `kvpatch compare`, when its arguments have been read. It measures the cache's bytes, and how far predictions
    under each policy and budget diverge from the full cache's (KL, agreement).

    Args:
        asked: what to measure.
        source: the model.
        prompts: texts by the names of their files.
        continuation: a text to feed after the only prompt; None for the model's greedy continuation.

    Raises:
        KVPatchError: the model cannot be loaded, a text cannot be compared (see `read_text`), or a file cannot be written.
    """
    model, tokenizer = source.model(), source.tokenizer()
    out = make_console(stderr=asked.json)
    texts, results = dict[str, ComparedText](), []
    for file, prompt in prompts.items():  # check and encode all texts first, since measuring takes minutes
        try:
            with_question = prompt if asked.question is None else f"{prompt.rstrip()}\n\n{asked.question}"
            texts[file] = read_text(model, tokenizer, with_question, continuation, asked.new, asked.raw, asked.later)
        except KVPatchError as error:
            raise KVPatchError(f"{file}: {error}" if len(prompts) > 1 else str(error)) from error
    for number, (file, text) in enumerate(texts.items()):
        for note in [*text.notes, *warn_of_length(source.name, text.ids_1T.shape[1])]:
            print_note(note)
        print_waiting(f"reading {text.n:,} tokens of {file} ...")
        comparison = Comparison(model, text.ids_1T, text.n, asked.schedule, asked.seed, text.asked)
        empty = comparison.result([])  # a table without rows: the sizes of the text, and the bytes of the full cache
        facts = _list_facts(asked, model, source, file, continuation, empty)
        results.append(_measure_prompt(asked, comparison, empty, out, file, facts))
        path = asked.out / ("compare.png" if len(prompts) == 1 else f"compare-{number + 1}.png")
        plotting.save(view.draw_picture(results[-1], asked.tolerance, f"{source.name}, {file}: {text.n:,} tokens"), path)
        out.print(f"KL against the cache's size: {path}\n")
    _show_end(out, results, asked)


def _show_end(out: Console, results: list[DivergenceTable], asked: CompareOptions) -> None:
    """Print, after the last prompt, the columns' meanings, the advice and Python to paste; save the setting as settings.json.

    `run` calls it once. No file is saved if there is no setting to advise.
    """
    out.print(view.LEGEND, style="dim")
    out.print(f"\n{view.write_advice(results, asked.tolerance, asked.agreement)}")
    if (setting := view.find_best(results, asked.tolerance, asked.agreement)) is not None:
        policy, k, bits = setting
        given = policy, k, asked.policies[policy], asked.schedule, asked.seed, bits
        path = asked.out / SETTINGS
        # the policy's need of measured statistics, if it has one
        left_out = ", but for the calibration" if asked.policies[policy].needs.find(Calibrated) else ""
        out.print(f"\n    {view.write_python(*given, asked.calibration)}\n")
        view.make_settings(*given).save(path)
        out.print(f"The same settings{left_out}, for kvpatch.Settings.load and --settings: {path}")
    if len(results) == 1:
        out.print("One text is one text: give several of yours before you choose.")


def _measure_prompt(
    asked: CompareOptions, comparison: Comparison, empty: DivergenceTable, out: Console, file: str, facts: dict[str, Any]
) -> DivergenceTable:
    """Measure one prompt: divergence from the full cache under each setting (policy, budget, number of bits).

    `run` of `kvpatch compare` calls it for each prompt. Prints the table, each row as soon as it is measured, then notes; with
    --json each row too. Returns the table.
    """
    sizes = [Row("", k, None, bits=bits).size for k in asked.ks for bits in asked.bits]  # budgets as text, for the widths
    lines = view.Lines(asked.policies, sizes, empty)
    fed = "its own greedy text" if facts["continuation"] == "greedy" else "the continuation"
    fed = fed if asked.later is None else f"the question and {fed}, of which the answer counts"
    size = f"{empty.nbytes / 2**20:,.1f} MiB"
    out.print(f"{file}: a prompt of {empty.n:,} tokens, then {empty.fed:,} of {fed}; the full cache holds {size}.\n")
    out.print(lines.head)
    out.print(lines.format_full())
    with make_progress_bar(out) as bar:
        task = bar.add_task("", total=len(asked.policies) * len(asked.ks) * len(asked.bits))

        def on_row(row: Row) -> None:
            """Print the row of a setting; `Comparison.run` calls this as soon as it has measured one."""
            bar.advance(task)
            out.print(lines.format_row(row))
            if asked.json:
                print_json(make_json_row(row, asked.policies[row.policy], facts))

        def on_start(policy: str, size: str) -> None:
            bar.update(task, description=f"{policy} k={size}")

        result = comparison.run(asked.policies, asked.ks, on_row, on_start, asked.bits)
    for note in view.list_notes(result.rows):
        out.print(note)
    return result


def _list_facts(
    asked: CompareOptions, model: Any, source: Source, file: str, continuation: str | None, empty: DivergenceTable
) -> dict[str, Any]:
    """Return what all JSON rows of a prompt have in common: model, sizes, settings and versions.

    `run` calls it before the prompt is measured, and `on_row` prints it in each row. "fed_tokens" counts the tokens of the
    continuation, fed one by one after the prompt.
    """
    return {
        "model": source.name,
        "prompt": file,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "prompt_tokens": empty.n,
        "fed_tokens": empty.fed,
        "continuation": "greedy" if continuation is None else "file",
        "raw": asked.raw,
        "question": asked.question,
        "later": asked.later,
        "schedule": asked.schedule,
        "calibration": asked.calibration,
        "seed": asked.seed,
        "full_nbytes": empty.nbytes,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "kvpatch": __version__},
    }


def make_json_row(row: Row, policy: Policy, facts: dict[str, Any]) -> dict[str, Any]:
    """Return a row of --json: the measurements or the error, the policy's options, and `facts`.

    `on_row` prints it when a setting has been measured. "chance": the row is of random eviction, the baseline. facts: what all
    rows of a prompt have in common.
    """
    figures = {} if row.figures is None else asdict(row.figures)
    setting = {"policy": row.policy, "k": row.k, "bits": row.bits, "chance": row.policy == CHANCE, "error": row.error or None}
    options = {name: value for name, value in policy.options().items() if name != "calibration"}  # facts have its file
    return {**setting, **figures, "options": options, **facts}


def warn_of_length(name: str, tokens: int) -> list[str]:
    """Return [a warning] for a text longer than those a small model of kvpatch was trained on, or []; `run` prints it.

    name: of the model. Only kvpatch's small models have a card.json; its "longest_row" is the longest text in training.
    """
    try:
        card = json.loads((Path(name) / "card.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    trained = card.get("longest_row") if isinstance(card, dict) else None
    if not isinstance(trained, int) or tokens <= trained:
        return []
    return [
        f"{name} was trained on {trained:,} tokens at a time; beyond them its full cache is no better than a part of it, so "
        "give it a shorter text."
    ]


# ---- what is asked for ----


def choose_policies(names: str, options: dict[str, Any], new: int) -> dict[str, Policy]:
    """Return the policies that --policies of `compare` names, by name, and random eviction (CHANCE), the baseline to beat.

    `compare` calls it before the model is loaded. Each gets those of `options` that it has. new: number of generated tokens,
    for policies with an option `generation_length`. Random eviction spares the first and newest tokens (SPARED), as good
    policies do.

    Raises:
        KVPatchError: a name is unknown, none of the policies has an option, or one refuses an option's value.
    """
    named = {name.strip(): get_policy(name.strip()) for name in names.split(",") if name.strip()}
    if not named:
        raise KVPatchError("--policies names none: give some of `kvpatch policies`, such as h2o,roco.")
    allowed = dict.fromkeys(name for policy in named.values() for name in policy.options())
    for name in options:
        if name not in allowed:
            raise KVPatchError(
                f"--option {name}: none of {', '.join(named)} has it.{suggest(name, allowed)} They have: {', '.join(allowed)}."
            )
    chosen, given = {}, {"generation_length": new} | read_calibration(options)
    for name, policy in ({CHANCE: get_policy(CHANCE).with_options(**SPARED)} | named).items():
        chosen[name] = policy.with_options(**{key: given[key] for key in policy.options() if key in given})
    return chosen


def parse_budgets(text: str) -> dict[str, int | float | str]:
    """Parse the budgets that -k of `compare` lists with commas, by the text of each. Raises KVPatchError for an invalid one."""
    parsed = {part.strip(): parse_k(part.strip()) for part in text.split(",") if part.strip()}
    if not parsed:
        raise KVPatchError("-k names no budget: give some, such as 0.5,0.2.")
    return parsed
