"""Output of the command line: errors of one line, tables, JSON, and lines for whoever waits."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import KVPatchError
from ..report_text import align_rows

WIDE = 10_000
"""Width of an output that is no terminal: nothing is folded there, so that grep sees whole rows."""


_PREFIX = "[kvpatch]"


@contextmanager
def short_errors() -> Iterator[None]:
    """Turn a KVPatchError into one line on stderr and exit code 2, and Ctrl-C into exit code 130.

    Each command runs inside it. A warning of kvpatch becomes a line too, without the place in the code.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning(warnings.showwarning)
            yield
    except KVPatchError as error:
        print(f"kvpatch: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("kvpatch: interrupted.", file=sys.stderr)
        raise typer.Exit(130) from None


def _show_warning(others: Callable[..., None]) -> Callable[..., None]:
    """Return a function for warnings.showwarning: it prints kvpatch's warnings in a line, and others by `others`.

    `short_errors` calls it when a command begins.
    """

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        """Print a warning; warnings.warn() calls this while a command runs."""
        if str(message).startswith(_PREFIX):
            print_note(f"kvpatch: {str(message).removeprefix(_PREFIX).strip()}")
        else:
            others(message, *where, **more)

    return show


def make_console(stderr: bool = False) -> Console:
    """Make a console for stdout or stderr that folds lines at a terminal's width and nowhere else."""
    made = Console(stderr=stderr, highlight=False, markup=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=WIDE)


def print_note(text: str) -> None:
    """Print a line to stderr, which leaves stdout to results."""
    print(text, file=sys.stderr, flush=True)


def print_waiting(text: str) -> None:
    """Print to stderr what the command is about to do, if somebody looks at it."""
    if sys.stderr.isatty():
        print_note(text)


def print_json(value: Any) -> None:
    """Print one JSON object as one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a command's table: a line per row, but folded at words on a terminal. `policies`, `check` and `plan` call it.

    The first column is never folded. On a terminal a row's other cells, if there are three or more, stand below one another.
    """
    out = make_console()
    if not out.is_terminal:
        print("\n".join(align_rows([columns, *rows])))
        return
    if len(columns) > 3:
        columns = (columns[0], ", ".join(columns[1:]))
        rows = [(name, "\n".join(filter(None, cells))) for name, *cells in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, style="cyan" if i == 0 else None, no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def make_progress_bar(out: Console) -> Progress:
    """Return the progress bar of a command that measures; its label has a fixed width.

    Nothing is drawn if stderr is no terminal. `demo`, `compare` and `calibrate` draw one. On a terminal it shares `out`, so
    that rows printed there appear above it.
    """
    place = out if out.is_terminal else make_console(stderr=True)
    return Progress(
        TextColumn("{task.description:<28.28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=place,
        transient=True,
        disable=not place.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def make_folder(out: Path) -> None:
    """Make the folder of `--out`, and look for matplotlib; `demo` and `compare` call it before anything is measured.

    Raises:
        KVPatchError: the folder cannot be made, or matplotlib is missing.
    """
    from .. import plotting  # which imports torch

    plotting.new_figure()  # raises if matplotlib is missing
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVPatchError(f"--out {out} cannot be made: {error.strerror}") from error
