"""`kvpatch serve` in a thread, asked by the openai client over loopback."""

import json
import shutil
import urllib.request
from contextlib import contextmanager, suppress

import pytest

import kvpatch
from kvpatch.cli.loading import MODELS, Source
from tests.helpers.serving import until

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@contextmanager
def serving(source, k, policy="h2o", keeping=None, protect=None, **engine):
    """Serve a model: a client, the server, and its address."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from kvpatch.cli import serving

    place, engine = serving.Address("localhost", 0), {"num_blocks": 400, **engine}
    chosen = kvpatch.get_policy(policy).with_options(None, protect=protect)
    server = serving.run(source, chosen, k, {}, place, engine, background=True, conversations=keeping)
    address = f"http://localhost:{server.server.config.port}"

    def answers():
        with suppress(OSError):
            return urllib.request.urlopen(f"{address}/health", timeout=10)

    try:
        until(answers)
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600), server, address
    finally:
        server.kill_server()


@contextmanager
def started(folder, template=TEMPLATE, keeping=None, protect=None):
    """Serve the model in a folder: a client, the model's name, its server, what generate() gives alone, and the address."""
    if not (folder / "config.json").exists():
        shutil.copytree(MODELS / "llama-python", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    for file in ("config.json", "generation_config.json"):  # no text ends before its limit
        known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**known, "eos_token_id": None}))
    source = Source(str(folder), "float32", "cpu")
    with serving(source, 24, keeping=keeping, protect=protect) as (client, server, address):
        model, tokenizer = source.model(), source.tokenizer()

        def alone(text, new):
            ids = tokenizer(text, return_tensors="pt").input_ids
            with kvpatch.patched(model, "h2o", 24):
                out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
            return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

        yield client, str(folder), server, alone, address


def until_idle(server):
    """Wait until no request is left in the engine, nor anything of one: what has ended is counted by then."""
    answers = server._generation_state._cb_manager
    left = answers.engine.batch_processor.cache.requests, answers.requests, answers.engine.output_router.result_handlers
    until(lambda: not any(left))
