"""Arguments that the commands share, and their parsers; importing this imports neither torch nor transformers."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..backends.entry_sizes import BITS
from ..errors import KVPatchError
from ..policies.facts import FACTS
from ..policies.naming import POSITIONS, SCHEDULES, check_policy
from .catalogue import BACKENDS, check_calibration, check_choice
from .loading import check_budget, parse_k, read_prompt


def _complete_from(names: tuple[str, ...]) -> Any:
    """Return a function that a shell's completion calls: it lists the names that begin with what has been typed."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


_MODEL = "A folder, or a model's name on the Hugging Face hub."
Model = Annotated[str | None, typer.Argument(help=_MODEL, show_default=False)]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="The model, if it is not the first argument.", show_default=False)
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        help='A name of `kvpatch policies`, or a combination such as "critical(adaptive(roco))".',
        autocompletion=_complete_from(tuple(FACTS)),
    ),
]
Budget = Annotated[
    str,
    typer.Option("-k", help="0.5 or 50% of the prompt, 1024 tokens, 2GiB for one row, mass:0.95; with commas, one per layer."),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        help="A file of kvpatch.Settings, as compare writes one, in place of --policy, -k and the options that it has.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (the checkpoint's own), float32 or fp32, bfloat16 or bf16, float16 or fp16.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps or xpu.")]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="auto spreads the model over devices; needs accelerate.", show_default=False)
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit of the model on the hub.", show_default=False)]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model. Read it first.")
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="prompt, decode or both; else the policy's own.",
        show_default=False,
        autocompletion=_complete_from(SCHEDULES),
    ),
]
Positions = Annotated[str, typer.Option(help="original or renumbered.", autocompletion=_complete_from(POSITIONS))]
Backend = Annotated[
    str,
    typer.Option(help="Code that computes attention: auto, torch, flash or triton.", autocompletion=_complete_from(BACKENDS)),
]
Bits = Annotated[
    int, typer.Option("--bits", help="Of each key and value held: 16 is the model's own precision, 8 and 4 round them.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of all random numbers.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="A policy's option, as in -o window=16 or -o window=16,kernel=5; any number of times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line, and nothing else on standard output.")]
PromptFile = Annotated[
    str | None, typer.Option("--prompt-file", help="The prompt's file, if it is no argument.", show_default=False)
]
Text = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A text like yours; - reads standard input.", show_default=False)
]
TextOption = Annotated[str | None, typer.Option("--text", hidden=True)]
Out = Annotated[Path, typer.Option("--out", help="The file to write.")]
NoOption = Annotated[list[str] | None, typer.Option("--option", "-o", hidden=True)]
"""`-o` in a command without a policy, so that the error can say where it belongs."""


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """Parse the `name=value` pairs of -o, several per text if commas separate them; values are Python literals or texts.

    Commands call it before torch is imported.

    Raises:
        KVPatchError: a pair is malformed, or a name comes twice.

    Example:
        >>> parse_options(["window=16,pooling=max", "tau=(1.0, 2.0)"])
        {'window': 16, 'pooling': 'max', 'tau': (1.0, 2.0)}
    """
    options: dict[str, Any] = {}
    for text in (pair for texts in given or () for pair in _split_pairs(texts)):
        name, equals, value = text.partition("=")
        if not (name.strip() and equals and value):
            raise KVPatchError(f"--option {text} must look like name=value, such as window=16.")
        if (name := name.strip()) in options:
            raise KVPatchError(f"--option {name} is given twice: {options[name]!r} and {value.strip()}. Leave one out.")
        try:
            options[name] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[name] = value.strip()
    return options


def check_arguments(given: list[str] | None, k: str, positions: str, backend: str, bits: int) -> dict[str, Any]:
    """Check arguments that `generate` or `serve` hands to `patched`, before torch is imported; return the policy's options.

    Raises:
        KVPatchError: an option cannot be parsed, or a setting does not take its value.
    """
    options = parse_options(given)
    check_budget(k)
    check_choice("positions", positions, POSITIONS)
    check_choice("backend", backend, BACKENDS)
    check_choice("bits", bits, BITS)
    return options


def make_policy(name: str, schedule: str | None, options: dict[str, Any]) -> Any:
    """Make the policy that a command's arguments name, and load its calibration file if `options` has one.

    `choose_policy` calls it. Most mistakes raise KVPatchError before torch is imported.
    """
    check_choice("schedule", schedule, SCHEDULES)
    check_policy(name, options)
    check_calibration(name, options)
    from ..policies import get_policy

    return get_policy(name).with_options(schedule, **read_calibration(options))


def choose_policy(context: typer.Context, options: dict[str, Any], others: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return policy, budget and keyword arguments for `patched`, from a command's options or the file of --settings.

    `generate`, `check` and `serve` call it. An option that is typed adds to the file; --policy may not be typed beside it.

    Args:
        context: of the command.
        options: of the policy, by -o.
        others: the command's other options that are arguments of `patched`.

    Raises:
        KVPatchError: a name or a value is wrong, or an option is typed that the file of --settings has too.
    """
    typed, file = context.params, context.params["settings"]
    if file is None:
        return make_policy(typed["policy"], typed.get("schedule"), options), parse_k(typed["k"]), others
    given = {name: typed[name] for name in ("policy", "k", "schedule", *others) if _is_typed(context, name)}
    if "policy" in given:
        raise KVPatchError(f"--policy {given['policy']} and --settings {file} both name a policy: give one of them.")
    from ..storage.settings import OF_PATCH, Settings

    merged = Settings.load(file).add_arguments(given | options)
    name, k, schedule = merged.pop("policy"), merged.pop("k"), merged.pop("schedule", None)
    # what the file and the command line have left are the policy's options and arguments of `patched`
    of_policy = {option: merged.pop(option) for option in [*merged] if option not in OF_PATCH}
    return make_policy(name, schedule, of_policy), k, others | merged


def _is_typed(context: typer.Context, name: str) -> bool:
    """Tell whether the user typed this option of the command, rather than left it at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def read_calibration(options: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's options, with the calibration loaded if they name its file. Raises KVPatchError if it cannot be read.

    `make_policy` and `choose_policies` call it. Does not change `options`.
    """
    if "calibration" not in options:
        return options
    from ..storage.calibration import load_calibration

    return options | {"calibration": load_calibration(str(options["calibration"]))}


def parse_bits(text: str) -> tuple[int, ...]:
    """Parse the list of `compare --bits`, separated by commas; "auto" stands for 16, 8 and 4. Duplicates go.

    Raises:
        KVPatchError: the list is empty, or `bits` of patched() does not take a number.

    Example:
        >>> parse_bits("16,4"), parse_bits("auto")
        ((16, 4), (16, 8, 4))
    """
    if text == "auto":
        return BITS
    for part in (parts := [part.strip() for part in text.split(",") if part.strip()]):
        check_choice("bits", part, tuple(map(str, BITS)))
    if not parts:
        raise KVPatchError("--bits names none: give some of 16, 8 and 4, or auto for all.")
    return tuple(dict.fromkeys(map(int, parts)))


def _split_pairs(text: str) -> list[str]:
    """Split a text of -o at the commas that a `name=` follows, for `parse_options`: "tau=(1, 2),window=3" has two pairs."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" not in part:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def find_model(argument: str | None, option: str | None) -> str:
    """Return the model's name, as the first argument or --model gives it; commands call it.

    Raises KVPatchError if none or both do.
    """
    if argument is not None and option is not None:
        raise KVPatchError(f"The model is given twice: {argument} and --model {option}.")
    model = argument if option is None else option
    if model is None:
        raise KVPatchError("Name a model: a folder, or a name on the Hugging Face hub, such as Qwen/Qwen2.5-0.5B-Instruct.")
    return model


@dataclass(frozen=True)
class TextFile:
    """A file of text as the command line names it; `given` is FILE for an argument, else the option."""

    name: str
    given: str = "FILE"

    def read_text(self) -> str:
        """Read the text. Raises KVPatchError as `read_prompt`."""
        return read_prompt(self.name, self.given)


def find_model_and_files(
    argument: str | None,
    files: list[str] | None,
    option: str | None,
    more: list[str] | None = None,
    more_given: str = "--prompt-file",
    missing: str = "Name a file with a prompt after the model; - reads standard input.",
) -> tuple[str, list[TextFile]]:
    """Return the model's name and the files of texts, from the arguments of a command.

    argument: the first, a model's name, or a file if --model names the model. option: the model by --model. more: files given
    by the option `more_given`. missing: the error where there is no file.

    Raises:
        KVPatchError: the model or a file is missing, or the model is given twice.
    """
    arguments = list(files or ())
    if option is not None and argument is not None:
        arguments = [argument, *arguments]
        argument = None
    model = find_model(argument, option)
    texts = [*map(TextFile, arguments), *(TextFile(name, more_given) for name in more or ())]
    if not texts:
        raise KVPatchError(missing)
    return model, texts


def find_model_and_text(
    argument: str | None, file: str | None, option: str | None, text: str | None, misplaced: list[str] | None
) -> tuple[str, TextFile]:
    """Return the model and the text that `calibrate` or `learn` reads.

    text: given by --text. misplaced: values of -o, which users take for --out; these commands have no -o, and it is refused.

    Raises:
        KVPatchError: the model or the text is missing or given twice, or -o is given.
    """
    if misplaced:
        raise KVPatchError(f"-o sets an option of a policy, and there is none here: write the file with --out {misplaced[0]}.")
    missing = "Give a text after the model, a file of a few thousand words or more; - reads standard input."
    arguments, by_option = ([] if one is None else [one] for one in (file, text))
    model, files = find_model_and_files(argument, arguments, option, by_option, "--text", missing)
    if len(files) > 1:
        raise KVPatchError(f"The text is given twice: {files[0].name} and {files[1].name}.")
    return model, files[0]
