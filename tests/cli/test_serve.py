"""`kvpatch serve`: transformers' server over a patched model, asked by the openai client over loopback."""

import json
import shutil
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from kvpatch.cli import serving as commands
from kvpatch.cli.commands import app
from kvpatch.cli.loading import MODELS, Source
from kvpatch.cli.request_stops import StopStringWatch, WatchedDecoder
from kvpatch.errors import KVPatchError
from kvpatch.policies import get_policy
from tests.helpers.marks import batches
from tests.helpers.served import serving, started, until_idle
from tests.helpers.serving import until

pytestmark = batches

TEXT = """import os
import sys


def main(argv):
    for name in argv[1:]:
        with open(name) as file:
            text = file.read()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with started(tmp_path_factory.mktemp("model")) as found:
        yield found


def test_chat_and_completion(served):
    client, name, _, alone, _ = served
    want = alone(TEXT, 12)
    given = {"model": name, "max_tokens": 12, "temperature": 0.0}
    assert client.completions.create(prompt=TEXT, **given).choices[0].text == want
    chat = client.chat.completions.create(messages=[{"role": "user", "content": TEXT}], **given)
    assert chat.choices[0].message.content == want


def test_streaming(served):
    client, name, _, alone, _ = served
    stream = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": TEXT}], max_tokens=12, temperature=0.0, stream=True
    )
    parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert "".join(parts) == alone(TEXT, 12) and len(parts) > 3


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_the_end_of_a_stream(served, path):
    """Clients that read the protocol by hand wait for [DONE], which a response has not."""
    _, name, _, _, address = served
    asked = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    text = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    body = json.dumps({"model": name, "stream": True, text: asked[text]}).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
    events = urllib.request.urlopen(request, timeout=60).read().split(b"\n\n")
    assert events.pop() == b"" and events.count(b"data: [DONE]") == (path != "responses")
    assert path == "responses" or (events[-1] == b"data: [DONE]" and b'"finish_reason":"' in events[-2])


def test_eight_clients_at_once(served):
    client, name, _, alone, _ = served
    texts = [TEXT[:40] + f"\n# {i}\n" * (i + 1) for i in range(8)]

    def ask(text):
        return client.completions.create(model=name, prompt=text, max_tokens=16, temperature=0.0).choices[0].text

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, texts))
    assert found == [alone(text, 16) for text in texts]


def test_a_client_that_hangs_up(served):
    """Its request ends, and the others go on."""
    client, name, server, alone, _ = served
    stream = client.completions.create(model=name, prompt=TEXT, max_tokens=400, temperature=0.0, stream=True)
    next(iter(stream))
    stream.close()
    assert client.completions.create(model=name, prompt=TEXT, max_tokens=8, temperature=0.0).choices[0].text == alone(TEXT, 8)
    until_idle(server)


def test_a_server_that_stops_does_not_wait_for_every_client(served):
    """Requests under way have some seconds, and transformers and uvicorn are as before once it runs."""
    import uvicorn
    from transformers.cli.serving import model_manager, server

    from kvpatch.cli import serving

    _, _, running, _, _ = served
    assert running.server.config.timeout_graceful_shutdown == serving.PATIENCE
    homes = {
        uvicorn.config: uvicorn.Config,
        uvicorn.server: uvicorn.Server,
        model_manager: model_manager.ModelManager,
        server: server.build_server,
    }
    assert all(one.__module__ == home.__name__ for home, one in homes.items())


def test_each_request_by_its_own_fields(served):
    """Neither temperature nor seed is the first request's, and a seed gives one text whatever runs beside it."""
    client, name, _, alone, _ = served

    def ask(given):
        return client.completions.create(model=name, prompt=TEXT, max_tokens=12, **given).choices[0].text

    hot = [{"temperature": 2.0, "seed": seed} for seed in (1, 2, 3)]
    first = [ask(one) for one in hot]
    with ThreadPoolExecutor(4) as threads:
        again = list(threads.map(ask, [*hot, {"temperature": 0.0}]))
    assert again == [*first, alone(TEXT, 12)] and len(set(again)) == 4
    assert ask({"temperature": 2.0, "extra_body": {"top_k": 1}}) == alone(TEXT, 12)


def test_a_text_ends_before_a_stop_string(served):
    """In the midst of a token, streamed or not; what has been read of it is told, and the engine goes on to the next."""
    client, name, server, alone, _ = served
    whole = alone(TEXT, 12)
    stop = whole[5:7]
    given = {"model": name, "prompt": TEXT, "max_tokens": 12, "temperature": 0.0, "stop": [stop, "never"]}
    plain = client.completions.create(**given)
    assert plain.choices[0].text == whole[: whole.index(stop)] and plain.choices[0].finish_reason == "stop"
    assert 0 < plain.usage.completion_tokens < 12
    parts = list(client.completions.create(stream=True, **given))
    assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop" and parts[-1].usage.completion_tokens == plain.usage.completion_tokens
    last = client.completions.create(**{**given, "max_tokens": plain.usage.completion_tokens})
    assert (last.choices[0].text, last.choices[0].finish_reason) == (plain.choices[0].text, "stop"), "at the last token, too"
    plain = client.completions.create(**{**given, "stop": "never"})
    assert plain.choices[0].text == whole and plain.choices[0].finish_reason == "length"
    until_idle(server)


def test_tokens_behind_a_stop_string_do_not_count():
    """Several may come at once, as many as the engine has made before it hears of the stop."""
    watched = WatchedDecoder(SimpleNamespace(step=lambda _, token: token), StopStringWatch(["b"]))
    assert [watched.step(None, token) for token in "abcb"] == ["a", None, None, None] and watched.tokens == 2


def test_a_response_that_was_cut(served):
    """It says so, whole or as the last event of a stream: nothing else in it tells."""
    client, name, _, alone, _ = served
    given = {"model": name, "input": TEXT, "max_output_tokens": 6, "temperature": 0.0}
    *_, last = client.responses.create(stream=True, **given)
    assert last.type == "response.incomplete"
    for found in (client.responses.create(**given), last.response):
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert found.output_text == alone(TEXT, 6)


def test_a_request_that_needs_more_room_than_there_is():
    """It is refused at once, and the server goes on, where nothing is evicted, too."""
    openai = pytest.importorskip("openai")
    name = str(MODELS / "llama-python")
    with serving(Source(name, "float32", "cpu"), 1.0, num_blocks=4, page_size=16, max_batch_tokens=64) as (client, _, address):
        given = {"model": name, "prompt": "import os", "temperature": 0.0}
        said = client.completions.create(max_tokens=8, **given).choices[0].text
        with pytest.raises(openai.BadRequestError, match="needs 13 blocks of 16 tokens, but there are 4"):
            client.completions.create(max_tokens=200, **given)
        assert client.completions.create(max_tokens=8, **given).choices[0].text == said
        figures = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
        assert "kvpatch_blocks 4\n" in figures and "kvpatch_evicted_tokens_total 0\n" in figures


def test_what_the_server_counts(served):
    """Requests and tokens, and what was evicted of them; a request that is refused is counted by its status."""
    openai = pytest.importorskip("openai")
    client, name, server, _, address = served

    def read():
        lines = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode().splitlines()
        return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    until_idle(server)  # an answer is counted when it has been sent
    before = read()
    usage = client.completions.create(model=name, prompt=TEXT, max_tokens=8, temperature=0.0).usage
    with pytest.raises(openai.BadRequestError, match="n is not served"):
        client.completions.create(model=name, prompt=TEXT, n=2)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=TEXT)
    answered = [f'kvpatch_requests_total{{path="/v1/completions",status="{status}"}}' for status in (200, 400, 404)]
    until(lambda: all(read().get(one, 0) > before.get(one, 0) for one in answered))
    gained = {key: value - before.get(key, 0) for key, value in read().items()}
    assert gained["kvpatch_prompt_tokens_total"] == usage.prompt_tokens and gained["kvpatch_generated_tokens_total"] == 8
    assert gained["kvpatch_evicted_tokens_total"] == usage.prompt_tokens + 7 - 24
    assert gained['kvpatch_requests_ended_total{reason="length"}'] == gained["kvpatch_compressed_requests_total"] == 1
    assert [gained[one] for one in answered] == [1, 1, 1]
    until(lambda: read()["kvpatch_requests_running"] == read()["kvpatch_tokens_held"] == 0)  # it ends after its answer


def test_a_line_a_request(served, capfd):
    client, name, server, _, _ = served
    until_idle(server)  # the lines of others have come
    capfd.readouterr()
    client.completions.create(model=name, prompt=TEXT, max_tokens=3, user="ann")
    said = []
    until(lambda: said.append(capfd.readouterr().err) or "user 'ann'" in "".join(said))  # it comes after the answer
    (line,) = [one for one in "".join(said).splitlines() if "/v1/completions" in one]
    assert line.startswith("POST /v1/completions, 200, ") and "3 written, length, user 'ann'" in line


def test_what_no_client_may_do(served):
    """Routes of transformers' server that would unload the model or load another are closed."""
    _, _, _, _, address = served
    for path, method, status in (("/reset", "POST", 404), ("/load_model", "POST", 404), ("/v1/completions", "GET", 405)):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(f"{address}{path}", method=method), timeout=30)
        assert error.value.code == status and json.loads(error.value.read())["error"]["message"]


def test_bad_requests(served):
    """A malformed request is answered with an error, and the server goes on."""
    client, name, _, alone, address = served
    wrong = json.dumps({"model": name, "nonsense": 1}).encode()
    half = json.dumps({"model": name, "prompt": "\ud800"}).encode()
    for path, body in (
        ("completions", b"{not json"),
        ("chat/completions", wrong),
        ("completions", half),
        ("responses", b"\xff"),
    ):
        request = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert error.value.code == 400
        assert set(json.loads(error.value.read())["error"]) == {"message", "type", "param", "code"}
    assert client.completions.create(model=name, prompt=TEXT, max_tokens=8, temperature=0.0).choices[0].text == alone(TEXT, 8)


@pytest.mark.parametrize(("host", "shown"), [("localhost", "localhost"), ("::1", "[::1]")])
def test_in_the_foreground(monkeypatch, capfd, host, shown):
    """As the command runs it: the server answers until it is told to stop, and the patch goes with it."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    source, asked = Source(str(MODELS / "llama-python"), "float32", "cpu"), []

    async def ask_once(server):
        with socket.create_connection(server.servers[0].sockets[0].getsockname()[:2]) as client:
            asked.append(client.getpeername()[1] == server.config.port)

    monkeypatch.setattr("uvicorn.Server.main_loop", ask_once)
    served = commands.run(source, get_policy("h2o"), 24, {}, commands.Address(host, 0), {"num_blocks": 400})
    assert f" at http://{shown}:" in capfd.readouterr().err
    assert asked == [True] and served._generation_state._cb_manager.engine.over


def test_the_port_is_bound_before_the_model_is_loaded(monkeypatch, capfd):
    """For port 0 a free one, which the line for the operator names; a server that does not start gives it back."""
    source = Source(str(MODELS / "llama-python"), "float32", "cpu")
    with serving(source, 24) as (_, server, address):
        assert f"serving {source.name} at {address}/v1" in capfd.readouterr().err and server.server.config.port > 0
    bound = commands._bind_sockets(commands.Address("localhost", 0))
    place = bound[0].getsockname()

    def fail(_):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        raise KVPatchError("no model")

    monkeypatch.setattr(commands, "_bind_sockets", lambda _: bound)
    monkeypatch.setattr(Source, "model", fail)
    with pytest.raises(KVPatchError, match="no model"):
        commands.run(source, get_policy("h2o"), 24, {}, commands.Address("localhost", 0), {})
    with socket.socket() as other:
        other.bind(place)


def test_a_prompt_longer_than_the_model_takes(tmp_path):
    """It is answered with an error that says so, and the server goes on."""
    openai = pytest.importorskip("openai")
    for file in (MODELS / "llama-python").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    torch.manual_seed(0)
    size = json.loads((MODELS / "llama-python" / "config.json").read_text())["vocab_size"]
    GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=96, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with started(tmp_path) as (client, name, _, alone, _):
        given = {"model": name, "temperature": 0.0, "max_tokens": 4}
        message = {"role": "user", "content": TEXT * 4}
        for ask in (
            lambda: client.completions.create(prompt=TEXT * 4, **given),
            lambda: client.chat.completions.create(messages=[message], **given),
            lambda: client.completions.create(prompt=TEXT * 4, stream=True, **given),
        ):
            with pytest.raises(openai.BadRequestError, match="positions, but this server takes 96") as error:
                ask()
            assert error.value.code == "context_length_exceeded"
        assert client.completions.create(prompt=TEXT[:60], **given).choices[0].text == alone(TEXT[:60], 4)


def test_what_is_refused_before_weights_are_loaded(monkeypatch):
    run = CliRunner().invoke
    found = run(app, ["serve", "--model", "no/model", "--policy", "h20"])
    assert found.exit_code and "Unknown policy 'h20'. Did you mean 'h2o'?" in found.output + found.stderr
    found = run(app, ["serve", "--model", str(MODELS / "llama-python"), "--max-model-len", "100000"])
    assert found.exit_code and "positions. Give at most" in found.output + found.stderr
    found = run(app, ["serve", "--model", "no/model", "--api-key", ""])
    assert found.exit_code and "--api-key is empty" in found.output + found.stderr
    found = run(app, ["serve", "--model", "no/model", "-k", "7x"])
    assert found.exit_code and "-k 7x is no budget" in found.output + found.stderr
    monkeypatch.setattr(Source, "model", lambda _: pytest.fail("weights are loaded"))
    with socket.create_server(("localhost", 0)) as taken:
        found = run(app, ["serve", "--model", str(MODELS / "llama-python"), "--port", str(taken.getsockname()[1])])
    assert found.exit_code and "cannot be served: error while attempting to bind" in found.output + found.stderr
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    found = run(app, ["serve", "--model", "no/model"])
    assert found.exit_code and "pip install fastapi uvicorn pydantic openai psutil" in found.output + found.stderr
