"""Implementation of `kvpatch serve`: transformers' own server over a patched model."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import transformers

from ..errors import KVPatchError
from ..hooks.versions import check_engine
from ..patching import patch
from ..policies import Policy
from ..serving.conversations import Conversations
from .disconnects import EndAtDisconnect
from .loading import Source
from .output import print_note

EXTRA = ("fastapi", "uvicorn", "pydantic", "openai", "psutil")
PATIENCE = 10  # seconds that a server which is told to stop gives to requests under way


@dataclass(frozen=True)
class Address:
    """A server's host and port, 0 for a free one, and the key that requests must bring; None for no key."""

    host: str
    port: int
    key: str | None = None


def run(
    source: Source,
    policy: Policy,
    k: Any,
    settings: dict[str, Any],
    address: Address,
    engine: dict[str, Any],
    positions: int | None = None,
    background: bool = False,
    conversations: Conversations | None = None,
) -> Any:
    """Load the model, patch it, and serve it until interrupted; returns the server. The port is bound before weights are read.

    `serve` (the command) calls it. settings: keyword arguments of `patch`. engine: options of ContinuousBatchingConfig.
    positions: the most tokens of a prompt and its answer; else those of the model. background: serve in a thread, and return at
    once. conversations: where the engine keeps caches of requests that have ended; None to keep none.

    Raises:
        KVPatchError: a package is missing, the port is taken, or the model or a setting cannot work.
    """
    check_engine(transformers.__version__)
    _check_extra()
    from transformers.cli.serve import Serve

    from .answering import Answers, start_engine
    from .tool_calls import make_tolerant_parser

    positions = _find_limit(source, positions, settings)
    if policy.scope.keeps_system:
        _check_system(source.tokenizer(), edits=conversations is not None and conversations.edits)
    with ExitStack() as undo:
        sockets = _bind_sockets(address)
        for one in sockets:
            undo.callback(one.close)
        model, tokenizer, port = source.model(), source.tokenizer(), sockets[0].getsockname()[1]
        tokenizer.parse_response = make_tolerant_parser(tokenizer)  # an unreadable tool call becomes text
        undo.callback(vars(tokenizer).pop, "parse_response")
        patched = patch(model, policy, k, **settings)
        undo.callback(patched.remove)
        manager = start_engine(model, engine, conversations)  # the server stops it as it shuts down
        most = "any number of" if positions is None else f"at most {positions}"
        print_note(f"{patched}; a request has {most} tokens, its answer included")
        host = f"[{address.host}]" if ":" in address.host else address.host  # of IPv6, in a URL
        print_note(f"serving {source.name} at http://{host}:{port}/v1 (the client's model name is {source.name})")
        # Serve() loads a model and builds an app; inside this block it gets this model, these sockets and kvpatch's checks
        with _serve_loaded(model, tokenizer, Answers(manager, model, positions), address.key, sockets):
            device = str(model.device)
            served = Serve(
                source.name,
                continuous_batching=True,
                host=address.host,
                port=port,
                non_blocking=background,
                device=device,
                log_level="error",
            )
        if background:
            undo.pop_all()  # undo nothing: the thread still needs them
    return served


def _bind_sockets(address: Address) -> list[socket.socket]:
    """Return sockets bound to the host's addresses (for port 0 one, to a free port); raise KVPatchError if they cannot be.

    `run` calls it before weights are loaded.
    """

    async def bind() -> list[socket.socket]:
        """Return bound sockets that do not listen yet. asyncio.run() runs it once, since asyncio knows a host's addresses."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, address.host, address.port, start_serving=False)
        bound = [one.dup() for one in (server.sockets if address.port else server.sockets[:1])]
        server.close()  # its own sockets; for port 0 each address got another port
        return bound

    try:
        return asyncio.run(bind())
    except OSError as error:
        raise KVPatchError(f"--host {address.host} --port {address.port} cannot be served: {error.strerror}.") from error


def _find_limit(source: Source, asked: int | None, settings: dict[str, Any]) -> int | None:
    """Return the most tokens of a request, or None: as asked, else as many as the model has positions.

    `run` calls it before weights are loaded. With positions="renumbered" a text may be longer than that, since kept tokens are
    numbered anew from 0.
    """
    from ..arch.kinds import position_limit

    n_positions = None
    if settings.get("positions", "original") == "original":
        n_positions = position_limit(source.config().get_text_config())
    if asked is not None and n_positions is not None and asked > n_positions:
        raise KVPatchError(
            f"--max-model-len {asked}: {source.name} has {n_positions} positions. Give at most {n_positions}, or --positions "
            "renumbered."
        )
    return asked or n_positions


def _check_system(tokenizer: Any, edits: bool) -> None:
    """Raise KVPatchError, under --protect system, if --edits is given too or the model has no chat template.

    `run` calls it before weights are loaded.
    """
    if edits:
        raise KVPatchError(
            "--protect system and --edits: an edited text no longer tells which tokens are the system message's. Leave one out."
        )
    if tokenizer.chat_template is None:
        raise KVPatchError(
            "--protect system keeps the system message of a chat, and this model has no chat template: leave it out."
        )


def _check_extra() -> None:
    """Raise KVPatchError if packages are missing that transformers' server needs. `run` calls it before anything is loaded."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise KVPatchError(
            f"`kvpatch serve` runs transformers' server, which needs more packages: pip install {' '.join(EXTRA)}"
        )


@contextmanager
def _serve_loaded(model: Any, tokenizer: Any, answers: Any, key: str | None, bound: list[socket.socket]) -> Iterator[None]:
    """Make transformers' server serve this model alone, at the sockets `bound`, inside the with-block of `run`.

    Inside it, names in transformers' and uvicorn's modules are replaced: the model manager returns the loaded model, the app is
    wrapped by `_mend_app`, and the server listens at `bound`.
    """
    import uvicorn
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.utils import BaseHandler, get_response_template

    from .request_fields import Served
    from .tool_calls import convert_messages

    started = int(time.time())

    class Loaded(model_manager.ModelManager):
        """A model manager whose one model was loaded, and patched, before."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return model

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
            """List the one model that is served, by the name that a request gives; transformers lists the Hub's cache."""
            return [{"id": self.force_model, "object": "model", "created": started, "owned_by": "kvpatch"}]

    def build_mended(manager: Any, *more: Any, **named: Any) -> Any:
        """Build transformers' app, with kvpatch's `convert_messages`, and wrap it. Serve() calls it for build_server()."""
        for handler in (*more, *named.values()):
            if isinstance(handler, BaseHandler):
                handler.get_processor_inputs_from_messages = convert_messages  # type: ignore[method-assign]
        calls = get_response_template(tokenizer, model) is not None  # transformers can parse its tool calls
        served = Served(manager.force_model, chats=tokenizer.chat_template is not None, tools=calls)
        return _mend_app(build(manager, *more, **named), named["generation_state"], served, answers, key)

    class Bound(uvicorn.Server):
        """A server at the sockets that were bound before."""

        async def serve(self, sockets: Any = None) -> None:
            await super().serve(bound)

    build = server.build_server
    # without the timeout a server that stops waits for every client
    config = partial(uvicorn.Config, timeout_graceful_shutdown=PATIENCE, access_log=False)
    with ExitStack() as stack:
        for module, name, value in (
            (model_manager, "ModelManager", Loaded),
            (server, "build_server", build_mended),
            (uvicorn, "Config", config),
            (uvicorn, "Server", Bound),
        ):
            stack.enter_context(_replace_attribute(module, name, value))
        yield


@contextmanager
def _replace_attribute(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Set a module's attribute inside a with-block of `_serve_loaded`, and put the old one back at its end."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _mend_app(app: Any, state: Any, served: Any, answers: Any, key: str | None) -> Any:
    """Wrap the server's app: requests are checked, run in `answers`, and end if clients hang up; errors get OpenAI's form.

    `build_mended` calls it once, when the server starts. Changes `app` and `state` in place, and returns `app`.

    Args:
        app: transformers' app.
        state: the app's GenerationState, which its handlers ask for an engine.
        served: what is served.
        answers: the engine's requests.
        key: that requests must bring, or None.
    """
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from transformers.cli.serving.utils import CBWorkerDeadError

    from .gate import Gate
    from .request_fields import RefusedError

    def describe(error: Exception, status: int) -> Any:
        """Return an error as an answer in OpenAI's form, with its own HTTP status if it is a RefusedError, else `status`."""
        refused = error if isinstance(error, RefusedError) else RefusedError(str(error), status=status)
        return JSONResponse(refused.describe(), status_code=refused.status)

    async def answer_refusal(request: Any, error: Exception) -> Any:
        return describe(error, 400)

    async def answer_dead(request: Any, error: Exception) -> Any:
        return describe(error, 503)

    async def answer_raised(request: Any, error: Any) -> Any:
        return describe(RefusedError(str(error.detail), status=error.status_code), 400)

    async def answer_failure(request: Any, error: Exception) -> Any:
        return describe(RuntimeError(f"The server failed: {type(error).__name__}. Its log has more."), 500)

    # errors that the app's handlers raise, answered in OpenAI's form
    handlers = {RefusedError: answer_refusal, TemplateError: answer_refusal, CBWorkerDeadError: answer_dead}
    for kind, handler in {**handlers, HTTPException: answer_raised, Exception: answer_failure}.items():
        app.add_exception_handler(kind, handler)
    # the engine that the app's handlers ask for, and the layers around the app
    state._cb_manager = answers
    state.get_manager = lambda *given, **more: answers
    app.add_middleware(EndAtDisconnect)
    app.add_middleware(Gate, served=served, answers=answers, key=key, log=print_note)  # the outermost
    return app
