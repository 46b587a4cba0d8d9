"""The commands of `kvpatch` that take a model: generate, check and compare.

Whatever imports torch is imported inside a command, after what can be refused without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import KVPatchError
from ..policies.naming import SCHEDULES, check_policy
from . import options as given
from .catalogue import DEFAULT_POLICY, check_calibration, check_choice
from .loading import Source, check_budget, read_prompt
from .options import (
    TextFile,
    check_arguments,
    choose_policy,
    find_model,
    find_model_and_files,
    parse_bits,
    parse_options,
)
from .output import make_folder, print_json, print_rows, short_errors

KS = "0.7,0.5,0.3,0.2"  # budgets of `compare` by default
COMPARED = "window,streaming_llm,h2o,roco,keyformer,tova,snapkv,critical_adakv"


def generate(  # noqa: PLR0913 - typer: an option is a parameter
    context: typer.Context,
    model: given.Model = None,
    file: Annotated[str | None, typer.Argument(help="A prompt; - reads standard input.", show_default=False)] = None,
    model_option: given.ModelOption = None,
    prompt_file: given.PromptFile = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself, instead of a file.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the model's chat template.")] = False,
    policy: given.PolicyName = DEFAULT_POLICY,
    k: given.Budget = "0.5",
    settings: given.SettingsFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample at this temperature; else, and at 0, greedy.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass.", show_default=False)
    ] = None,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    schedule: given.Schedule = None,
    bits: given.Bits = 16,
    block: Annotated[
        int | None, typer.Option(help="Read the prompt so many tokens at a time, and evict after each.", show_default=False)
    ] = None,
    positions: given.Positions = "original",
    backend: given.Backend = "auto",
    seed: given.Seed = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop with an error where a number is NaN or infinite.")] = False,
    option: given.Options = None,
    json: given.Json = False,
) -> None:
    """Generate from a prompt with a KV cache under a budget, then report which tokens it kept.

    A model with a chat template gets the prompt as a user's message.
    """
    with short_errors():  # typer runs this for `kvpatch generate`; the docstring is its help
        options = check_arguments(option, k, positions, backend, bits)
        name, prompt_source = _find_prompt(model, file, model_option, prompt_file, prompt)
        source = Source(name, dtype, device, device_map, revision, trust_remote_code)
        source.check()
        how: dict[str, Any] = {
            "bits": bits, "block": block, "positions": positions, "backend": backend, "seed": seed, "strict": strict,
        }  # fmt: skip
        chosen, size, how = choose_policy(context, options, how)
        text = prompt_source.read_text() if isinstance(prompt_source, TextFile) else prompt_source
        from .generating import list_arguments, run

        run(source, text, raw, chosen, size, how, list_arguments(max_new_tokens, temperature, top_p), json)


def _find_prompt(
    model: str | None, file: str | None, model_option: str | None, prompt_file: str | None, prompt: str | None
) -> tuple[str, TextFile | str]:
    """Return a model's name, and a prompt's text or file, for `generate`.

    Raises KVPatchError if one is missing, empty or doubled.
    """
    if prompt is not None:
        if not prompt.strip():
            raise KVPatchError("--prompt is empty: there is nothing to go on from.")
        files = [one for one in (file, prompt_file) if one is not None]
        if files:
            raise KVPatchError(f"The prompt is given twice: --prompt and {files[0]}.")
        return find_model(model, model_option), prompt
    arguments, by_option = ([] if one is None else [one] for one in (file, prompt_file))
    name, texts = find_model_and_files(model, arguments, model_option, by_option)
    if len(texts) > 1:
        raise KVPatchError(f"The prompt is given twice: {texts[0].name} and {texts[1].name}.")
    return name, texts[0]


def check(  # noqa: PLR0913 - as above
    context: typer.Context,
    model: given.Model = None,
    model_option: given.ModelOption = None,
    policy: given.PolicyName = DEFAULT_POLICY,
    k: given.Budget = "0.5",
    settings: given.SettingsFile = None,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    seed: given.Seed = 0,
    option: given.Options = None,
    json: given.Json = False,
) -> None:
    """Check on your own model, in seconds and on random ids, that the patch keeps its promises.

    Such as: what a policy evicts changes the logits exactly as a mask does, and a removed patch leaves the model as it was.
    """
    with short_errors():  # typer runs this for `kvpatch check`; the docstring is its help
        options = parse_options(option)
        check_budget(k)
        source = Source(find_model(model, model_option), dtype, device, device_map, revision, trust_remote_code)
        source.check()
        chosen, size, how = choose_policy(context, options, {"seed": seed})
        for name in how.keys() - {"seed"}:  # settings of the file that only patched() takes
            had = f"{name}={how[name]!r}"
            raise KVPatchError(f"--settings {settings} has {had}, which check does not test: give --policy and -k.")
        from ..evaluation.check import check_model

        table = check_model(source.model(), policy=chosen, k=size, seed=how["seed"])
    if settings is not None:
        policy, k = chosen.name, str(size)
    if json:
        checks = [{"name": one.name, "passed": one.passed, "detail": one.detail} for one in table]
        print_json({"passed": table.passed, "policy": policy, "k": k, "checks": checks, "note": table.note})
    else:
        print_rows(("", "check", "measured"), [("pass" if r.passed else "FAIL", r.name, r.detail) for r in table])
        print(f"\n{table.note}")
    if not table.passed:
        raise typer.Exit(1)


def compare(  # noqa: PLR0913 - as above
    model: given.Model = None,
    files: Annotated[
        list[str] | None, typer.Argument(help="Your own prompts, a file each; - reads standard input.", show_default=False)
    ] = None,
    model_option: given.ModelOption = None,
    prompt_file: Annotated[
        list[str] | None, typer.Option(help="A prompt's file, if it is no argument.", show_default=False)
    ] = None,
    continuation_file: Annotated[
        str | None,
        typer.Option(
            help="A text to feed after the prompt; else what the unpatched model itself writes on, greedily.",
            show_default=False,
        ),
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="A question, added to each prompt before anything is evicted.", show_default=False)
    ] = None,
    later: Annotated[
        str | None,
        typer.Option(help="A question that comes when a prompt has been read and evicted.", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed texts as they are, without the model's chat template.")] = False,
    policies: Annotated[
        str, typer.Option(help="Comma-separated, as for --policy of generate; random is always measured beside them.")
    ] = COMPARED,
    budgets: Annotated[
        list[str] | None,
        typer.Option("--budgets", "-k", help="Comma-separated, as -k of generate; any number of times.", show_default=KS),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed after the prompt, at most.")] = 64,
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="KL to advise, nats per token: 0.05 adds 5% perplexity on the full model's own text."),
    ] = 0.05,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of likeliest tokens as full, to advise.")] = 0.95,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    schedule: given.Schedule = None,
    bits: Annotated[
        str, typer.Option(help="Of each key and value held: 16, 8 or 4, several with commas, or auto, which measures all.")
    ] = "16",
    seed: given.Seed = 0,
    option: given.Options = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures and of settings.json.")] = Path("kvpatch-compare"),
    json: given.Json = False,
) -> None:
    """Compare policies and budgets on your own prompts by their next-token distributions.

    The unpatched and the patched model are fed the same tokens after the prompt, one by one, and their predictions are
    compared: KL, agreement, bytes. A chat template, if there is one, makes each text a user's message. Rows appear as they
    are measured; Ctrl-C keeps those that have. After the last prompt comes one sentence of advice with the line of Python to
    paste; settings.json in the folder of --out has the same settings.
    """
    with short_errors():  # typer runs this for `kvpatch compare`; the docstring is its help
        check_choice("schedule", schedule, SCHEDULES)
        options, texts, of_bits = parse_options(option), ",".join(budgets or [KS]), parse_bits(bits)
        check_budget(texts)
        for flag, asks in (("--question", question), ("--later", later)):  # asks: a question of the user
            if asks is not None and not asks.strip():
                raise KVPatchError(f"{flag} is empty: give one in quotation marks, or leave it out.")
        name, texts_of = find_model_and_files(model, files, model_option, prompt_file)
        if continuation_file is not None and len(texts_of) > 1:
            raise KVPatchError(f"--continuation-file goes with one prompt, not with {len(texts_of)}.")
        source = Source(name, dtype, device, device_map, revision, trust_remote_code)
        source.check()
        for one in policies.split(","):
            if one.strip():
                check_policy(one)
                check_calibration(one, options)
        from . import compare as comparing

        chosen, ks = comparing.choose_policies(policies, options, max_new_tokens), comparing.parse_budgets(texts)
        file = str(options["calibration"]) if "calibration" in options else None
        compare_options = comparing.CompareOptions(
            chosen, ks, max_new_tokens, schedule, of_bits, seed, tolerance, agreement, out, json, raw, question, later, file
        )
        continuation = None if continuation_file is None else read_prompt(continuation_file, "--continuation-file")
        prompts = {one.name: one.read_text() for one in texts_of}
        make_folder(out)
        comparing.run(compare_options, source, prompts, continuation)
