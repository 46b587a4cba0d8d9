"""The command `kvpatch serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import KVPatchError
from ..policies.budgets import parse_bytes
from . import options as given
from .catalogue import SERVER_POLICY, check_choice
from .loading import Source
from .options import check_arguments, choose_policy, find_model
from .output import short_errors


def serve(  # noqa: PLR0913 - typer: an option is a parameter
    context: typer.Context,
    model: given.Model = None,
    model_option: given.ModelOption = None,
    policy: given.PolicyName = SERVER_POLICY,
    k: given.Budget = "0.5",
    settings: given.SettingsFile = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")] = 8000,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt that one pass reads; else 8192.", show_default=False)
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Share of the free memory for keys and values; else 0.9, on a CPU 0.6.",
            show_default=False,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of a prompt and its answer; else the model's positions.", show_default=False),
    ] = None,
    protect: Annotated[
        str | None,
        typer.Option(help="system: the tokens of a chat's system message are never evicted.", show_default=False),
    ] = None,
    keep_conversations: Annotated[
        str | None,
        typer.Option(
            help="Bytes, such as 1GiB, of conversations that are kept: a request that goes on from one reads its new turn "
            "alone. Else none are.",
            show_default=False,
        ),
    ] = None,
    edits: Annotated[
        bool,
        typer.Option(
            "--edits", help="A kept conversation that comes with spans gone or replaced is edited in place of being read anew."
        ),
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="KVPATCH_API_KEY", help="Key that clients must send; else none.", show_default=False),
    ] = None,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    schedule: given.Schedule = None,
    bits: given.Bits = 16,
    positions: given.Positions = "original",
    backend: given.Backend = "auto",
    seed: given.Seed = 0,
    option: given.Options = None,
) -> None:
    """Serve a model under a budget: transformers' OpenAI-compatible server, with continuous batching.

    Each request has a budget of its own. Needs the extra `serve` (fastapi, uvicorn, pydantic, openai, psutil).
    """
    with short_errors():  # typer runs this for `kvpatch serve`; the docstring is its help
        options = check_arguments(option, k, positions, backend, bits)
        if protect is not None:
            check_choice("protect", protect, ("system",))
            if "protect" in options:
                raise KVPatchError(f"--protect system and --option protect={options['protect']!r}: give one of them.")
            options["protect"] = protect
        source = Source(find_model(model, model_option), dtype, device, None, revision, trust_remote_code)
        source.check()
        how: dict[str, Any] = {"bits": bits, "positions": positions, "backend": backend, "seed": seed}
        chosen, size, how = choose_policy(context, options, how)
        from ..serving.conversations import Conversations
        from .serving import Address, run

        if api_key is not None and not api_key.strip():
            raise KVPatchError("--api-key is empty: give the key that clients send, or leave the option out.")
        engine_limits = {"max_batch_tokens": max_batch_tokens, "max_memory_percent": memory}
        engine = {name: one for name, one in engine_limits.items() if one is not None}
        most = _read_bytes(keep_conversations, edits)
        kept = None if most is None else Conversations(most, edits)
        run(source, chosen, size, how, Address(host, port, api_key), engine, max_model_len, conversations=kept)


def _read_bytes(kept: str | None, edits: bool) -> int | None:
    """Parse --keep-conversations of `serve` to bytes; None if it is not given. `serve` calls it.

    Raises KVPatchError if the text `kept` is no size, or --edits is given without this option.
    """
    if kept is None and edits:
        raise KVPatchError("--edits edits conversations that are kept: add --keep-conversations 1GiB, or another size.")
    nbytes = None if kept is None else parse_bytes(kept)
    if kept is not None and not nbytes:
        raise KVPatchError(f"--keep-conversations {kept} is no size: type a number and its unit, such as 1GiB or 500MB.")
    return nbytes
