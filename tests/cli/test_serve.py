"""`kvpatch serve`: transformers' server over a patched model, asked by the openai client over loopback."""

import json
import shutil
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import kvpatch
from kvpatch.cli.commands import app
from kvpatch.cli.loading import MODELS, Source
from tests.helpers.marks import batches

pytestmark = batches

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEXT = """import os
import sys


def main(argv):
    for name in argv[1:]:
        with open(name) as file:
            text = file.read()
"""


@contextmanager
def started(folder):
    """Serve the model in a folder: a client, the model's name, its server, what generate() gives alone, and the address."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from kvpatch.cli import serving

    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for file in ("config.json", "generation_config.json"):  # no text ends before its limit
        known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**known, "eos_token_id": None}))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    source, policy = Source(str(folder), "float32", "cpu"), kvpatch.get_policy("h2o")
    server = serving.run(source, policy, 24, {}, serving.Address("localhost", port), {"num_blocks": 400}, background=True)
    address = f"http://localhost:{port}"
    for _ in range(100):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    model, tokenizer = source.model(), source.tokenizer()

    def alone(text, new):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with kvpatch.patched(model, "h2o", 24):
            out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
    try:
        yield client, str(folder), server, alone, address
    finally:
        server.kill_server()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(MODELS / "llama-python", folder, dirs_exist_ok=True)
    with started(folder) as found:
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
    pool = server._generation_state._cb_manager._cb.batch_processor.cache
    for _ in range(100):
        if not pool.requests:
            return
        time.sleep(0.1)
    raise AssertionError("the request of the client that hung up still runs")


def test_a_server_that_stops_does_not_wait_for_every_client(served):
    """Requests under way have some seconds, and transformers and uvicorn are as before once it runs."""
    import uvicorn
    from transformers.cli.serving import model_manager, server

    from kvpatch.cli import serving

    _, _, running, _, _ = served
    assert running.server.config.timeout_graceful_shutdown == serving.PATIENCE
    homes = {uvicorn.config: uvicorn.Config, model_manager: model_manager.ModelManager, server: server.build_server}
    assert all(one.__module__ == home.__name__ for home, one in homes.items())


def test_bad_requests(served):
    """A malformed request is answered with an error, and the server goes on."""
    client, name, _, alone, address = served
    wrong = json.dumps({"model": name, "nonsense": 1}).encode()
    for path, body in (("completions", b"{not json"), ("chat/completions", wrong)):
        request = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert 400 <= error.value.code < 600
    assert client.completions.create(model=name, prompt=TEXT, max_tokens=8, temperature=0.0).choices[0].text == alone(TEXT, 8)


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
    found = run(app, ["serve", "--model", "no/model", "-k", "7x"])
    assert found.exit_code and "-k 7x is no budget" in found.output + found.stderr
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    found = run(app, ["serve", "--model", "no/model"])
    assert found.exit_code and "pip install fastapi uvicorn pydantic openai" in found.output + found.stderr
