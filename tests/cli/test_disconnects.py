"""A client that hangs up ends its request in `kvpatch serve`.

transformers' app is driven without sockets, over an engine that never answers.
"""

import asyncio
import inspect
import json
import queue
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from kvpatch.cli.disconnects import EndAtDisconnect
from kvpatch.cli.loading import MODELS, Source
from tests.helpers.marks import batches

pytestmark = batches

NAME = str(MODELS / "llama-python")
ASKED = {
    "/v1/completions": {"prompt": "import os"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "import os"}]},
    "/v1/responses": {"input": "import os", "stream": False},
}
LIMIT = 60  # seconds after which a test fails that waits for what never comes


class Engine:
    """Takes requests and never answers."""

    def __init__(self):
        self.begun, self.cancelled, self.conversations = asyncio.Queue(), [], None
        self.pool = SimpleNamespace(keeps_system=False, check=lambda *told, **more: None)
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self.output_router = SimpleNamespace(_lock=threading.Lock(), result_handlers={}, output_queue=queue.Queue())

    def add_request(self, ids, request_id, **told):
        self.begun.put_nowait(request_id)
        return request_id

    def register_result_handler(self, request_id, handler):
        pass

    def cancel_request(self, request_id):
        self.cancelled.append(request_id)

    def stop(self, **how):
        pass


def make_app(engine):
    """The app that `kvpatch serve` runs, with `engine` in place of transformers' own."""
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import GenerationState

    from kvpatch.cli import serving
    from kvpatch.cli.answering import Answers

    source = Source(NAME, "float32", "cpu")
    model, tokenizer = source.model(), source.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    state = GenerationState(continuous_batching=True)
    known = inspect.signature(server.build_server).parameters  # before it is mended
    with serving._serve_loaded(model, tokenizer, Answers(engine, model, None), None, []):
        manager = model_manager.ModelManager(device="cpu", force_model=NAME)
        handlers = (kind(manager, state) for kind in (ChatCompletionHandler, CompletionHandler, ResponseHandler))
        none = {name: None for name in ("systemone_handler", "transcription_handler") if name in known}
        app = server.build_server(manager, *handlers, **none, generation_state=state)
    return app, manager


@pytest.fixture(scope="module")
def made():
    engine = Engine()
    app, manager = make_app(engine)
    yield app, engine
    manager.shutdown()


def scope_of(path, method="POST"):
    headers = [(b"content-type", b"application/json")]
    asked = {"method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    return {"type": "http", "root_path": "", "scheme": "http", "http_version": "1.1", "client": None, "server": None, **asked}


async def call(app, scope, messages, sent):
    """Call an ASGI app. messages: an async iterator of what the client sends, and when."""

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(scope, messages.__anext__, send), LIMIT)


@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_hangs_up_before_a_plain_answer(made, path):
    """The engine's request is cancelled, and the server's task ends."""
    app, engine = made
    engine.begun, engine.cancelled, sent = asyncio.Queue(), [], []

    async def client():
        yield {"type": "http.request", "body": json.dumps({"model": NAME, **ASKED[path]}).encode(), "more_body": False}
        engine.wanted = await engine.begun.get()
        yield {"type": "http.disconnect"}

    asyncio.run(call(app, scope_of(path), client(), sent))
    assert engine.cancelled == [engine.wanted] and sent == []


def test_a_server_that_stops(made):
    """What is under way ends too: uvicorn cancels it when its patience is at an end."""
    app, engine = made
    engine.begun, engine.cancelled = asyncio.Queue(), []

    async def stop():
        async def client():
            yield {"type": "http.request", "body": json.dumps({"model": NAME, "prompt": "import os"}).encode()}
            engine.wanted = await engine.begun.get()
            running.cancel()
            await asyncio.Event().wait()

        running = asyncio.ensure_future(call(app, scope_of("/v1/completions"), client(), []))
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(stop())
    assert engine.cancelled == [engine.wanted]


def test_the_model_that_is_served_is_listed(made, monkeypatch, tmp_path):
    """One, by the name that requests give, whatever the Hub's cache has."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    app, _ = made
    sent = []

    async def client():
        yield {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()

    asyncio.run(call(app, scope_of("/v1/models", "GET"), client(), sent))
    assert sent[0]["status"] == 200
    (listed,) = json.loads(b"".join(one.get("body", b"") for one in sent[1:]))["data"]
    assert (listed["id"], listed["object"]) == (NAME, "model") and isinstance(listed["created"], int)


async def talk(app, *client):
    """Call the middleware around a small app: the messages that it sent."""
    sent = []

    async def messages():
        for one in client:
            yield one
        await asyncio.Event().wait()

    await call(EndAtDisconnect(app), {"type": "http"}, messages(), sent)
    return sent


def test_what_the_middleware_leaves_alone():
    """An app that answers, one that raises, and a stream, which its app ends: it is told of the client as often as it asks."""
    gone = {"type": "http.disconnect"}

    async def echo(scope, receive, send):
        await send(await receive())

    async def fail(scope, receive, send):
        raise RuntimeError("words")

    async def stream(scope, receive, send):
        await send("begun")
        await send([await receive(), await receive()])

    assert asyncio.run(talk(echo, {"type": "http.request"})) == [{"type": "http.request"}]
    with pytest.raises(RuntimeError, match="words"):
        asyncio.run(talk(fail, {"type": "http.request"}))
    assert asyncio.run(talk(stream, gone)) == ["begun", [gone, gone]]


def test_what_is_no_request_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    asyncio.run(EndAtDisconnect(app)({"type": "lifespan"}, 1, 2))
    assert seen == [({"type": "lifespan"}, 1, 2)]
