"""Middleware of `kvpatch serve` before transformers' app: the key, the fields of a request, figures, and a line a request."""

from __future__ import annotations

import hmac
import json
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .amending import AmendingSend, complete_answer
from .answering import Answers
from .request_fields import PATHS, AcceptedRequest, RefusedError, Served, read_request

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ID = b"x-request-id"  # transformers' app takes a request's id from it
GONE = 499  # status, as nginx has it, of a request whose client hung up before an answer
LARGEST = 64 * 2**20  # bytes of a body
_OPEN = ("/health", "/metrics")  # without a key
_DONE = b"data: [DONE]\n\n"  # the end of a stream, but of a response; transformers' handlers send none
_BROKEN, _END = b'data: {"error": "', b'"}\n\n'  # around an error that transformers' handlers put into a stream


class Gate:
    """An ASGI app around transformers', which gets only requests that can be obeyed.

    Args:
        app: the app.
        served: what the server serves.
        answers: its requests.
        key: that requests must bring; None for no key.
        log: called with a line for each request.
    """

    def __init__(self, app: ASGIApp, served: Served, answers: Answers, key: str | None, log: Callable[[str], None]) -> None:
        self.app, self.served, self.answers, self.key, self.log = app, served, answers, key, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: check it, let the app answer it, count it, and log a line. The ASGI server calls this for each.

        A refusal is answered here. Any other exception goes on to the app around this, and the log then says 500.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, name = time.monotonic(), 0, f"kv-{uuid.uuid4().hex}"

        async def note_status(message: Message) -> None:
            """Send a message of the answer, an error in it put into OpenAI's form, and note its status for the log."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(_mend_error(message))

        try:
            await self._check_and_answer(scope, receive, note_status, name)
        except RefusedError as error:
            await answer(note_status, error.status, json.dumps(error.describe()))
        except Exception:  # which the app around answers
            status = 500
            raise
        finally:
            request = self.answers.close(name)  # with its counts, for the log; None if it was refused or is not for text
            path = scope["path"] if scope["path"] in (*PATHS, *_OPEN, "/v1/models") else "other"
            self.answers.metrics.note_answer(path, status or GONE)  # GONE: the client left before
            if path not in _OPEN:
                self.log(_describe_request(scope, status, time.monotonic() - began, request))

    async def _check_and_answer(self, scope: Scope, receive: Receive, send: Send, name: str) -> None:
        """Check a request and let transformers' app answer it; `__call__` calls it for each.

        Notes it as `answers.requests[name]`. /metrics is answered here. To /health the kept conversations are added, and to a
        stream of completions its end, [DONE].

        Raises:
            RefusedError: it cannot be obeyed; the caller answers with this.
        """
        # the path, the method and the key
        method, path = scope["method"], scope["path"]
        allowed = "POST" if path in PATHS else "GET"
        if path not in (*PATHS, *_OPEN, "/v1/models"):  # _OPEN: paths that need no key
            raise RefusedError(f"There is no {path}: this server has {', '.join((*PATHS, '/v1/models', *_OPEN))}.", status=404)
        if method != allowed:
            raise RefusedError(f"{path} takes {allowed}, not {method}.", status=405)
        if path == "/metrics":
            await answer(send, 200, self.answers.metrics.render(), "text/plain; version=0.0.4")
            return
        if self.key is not None and path not in _OPEN and not self._has_key(scope["headers"]):
            raise RefusedError("Send the server's key: 'Authorization: Bearer KEY'.", status=401, code="invalid_api_key")
        if path not in PATHS:
            kept = self.answers.conversations is not None and path == "/health"
            await self.app(scope, receive, AmendingSend(send, self._add_conversations) if kept else send)
            return
        # the body: checked, and handed on with only the fields that the app reads, under a request id of kvpatch's (ID)
        request = read_request(path, _parse_body(await _read_body(receive)), self.served)
        body = _encode_body(request.body)
        self.answers.requests[name] = request
        others = [(key, value) for key, value in scope["headers"] if key not in (ID, b"content-type", b"content-length")]
        new = [(ID, name.encode()), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        # chat and text completions ("c", "t") end their streams with [DONE]; responses do not
        send = AmendingSend(send, partial(complete_answer, request=request), _DONE if PATHS[path] in "ct" else b"")
        await self.app({**scope, "headers": others + new}, _replay_body(body, receive), send)

    def _add_conversations(self, health: dict[str, Any]) -> bool:
        """Add the kept conversations to the answer to /health, in place. Returns True, which tells AmendingSend of a change."""
        health["conversations"] = self.answers.metrics.describe_conversations()
        return True

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Tell whether a request's headers have the server's key, compared in a time that tells nothing of the key."""
        given = dict(headers).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.key}".encode())


async def answer(send: Send, status: int, text: str, kind: str = "application/json") -> None:
    """Send an answer in place of the app, for `Gate`: an error or /metrics. Through ASGI: status and headers, then the text."""
    body = text.encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read_body(receive: Receive) -> bytes:
    """Return the whole body of an arriving request. Raises RefusedError if it is too long or the client is gone.

    `_check_and_answer` calls it. ASGI hands a body over in pieces.
    """
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError("The client hung up.", status=GONE)
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > LARGEST:
            raise RefusedError(f"The body has more than {LARGEST // 2**20} MiB.", status=413)
    return body


def _parse_body(body: bytes) -> Any:
    """Parse the JSON of an arriving request's body, for `_check_and_answer`. Raises RefusedError if the body is no JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"The body is no JSON: {error}.") from None


def _encode_body(body: dict[str, Any]) -> bytes:
    """Return the JSON of an accepted request that `_check_and_answer` gives to the app.

    Raises RefusedError if a text has half a surrogate pair, which UTF-8 cannot encode.
    """
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError("The text has half a character (a surrogate without its other half).") from None


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive() for the app: the body, which `_read_body` has read already, and then the client's messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _mend_error(message: Message) -> Message:
    """Return an ASGI message of an answer as it is, but rewritten if it is an error that ends a stream.

    `note_status` calls it for each message. transformers' handlers put the bytes _BROKEN before the error's text and _END after
    it; OpenAI's form replaces these.
    """
    before, marker, rest = message.get("body", b"").rpartition(_BROKEN)
    if not marker or not rest.endswith(_END):
        return message
    error = RefusedError(rest[: -len(_END)].decode(), status=500).describe()
    return {**message, "body": before + f"data: {json.dumps(error)}\n\n".encode()}


def _describe_request(scope: Scope, status: int, seconds: float, request: AcceptedRequest | None) -> str:
    """Return a request's line for the log; `__call__` writes it. request: its counts; None if refused or not for text."""
    path = scope["path"] if scope["path"].isprintable() else repr(scope["path"])
    facts = [f"{scope['method']} {path}", str(status or GONE), f"{seconds:.2f} s"]
    if request is not None:
        reused = f" and {request.cached} kept" if request.cached else ""
        facts.append(f"{request.n_prompt - request.cached} tokens read{reused}, {request.n_generated} written")
        facts.append(request.end_reason or "refused")
    if request is not None and request.user:
        facts.append(f"user {request.user!r}")
    return ", ".join(facts)
