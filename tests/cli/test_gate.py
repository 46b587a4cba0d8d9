"""The key of `kvpatch serve`, and bodies that its gate does not read on, without a server."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from kvpatch.cli import gate
from kvpatch.cli.request_fields import Served

PATHS = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/elsewhere")


def ask(path, headers=(), bodies=(b"{}",), key="secret"):
    """Ask a gate before an app that answers everything with status 200: the status and the body, and how often which path."""
    answered, sent = Counter(), []
    figures = SimpleNamespace(note_answer=lambda *told: answered.update([told]), render=lambda: "figures")
    answers = SimpleNamespace(metrics=figures, conversations=None, requests={}, close=lambda name: None)
    pieces = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    pieces[-1]["more_body"] = False

    async def app(scope, receive, send):
        await gate.answer(send, 200, "{}")

    async def receive():
        return pieces.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST" if path in gate.PATHS else "GET", "path": path, "headers": list(headers)}
    asyncio.run(gate.Gate(app, Served("m"), answers, key, lambda line: None)(scope, receive, send))
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:]), answered


def bearing(key):
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize("path", PATHS)
def test_a_key_is_asked_for(path):
    """Before the request is read; paths that are not there are told to nobody but by their own status."""
    wanted = 404 if path == "/elsewhere" else 401
    for headers in ((), bearing("other"), bearing("secret "), [(b"authorization", b"secret")], [(b"authorization", b"\xff")]):
        status, body, _ = ask(path, headers, bodies=(b"no JSON",))
        assert status == wanted, headers
        assert wanted == 404 or json.loads(body)["error"] == {
            "message": "Send the server's key: 'Authorization: Bearer KEY'.",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }


def test_who_has_the_key_is_answered():
    asked = json.dumps({"prompt": "a"}).encode()
    assert ask("/v1/completions", bearing("secret"), (asked,))[0] == 200
    assert ask("/v1/models", bearing("secret"))[0] == 200
    assert ask("/v1/completions", (), (asked,), key=None)[0] == 200, "a server without a key"


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_what_needs_no_key(path):
    assert ask(path)[0] == 200


def test_a_body_that_is_too_large(monkeypatch):
    """It is not read to its end."""
    monkeypatch.setattr(gate, "LARGEST", 2**20)
    status, body, answered = ask("/v1/completions", bodies=[b" " * 2**19] * 9, key=None)
    assert status == 413 and "The body has more than 1 MiB" in json.loads(body)["error"]["message"]
    assert answered == {("/v1/completions", 413): 1}
