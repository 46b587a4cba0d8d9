"""Implementation of `kvpatch compare`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from .. import __version__, plotting
from ..errors import KVPatchError, suggest
from ..evaluation.divergence import Comparison, Result, Row
from ..policies import Policy, get_policy
from ..policies.budgets import check_k
from . import compare_view as view
from .compare_view import CHANCE
from .loading import encode, parse_k

LEAST = 8
"""Fewest tokens of a prompt; a shorter one leaves nothing to choose from."""


@dataclass(frozen=True)
class Asked:
    """Arguments of a comparison.

    Attributes:
        policies: by the names that were typed.
        ks: budgets, by the texts that were typed.
        new: tokens to feed after the prompt, at most.
        schedule: of the policies; None for each policy's own.
        seed: of the policies' random numbers.
        tolerance: largest KL to advise, nats per token.
        agreement: smallest share of agreeing predictions to advise.
        out: folder of the picture.
        lines: file for the figures in JSON, or None.
    """

    policies: dict[str, Policy]
    ks: dict[str, int | float | str]
    new: int
    schedule: str | None
    seed: int
    tolerance: float
    agreement: float
    out: Path
    lines: Path | None


def run(asked: Asked, model: Any, tokenizer: Any, prompt: str, own: str | None, name: str) -> None:
    """Measure, and print and save the results; `name` is the model's, `own` a text to feed or None for greedy text.

    Raises:
        KVPatchError: as `text_ids`, or a file cannot be written.
    """
    ids_1T, n, notes = text_ids(model, tokenizer, prompt, own, asked.new)
    for note in notes:
        print(note, file=sys.stderr)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=len(asked.policies) * len(asked.ks))

        def on_row(row: Row) -> None:
            progress.update(task, advance=1, description=f"{row.policy} k={row.k}")

        result = Comparison(model, ids_1T, n, asked.schedule, asked.seed).run(asked.policies, asked.ks, on_row)
    fed = f"{result.fed:,} tokens of {'its own greedy text' if own is None else 'the continuation'}"
    title = f"{name}: a prompt of {n:,} tokens, then {fed}, fed one by one"
    # wrapped by a narrow terminal rather than cut
    console = Console(highlight=False, markup=False, width=max(Console().width, 120))
    console.print(f"{title}.\n", soft_wrap=True)
    view.show(console, result, asked.tolerance, asked.agreement)
    if asked.lines is not None:
        _write(asked.lines, json_lines(result, asked, model, name, "greedy" if own is None else "file"))
    path = asked.out / "compare.png"
    plotting.save(view.picture(result, asked.tolerance, title), path)
    console.print(f"\nKL against the budget: {path}", soft_wrap=True)


def json_lines(result: Result, asked: Asked, model: Any, name: str, continuation: str) -> str:
    """Format one JSON object per row, each with all settings of the run."""
    where = {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "prompt_tokens": result.n,
        "fed_tokens": result.fed,
        "continuation": continuation,
        "schedule": asked.schedule,
        "seed": asked.seed,
        "full_nbytes": result.nbytes,
        "full_seconds": result.seconds,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "kvpatch": __version__},
    }
    lines = []
    for row in result.rows:
        figures = {} if row.figures is None else asdict(row.figures)
        said = {"policy": row.policy, "k": row.k, "chance": row.policy == CHANCE, "error": row.error or None}
        options = asked.policies[row.policy].options() | {"protect": None}
        lines.append(json.dumps({**said, **figures, "options": options, **where}))
    return "\n".join(lines) + "\n"


def prepare(out: Path, lines: Path | None) -> None:
    """Make the folder for the picture and check the file for the figures, before anything is measured.

    Raises:
        KVPatchError: one of them cannot be written, or matplotlib is missing.
    """
    plotting.new_figure()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVPatchError(f"--out {out} cannot be made: {error.strerror}") from error
    if lines is not None:
        _write(lines, "", "a")  # keeps the figures of an earlier run until there are new ones


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise KVPatchError(f"--json {path} cannot be written: {error.strerror}") from error


# ---- what is asked for ----


def choose(names: str, options: dict[str, Any], new: int) -> dict[str, Policy]:
    """Look up the policies of a comma-separated list, and CHANCE, and set those `options` that each has.

    new: number of generated tokens, for policies whose temperature depends on it.

    Raises:
        KVPatchError: an unknown name, an option that none of them has, or a value that one of them refuses.
    """
    asked = {name.strip(): get_policy(name.strip()) for name in names.split(",") if name.strip()}
    if not asked:
        raise KVPatchError("--policies names none: give some of `kvpatch policies`, such as h2o,roco.")
    known = dict.fromkeys(name for policy in asked.values() for name in policy.options())
    for name in options:
        if name not in known:
            raise KVPatchError(
                f"--option {name}: none of {', '.join(asked)} has it.{suggest(name, known)} They have: {', '.join(known)}."
            )
    chosen = {}
    for name, policy in ({CHANCE: get_policy(CHANCE)} | asked).items():
        given = {"generation_length": new} | options
        chosen[name] = policy.with_options(**{key: given[key] for key in policy.options() if key in given})
    return chosen


def budgets(text: str) -> dict[str, int | float | str]:
    """Parse a comma-separated list of budgets, by the text of each. Raises KVPatchError for an invalid one."""
    parsed = {part.strip(): parse_k(part.strip()) for part in text.split(",") if part.strip()}
    if not parsed:
        raise KVPatchError("-k names no budget: give some, such as 0.5,0.2.")
    for k in parsed.values():
        check_k(k)
    return parsed


def text_ids(model: Any, tokenizer: Any, prompt: str, own: str | None, new: int) -> tuple[Tensor, int, list[str]]:
    """Encode the text: token ids [1,n+m] of prompt and fed text, n, and sentences about omitted tokens.

    Args:
        model: the unpatched model.
        tokenizer: of the model.
        prompt: text of the prompt.
        own: text to feed; None for the unpatched model's greedy continuation.
        new: tokens to feed, at most.

    Raises:
        KVPatchError: too short a prompt, nothing to feed, no room for it, or a tokenizer of another model.
    """
    fed = None if own is None else tokenizer(own, add_special_tokens=False, return_tensors="pt").input_ids.long()
    if fed is not None and (not fed.numel() or int(fed.max()) >= model.get_input_embeddings().num_embeddings):
        raise KVPatchError("--continuation-file: the tokenizer makes no tokens of it that this model knows.")
    notes = []
    if fed is not None and fed.shape[1] > new:
        notes.append(f"The continuation has {fed.shape[1]:,} tokens: the first {new:,} are fed (--max-new-tokens).")
    ids, note = encode(model, tokenizer, prompt, new if fed is None else min(new, fed.shape[1]))
    if (n := ids.shape[1]) < LEAST:
        raise KVPatchError(f"The prompt has {n} tokens; with fewer than {LEAST} there is nothing to choose from.")
    fed = _continue(model, ids, new) if fed is None else fed[:, :new].to(ids.device)
    return torch.cat([ids, fed], 1), n, [note] * bool(note) + notes


def _continue(model: Any, ids_1T: Tensor, new: int) -> Tensor:
    """Generate the model's greedy continuation, [1,m], without the token that ends it."""
    end, padding = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    ends = end if isinstance(end, list) else [end]
    out_1T = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=new,
        do_sample=False,
        num_beams=1,
        pad_token_id=0 if padding is None else padding,
    )
    fed = out_1T[:, ids_1T.shape[1] :]
    if int(fed[0, -1]) in ends:  # predictions after the end of a text say nothing about it
        fed = fed[:, :-1]
    if not fed.numel():
        raise KVPatchError("The model ends its text right after this prompt: give one to feed with --continuation-file.")
    return fed
