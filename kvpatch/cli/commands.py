"""The app of `kvpatch`: demo, plan, generate, check, compare, calibrate, learn, serve, policies, architectures.

Needs the extra `cli`. Nothing here imports torch, so that help, lists and answers to typing errors are quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import KVPatchError
from ..planning.known_models import ARCHITECTURES
from ..policies.facts import FACTS
from ..policies.uses import USES, list_uses
from . import options as given
from .calibrate_command import calibrate, learn
from .loading import Source
from .model_commands import check, compare, generate
from .output import print_json, print_rows, short_errors
from .plan_command import plan
from .serve_command import serve
from .versions import describe_machine, describe_version

app = typer.Typer(
    help="Put a Hugging Face decoder's KV cache on a budget, and look at what that does.",
    epilog="On a CPU that others keep busy, set OMP_NUM_THREADS to the cores that are free: torch's threads wait for each "
    "other, and one that must wait for a core can make a run many times slower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: also the versions that a bug report needs, a line each.")
    ] = False,
) -> None:
    """Put a Hugging Face decoder's KV cache on a budget, and look at what that does."""
    # typer runs this before the command that was typed, and prints the docstring as help
    if version:
        print(describe_machine() if verbose else describe_version())
        raise typer.Exit
    with short_errors():
        if verbose:
            raise KVPatchError("--verbose goes with --version: kvpatch --version --verbose.")
        if context.invoked_subcommand is None:
            raise KVPatchError("Name a command; kvpatch --help lists them.")


@app.command()
def policies(json: given.Json = False) -> None:
    """List uses and the policy to take for each, then all policies with their options and papers."""
    if json:  # typer runs this for `kvpatch policies`, which imports no torch
        for one in FACTS.values():
            about = {"name": one.name, "paper": one.paper, "arxiv": one.address, "schedule": one.schedule}
            uses = [use.key for use in list_uses(one.name)]
            details = {"options": one.options, "use": one.describe_use(), "uses": uses, "link": one.link}
            print_json(about | details)
        return
    print_rows(("for", "type"), [(use.name, use.write_options()) for use in USES])
    print()
    rows = []
    for one in FACTS.values():
        options = ", ".join(f"{name}={value!r}" for name, value in one.options.items())
        rows.append((one.name, one.describe_use(), options, f"{one.paper} {one.link}".strip()))
    print_rows(("policy", "when to use it, what it keeps", "options", "paper"), rows)
    print("\nEvery policy also takes sinks= (first tokens), recent= (newest ones) and protect= (a mask or token ids).")


@app.command()
def architectures(json: given.Json = False) -> None:
    """List the architectures that have an adapter, and models that use them."""
    if json:  # typer runs this for `kvpatch architectures`, which imports no torch
        for name, models in ARCHITECTURES.items():
            print_json({"name": name, "models": models})
        return
    print_rows(("architecture", "models"), [*ARCHITECTURES.items()])
    print("\nA model that is not listed is checked when it is first used, and served if its attention goes through")
    print("transformers' attention interface; others take an adapter (kvpatch.register_arch). `kvpatch check MODEL` tells.")


@app.command()
def demo(
    model: given.Model = None,
    model_option: given.ModelOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("kvpatch-demo"),
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    json: given.Json = False,
) -> None:
    """Ask a model about a text of which each policy kept a part; prints answers and bytes, and saves a picture.

    Without a model: eight policies on two small models that come with kvpatch, which read texts made for them.
    """
    with short_errors():  # typer runs this for `kvpatch demo`; the docstring is its help
        if model is None and model_option is None:
            from .demo import run

            run(out, json)
        else:
            from . import story

            source = Source(given.find_model(model, model_option), dtype, device)
            source.check()
            story.run(source, out, json)


for command in (plan, generate, check, compare, calibrate, learn, serve):
    app.command()(command)
