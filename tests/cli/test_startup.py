"""What answers at once: help, lists and typing errors import neither torch nor transformers."""

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvpatch
from kvpatch.cli import output, versions
from kvpatch.cli.commands import app

ROOT = Path(__file__).parents[2]
LISTED = "\nimport sys; print([name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)"
START = "import sys\nsys.argv = ['kvpatch', *{}]\ntry:\n    import runpy; runpy.run_module('kvpatch', run_name='__main__')\n"
START += "except SystemExit as end:\n    print('exit', end.code, file=sys.stderr)" + LISTED


def started(*arguments):
    done = subprocess.run([sys.executable, "-c", START.format([*arguments])], cwd=ROOT, capture_output=True, text=True)
    *said, code, imported = done.stderr.splitlines()
    return done.stdout, "\n".join(said), code, imported


@pytest.mark.parametrize(
    "arguments", [["--help"], ["compare", "--help"], ["--version"], ["policies"], ["architectures"], ["policies", "--json"]]
)
def test_help_and_lists_import_no_torch(arguments):
    stdout, _, code, imported = started(*arguments)
    assert (code in ("exit 0", "exit None"), imported) == (True, "[]"), stdout
    assert stdout


TYPOS = [
    (["polices"], "No such command 'polices'"),
    (["generate", "m", "f", "--policy", "h20"], "Unknown policy 'h20'. Did you mean 'h2o'?"),
    (["generate", "m", "f", "--policy", "snapkv", "-o", "widow=3"], "has no option 'widow'. Did you mean 'window'?"),
    (["generate", "m", "f", "--device", "gpu"], "--device gpu cannot be used: give auto, cpu, cuda"),
    (["check", "./none"], "there is no such folder"),
    (["compare", "m", "f", "--policies", "h2o,tovva"], "Did you mean 'tova'?"),
]


@pytest.mark.parametrize(("arguments", "words"), TYPOS)
def test_typing_errors_import_no_torch(arguments, words):
    stdout, said, code, imported = started(*arguments)
    assert (stdout, code, imported) == ("", "exit 2", "[]"), said
    assert words in " ".join(said.replace("│", " ").split())


def test_the_version_names_what_a_report_of_a_bug_needs():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"kvpatch {kvpatch.__version__} (torch ")
    assert "transformers" in result.stdout and "Python" in result.stdout


def test_the_version_of_what_is_missing(monkeypatch):
    def version(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and "(no torch, no transformers, " in result.stdout


def test_the_verbose_version_is_what_a_bug_report_needs():
    result = CliRunner().invoke(app, ["--version", "--verbose"])
    assert result.exit_code == 0
    told = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert {"kvpatch", "python", "platform", "torch", "transformers", "einops", "CUDA"} <= set(told)
    assert told["torch"] == metadata.version("torch") and told["kvpatch"] == kvpatch.__version__
    for package in versions.OPTIONAL:
        assert (package in told) == (importlib.util.find_spec(package.split("-")[0]) is not None) or "-" in package


def test_the_verbose_version_of_what_is_missing(monkeypatch):
    def version(package):
        if package in ("einops", "peft"):
            raise metadata.PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    lines = versions.describe_machine().splitlines()
    assert "no einops" in lines and "flash-attn 1.2.3" in lines and not any("peft" in line for line in lines)
    assert any(line.startswith("CUDA unknown: torch cannot be imported") for line in lines)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_cuda_is_named_with_its_gpus(monkeypatch, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    said = [line for line in versions.describe_machine().splitlines() if line.startswith("CUDA")]
    assert said == ["CUDA 13.0, GPU 0, GPU 1" if cuda else "CUDA none: torch is built for the CPU"]


@pytest.mark.parametrize(("arguments", "words"), [(["--verbose"], "kvpatch --version --verbose"), (["--"], "Name a command")])
def test_no_command_says_what_to_type(arguments, words):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_completion_is_offered():
    result = CliRunner().invoke(app, ["--help"])
    assert "--install-completion" in result.stdout


def test_lists_in_json():
    for command, names in (("policies", kvpatch.list_policies()), ("architectures", kvpatch.list_architectures())):
        result = CliRunner().invoke(app, [command, "--json"])
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert tuple(row["name"] for row in rows) == names
    snapkv = next(row for row in map(json.loads, CliRunner().invoke(app, ["policies", "--json"]).stdout.splitlines())
                  if row["name"] == "snapkv")  # fmt: skip
    assert snapkv["link"] == "https://arxiv.org/abs/2404.14469" and snapkv["options"]["window"] == 32


def test_a_pipe_gets_whole_rows_and_a_terminal_folds_words(monkeypatch, capsys):
    """One row per line in a pipe whatever the width; at 80 columns every line fits and no word is broken."""
    rows = [("critical_adakv", "words " * 20, "window=32, kernel=7"), ("h2o", "short", "")]
    monkeypatch.setenv("COLUMNS", "80")
    output.print_rows(("policy", "use", "options"), rows)
    piped = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in piped] == ["policy", "critical_adakv", "h2o"]
    assert piped[1].count("words") == 20 and piped[1].endswith("window=32, kernel=7")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    output.print_rows(("policy", "use", "options"), rows)
    folded = capsys.readouterr().out.splitlines()
    assert len(folded) > 3
    bare = [_without_colour(line) for line in folded]
    assert all(len(line) <= 80 for line in bare)
    assert sum(line.count("words") for line in bare) == 20


def _without_colour(line):
    import re

    return re.sub(r"\x1b\[[\d;]*m", "", line)


@pytest.mark.parametrize("command", ["policies", "architectures"])
def test_lists_fit_eighty_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(app, [command])
    tables = result.stdout.split("\n\n")[: 2 if command == "policies" else 1]
    lines = [_without_colour(line) for table in tables for line in table.splitlines()]
    assert all(len(line) <= 80 for line in lines)
    names = kvpatch.list_policies() if command == "policies" else kvpatch.list_architectures()
    assert {line.split(" ")[0] for line in lines} >= set(names)  # names are whole
    assert "…" not in result.stdout
    if command == "policies":
        assert sum("https://arxiv.org/abs/2404.14469" in line for line in lines) == 1


def test_a_line_for_whoever_waits(monkeypatch, capsys):
    output.print_waiting("loading a model ...")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    output.print_waiting("loading a model ...")
    assert capsys.readouterr().err == "loading a model ...\n"
