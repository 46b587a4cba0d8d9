"""The commands of `kvpatch`: demo, generate, check, compare, policies, architectures. Needs the extra `cli`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import TextStreamer
from transformers.utils import logging

from ..errors import KVPatchError
from ..evaluation.check import check_model
from ..patching import patched
from ..policies import get_policy
from . import tables
from .loading import encode, load_model, load_tokenizer, parse_k, read_prompt

app = typer.Typer(
    help="Put a Hugging Face decoder's KV cache on a budget, and look at what that does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option("--model", help="A folder, or a model's name on the Hugging Face hub.")]
PolicyName = Annotated[
    str, typer.Option("--policy", help='A name of `kvpatch policies`, or a combination such as "critical(adaptive(roco))".')
]
Budget = Annotated[str, typer.Option("-k", help="0.5 is half of the prompt, 1024 is tokens, 2GiB is bytes of one row.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, float64, bfloat16 or float16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")]
Schedule = Annotated[str | None, typer.Option("--schedule", help="prompt, decode or both; else the policy's own.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the policy's random numbers.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="A policy's option, as in -o window=16; any number of times.")
]

KS = "0.7,0.5,0.3,0.2"  # budgets of `compare` by default


@contextmanager
def short_errors() -> Iterator[None]:
    """Turn a KVPatchError into one line on stderr and exit code 2."""
    logging.set_verbosity_error()
    getLogger("huggingface_hub").setLevel("ERROR")
    logging.disable_progress_bar()
    try:
        yield
    except KVPatchError as error:
        print(f"kvpatch: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """Parse `name=value` pairs; values are Python literals or texts. Raises KVPatchError for a malformed pair."""
    options = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise KVPatchError(f"--option {text} must look like name=value, such as window=16.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def _show(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, style="cyan" if i == 0 else None, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


@app.command()
def policies() -> None:
    """List the policies, the tokens that each protects, and options with their defaults."""
    _show(tables.POLICY_COLUMNS, tables.policy_rows())
    print("\nEvery policy also takes sinks= (first tokens), recent= (newest ones) and protect= (a mask or token ids).")


@app.command()
def architectures() -> None:
    """List the architectures that have an adapter."""
    _show(tables.ARCHITECTURE_COLUMNS, tables.architecture_rows())
    print("\nAnother one takes a short adapter: see `kvpatch.register_arch` and the README.")


@app.command()
def generate(  # noqa: PLR0913 - typer: an option is a parameter
    model: Model,
    prompt_file: Annotated[str, typer.Option(help="A text to go on from; - reads standard input.")],
    policy: PolicyName = "keyformer",
    k: Budget = "0.5",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    schedule: Schedule = None,
    block: Annotated[int | None, typer.Option(help="Read the prompt so many tokens at a time, and evict after each.")] = None,
    positions: Annotated[str, typer.Option(help="original or renumbered.")] = "original",
    backend: Annotated[str, typer.Option(help="Who computes attention: auto, torch, flash or triton.")] = "auto",
    seed: Seed = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop with an error where a number is NaN or infinite.")] = False,
    option: Options = None,
) -> None:
    """Generate greedily from a prompt under a budget, then report the kept tokens."""
    with short_errors():
        get_policy(policy).with_options(schedule, **parse_options(option))  # fail on a misspelt option before loading the model
        text = read_prompt(prompt_file)
        lm, tokenizer = load_model(model, dtype, device), load_tokenizer(model)
        ids, note = encode(lm, tokenizer, text, max_new_tokens)
        if note:
            print(note, file=sys.stderr)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        padding = lm.generation_config.pad_token_id
        how: dict[str, Any] = {"schedule": schedule, "block": block, "positions": positions, "backend": backend}
        how |= {"seed": seed, "strict": strict, **parse_options(option)}
        with patched(lm, policy, parse_k(k), **how) as patch:
            lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=streamer,
                pad_token_id=0 if padding is None else padding,
            )
        report = patch.report()
        print(f"\n{report}\n\nwhat was kept, from the first token to the last:\n{report.strip()}")


@app.command()
def check(
    model: Model,
    policy: PolicyName = "keyformer",
    k: Budget = "0.5",
    dtype: Dtype = "float32",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Check on your own model, in seconds and on random ids, that the patch keeps its promises."""
    with short_errors():
        get_policy(policy)
        table = check_model(load_model(model, dtype, device), policy, parse_k(k), seed=seed)
    _show(("", "check", "measured"), [("pass" if r.passed else "FAIL", r.name, r.detail) for r in table])
    print(f"\n{table.note}")
    if not table.passed:
        raise typer.Exit(1)


@app.command()
def compare(  # noqa: PLR0913 - typer: an option is a parameter
    model: Model,
    prompt_file: Annotated[str, typer.Option(help="Your own prompt; - reads standard input.")],
    continuation_file: Annotated[
        str | None,
        typer.Option(help="A text to feed after the prompt; else what the unpatched model itself writes on, greedily."),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Comma-separated, as for --policy of generate; random is always measured beside them.")
    ] = "window,streaming_llm,h2o,roco,keyformer,tova,snapkv,critical_adakv",
    budgets: Annotated[
        list[str] | None,
        typer.Option("--budgets", "-k", help="Comma-separated, as -k of generate; any number of times.", show_default=KS),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed after the prompt, at most.")] = 64,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="KL to advise, nats per token: 0.05 adds 5% perplexity on the full model's own text.")
    ] = 0.05,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of likeliest tokens as full, to advise.")] = 0.95,
    dtype: Dtype = "auto",
    device: Device = "auto",
    schedule: Schedule = None,
    seed: Seed = 0,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="As in -o window=16, for every policy that has it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("kvpatch-compare"),
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file too, a JSON object per line.")] = None,
) -> None:
    """Compare policies and budgets on your own prompt by their next-token distributions.

    The unpatched and the patched model are fed the same tokens after the prompt, one by one, and their predictions are
    compared: KL, agreement, bytes, time. Prints a table and one sentence of advice, and saves a picture.
    """
    from . import compare as comparing

    with short_errors():
        get_policy("full").with_options(schedule)  # refuse an unknown schedule; a policy that refuses a known one gets a row
        chosen = comparing.choose(policies, parse_options(option), max_new_tokens)
        ks = comparing.budgets(",".join(budgets or [KS]))
        asked = comparing.Asked(chosen, ks, max_new_tokens, schedule, seed, tolerance, agreement, out, json)
        own = None if continuation_file is None else read_prompt(continuation_file, "--continuation-file")
        prompt = read_prompt(prompt_file)
        comparing.prepare(out, json)
        lm, tokenizer = load_model(model, dtype, device), load_tokenizer(model)
        comparing.run(asked, lm, tokenizer, prompt, own, model)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("kvpatch-demo"),
    model: Annotated[str | None, typer.Option(help="Your own model instead of the two small ones that come along.")] = None,
) -> None:
    """Run several policies on prompts that need their cache; prints answers, bytes and speed, and saves a picture."""
    from .demo import run

    with short_errors():
        run(out, model)
