"""The command `kvpatch plan`, which loads no weights, and no torch where safetensors say their bytes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..backends.entry_sizes import BITS
from ..errors import KVPatchError
from ..planning.plan import plan as make_plan
from ..planning.result import list_rows, write_remarks, write_title
from ..policies.naming import SCHEDULES, check_policy
from . import options as given
from .catalogue import DEFAULT_POLICY, check_choice
from .loading import check_budget, check_dtype
from .options import find_model, parse_options
from .output import print_json, print_rows, short_errors


def plan(  # noqa: PLR0913 - typer: an option is a parameter
    model: given.Model = None,
    model_option: given.ModelOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Of each request's prompt; else 32768, or the most that its positions allow.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens generated after each prompt.")] = 0,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    policy: given.PolicyName = DEFAULT_POLICY,
    k: given.Budget = "0.5",
    bits: given.Bits = 16,
    memory: Annotated[
        str | None, typer.Option(help="Of the device, such as 24GiB: how many requests and tokens fit.", show_default=False)
    ] = None,
    schedule: given.Schedule = None,
    option: given.Options = None,
    dtype: given.Dtype = "auto",
    revision: given.Revision = None,
    json: given.Json = False,
) -> None:
    """Count the bytes of a model's weights and cache, in full and under a budget, from its config.json alone, in a moment."""
    with short_errors():  # typer runs this for `kvpatch plan`; the docstring is its help
        options = parse_options(option)
        check_policy(policy, options)  # refuses names that are no options of the policy, so none clashes with `arguments`
        check_budget(k)
        check_choice("bits", bits, BITS)
        check_choice("schedule", schedule, SCHEDULES)
        name, dtype = find_model(model, model_option), check_dtype(dtype)
        if memory is not None and memory.strip().isdecimal():
            raise KVPatchError(f"--memory {memory} has no unit: type --memory {memory.strip()}GiB, or MiB, or GB.")
        arguments: dict[str, Any] = {
            "tokens": tokens,
            "new": max_new_tokens,
            "batch": batch,
            "bits": bits,
            "schedule": schedule,
            "memory": memory,
            "dtype": dtype,
            "revision": revision,
        }
        result = make_plan(name, policy, _split_layers(k), **arguments, **options)
        if json:
            print_json(result.to_dict())
            return
        print(f"{write_title(result)}\n")
        print_rows(("", "full cache", "under the budget"), list_rows(result))
        print("\n" + "\n".join(write_remarks(result)))


def _split_layers(k: str) -> str | list[str]:
    """Return the text of -k as `make_plan` takes it: with a comma, a list of budgets, one per layer; else as it is."""
    return [part for part in k.split(",") if part.strip()] if "," in k else k
