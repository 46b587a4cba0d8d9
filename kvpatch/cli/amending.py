"""Answers of transformers' handlers, changed on their way out: JSON, whole or as the data of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .request_fields import AcceptedRequest

_DATA = b"data: {"


class AmendingSend:
    """An ASGI `send` that changes each JSON object of an answer.

    Args:
        send: what the messages go to.
        change: returns whether it has changed an object that it is given.
        end: what a stream ends with.
    """

    def __init__(self, send: Any, change: Callable[[dict[str, Any]], bool], end: bytes = b"") -> None:
        self._send, self._change, self._end, self._whole, self._start, self._body = send, change, end, False, None, b""

    async def __call__(self, message: Any) -> None:
        """Send one ASGI message of an answer, its JSON changed. The app calls this in place of the server's own `send`.

        A JSON answer (`_whole` is True) is held back in `_body` until it is complete, since a change may alter its length.
        Events of a stream are changed as they come. The bytes `_end` (such as "data: [DONE]") follow the last event.
        """
        if message["type"] == "http.response.start":
            self._whole = dict(message["headers"]).get(b"content-type", b"").startswith(b"application/json")
            self._start = message
            if self._whole:
                return
        elif message["type"] == "http.response.body" and self._whole:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()
            return
        elif message["type"] == "http.response.body":
            end = b"" if message.get("more_body", False) else self._end
            message = {**message, "body": self._amend_lines(message.get("body", b"")) + end}
        await self._send(message)

    async def _send_whole(self) -> None:
        """Change and send the held-back JSON answer. `__call__` awaits it when the last piece of the body has come.

        content-length is set to the new body's. Changes no attribute.
        """
        body = self._amend_json(self._body)
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]  # type: ignore[index]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})  # type: ignore[dict-item]
        await self._send({"type": "http.response.body", "body": body})

    def _amend_lines(self, body: bytes) -> bytes:
        """Return a piece of a streamed answer with its JSON changed, if it mentions "usage". `__call__` sends the result.

        A piece holds whole server-sent events. The JSON of an event is one line, after the six bytes "data: ".
        """
        if b'"usage":' not in body:
            return body
        lines = body.split(b"\n")
        return b"\n".join(line[:6] + self._amend_json(line[6:]) if line.startswith(_DATA) else line for line in lines)

    def _amend_json(self, text: bytes) -> bytes:
        """Return the JSON of one object as `_change` leaves it; the same bytes if nothing was changed."""
        answer = json.loads(text)
        return json.dumps(answer, separators=(",", ":")).encode() if self._change(answer) else text


def complete_answer(answer: dict[str, Any], request: AcceptedRequest) -> bool:
    """Write into an outgoing answer, in place, how many prompt tokens were not read again, and whether a token limit ended it.

    `AmendingSend._amend_json` calls it for each JSON object that the server sends. The count goes into "usage"; an object of
    /v1/responses that the limit ended becomes "incomplete". Returns True if it has changed the object, False for an object
    without a usage, such as a piece of text.
    """
    response = answer.get("response") or answer  # events of /v1/responses hold the response in a field
    usage = response.get("usage")
    if not usage:
        return False
    details = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
    usage[details] = {**(usage.get(details) or {}), "cached_tokens": request.cached}
    if request.end_reason == "length" and "status" in response:
        response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        if response is not answer:
            answer["type"] = "response.incomplete"
    return True
