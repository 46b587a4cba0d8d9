"""The app of `kvpatch`: demo, generate, check, compare, calibrate, learn, tune, serve, policies, architectures.

Needs the extra `cli`. Nothing here imports torch, so that help, lists and answers to typing errors are quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import options as given
from .calibrate_command import calibrate, learn
from .catalogue import ARCHITECTURES, POLICIES
from .model_commands import check, compare, generate
from .options import parse_options
from .output import print_json, print_rows, short_errors
from .serve_command import serve
from .tune_command import tune

__all__ = ["app", "parse_options", "short_errors"]

app = typer.Typer(
    help="Put a Hugging Face decoder's KV cache on a budget, and look at what that does.",
    epilog="On a CPU that others keep busy, set OMP_NUM_THREADS to the cores that are free: torch's threads wait for each "
    "other, and one that must wait for a core can make a run many times slower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"kvpatch {__version__} ({_installed('torch')}, {_installed('transformers')}, Python {python})")
        raise typer.Exit


def _installed(package: str) -> str:
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Put a Hugging Face decoder's KV cache on a budget, and look at what that does."""


@app.command()
def policies(json: given.Json = False) -> None:
    """List the policies, when to use each, options with their defaults, and papers."""
    if json:
        for one in POLICIES.values():
            print_json({**vars(one), "link": one.link})
        return
    rows = []
    for one in POLICIES.values():
        options = ", ".join(f"{name}={value!r}" for name, value in one.options.items())
        rows.append((one.name, one.use, options, f"{one.paper} {one.link}".strip()))
    print_rows(("policy", "when to use it, what it keeps", "options", "paper"), rows)
    print("\nEvery policy also takes sinks= (first tokens), recent= (newest ones) and protect= (a mask or token ids).")


@app.command()
def architectures(json: given.Json = False) -> None:
    """List the architectures that have an adapter, and models that use them."""
    if json:
        for name, models in ARCHITECTURES.items():
            print_json({"name": name, "models": models})
        return
    print_rows(("architecture", "models"), [*ARCHITECTURES.items()])
    print("\nA model that is not listed is checked when it is first used, and served if its attention goes through")
    print("transformers' attention interface; others take an adapter (kvpatch.register_arch). `kvpatch check MODEL` tells.")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("kvpatch-demo"),
    model: Annotated[
        str | None, typer.Option(help="Your own model instead of the two that come along.", show_default=False)
    ] = None,
    json: given.Json = False,
) -> None:
    """Run eight policies on prompts that need their cache; prints answers and bytes, and saves a picture."""
    with short_errors():
        from .demo import run

        run(out, model, json)


for command in (generate, check, compare, calibrate, learn, tune, serve):
    app.command()(command)
