"""vLLM's own server under a budget, started as the guide does: its table of what a request may ask for, row by row."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpatch
from kvpatch.cli.loading import MODELS
from kvpatch.serving.vllm.figures import ROWS

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
K, MOST, LENGTH = 24, 100, 256
TEXT = """import os
import sys


def main(argv):
    for name in argv[1:]:
        with open(name) as file:
            text = file.read()
        print("""
USUAL = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Server:
    """A server that is asked over loopback."""

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name

    def get(self, path: str) -> bytes:
        return urllib.request.urlopen(f"{self.address}{path}", timeout=60).read()

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Ask: the status and the answer."""
        body = json.dumps({"model": self.name, **fields}).encode()
        asked = urllib.request.Request(f"{self.address}{path}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, **fields: Any) -> list[dict[str, Any]]:
        """Ask for a completion of TEXT, greedy unless the fields say otherwise: its choices."""
        status, answer = self.post("/v1/completions", **{"prompt": TEXT, **USUAL, **fields})
        assert status == 200, answer
        return answer["choices"]

    def refuse(self, **fields: Any) -> str:
        """Ask for what is answered with status 400: the sentence."""
        status, answer = self.post("/v1/completions", **{"prompt": TEXT, "max_tokens": 12, **fields})
        assert status == 400, answer
        return answer["error"]["message"]

    def figures(self) -> dict[str, float]:
        lines = [line for line in self.get("/metrics").decode().splitlines() if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(MODELS / "llama-python", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    held = socket.socket()  # while the server runs: nobody else gets its port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    run = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(folder), "--dtype", "float32"]
    run += ["--additional-config", json.dumps({"kvpatch": {"policy": "h2o", "k": K, "max_k": MOST}})]
    run += ["--logits-processors", "kvpatch.serving.vllm.admission:Budgets"]
    run += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", str(LENGTH)]
    own = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder.parent / "log").open("w") as log:
        process = subprocess.Popen(run, cwd=ROOT, env=environment, stdout=log, stderr=log)
    found = Server(f"http://127.0.0.1:{port}", str(folder))
    try:
        for _ in range(1200):
            assert process.poll() is None, (folder.parent / "log").read_text()[-4000:]
            with suppress(OSError):
                found.get("/health")
                break
            time.sleep(0.5)
        yield found
    finally:
        process.terminate()
        process.wait(60)
        held.close()


@pytest.fixture(scope="module")
def wanted(server):
    """generate()'s text under a budget of k tokens."""
    tokenizer = AutoTokenizer.from_pretrained(server.name)
    model = AutoModelForCausalLM.from_pretrained(server.name, dtype=torch.float32)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids

    def generate(k: int, new: int = 12) -> str:
        with kvpatch.patched(model, "h2o", k):
            out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    assert ids.shape[1] > K
    return generate


def test_a_budget(server, wanted):
    """The server's, and a request's own, as a completion and as a chat."""
    (found,) = server.complete()
    assert found["text"] == wanted(K)
    (found,) = server.complete(vllm_xargs={"kvpatch_k": 8})
    assert found["text"] == wanted(8) != wanted(K)
    messages = [{"role": "user", "content": TEXT}]
    status, answer = server.post("/v1/chat/completions", messages=messages, **USUAL)
    assert status == 200 and answer["choices"][0]["message"]["content"] == wanted(K)


def test_a_budget_that_is_refused(server, wanted):
    """With the sentence, and the server goes on; a field that vLLM does not know is ignored."""
    assert f"kvpatch_k=101 must be a number of tokens from 1 to {MOST}" in server.refuse(vllm_xargs={"kvpatch_k": 101})
    assert "vllm_xargs has 'kvpatch_policy', which nothing reads" in server.refuse(vllm_xargs={"kvpatch_policy": "snapkv"})
    (found,) = server.complete(kvpatch={"k": 8})
    assert found["text"] == wanted(K)


def test_each_request_by_its_own_fields(server, wanted):
    """A temperature and a seed are a request's own, whatever runs beside it."""
    hot = [{"temperature": 1.5, "seed": seed} for seed in (1, 2, 3)]
    first = [server.complete(**one)[0]["text"] for one in hot]
    with ThreadPoolExecutor(4) as threads:
        again = list(threads.map(lambda one: server.complete(**one)[0]["text"], [*hot, {}]))
    assert again == [*first, wanted(K)] and len(set(again)) == 4


def test_what_is_obeyed(server, wanted):
    whole = wanted(K)
    (stopped,) = server.complete(stop=[whole[5:7]])
    assert stopped["text"] == whole[: whole.index(whole[5:7])] and stopped["finish_reason"] == "stop"
    two = server.complete(n=2, temperature=1.5, seed=1)
    assert len({one["text"] for one in two}) == 2
    (told,) = server.complete(logprobs=2)
    assert len(told["logprobs"]["tokens"]) == 12 and all(len(one) >= 2 for one in told["logprobs"]["top_logprobs"])
    (echoed,) = server.complete(echo=True)
    assert echoed["text"] == TEXT + whole
    ids = AutoTokenizer.from_pretrained(server.name)(TEXT).input_ids
    assert [one["text"] for one in server.complete(prompt=[ids, ids])] == [whole, whole]
    assert [one["text"] for one in server.complete(prompt=[TEXT, TEXT])] == [whole, whole]


def test_a_form_of_the_answer(server):
    (chosen,) = server.complete(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    assert chosen["text"] in ("yes", "no")
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}
    told = {"messages": [{"role": "user", "content": TEXT}], "response_format": schema, "max_tokens": 12, "temperature": 0}
    status, answer = server.post("/v1/chat/completions", **told)
    assert status == 200 and json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")
    status, answer = server.post("/v1/chat/completions", **told, logprobs=True, top_logprobs=2)
    assert status == 200 and len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_more_tokens_than_the_model_s_length(server):
    assert str(LENGTH) in server.refuse(prompt=TEXT * 20)
    assert str(LENGTH) in server.refuse(max_tokens=1000)


def test_a_client_that_hangs_up(server):
    """Its request ends, and is counted."""
    before = server.figures()["kvpatch_ended_requests_total"]
    body = json.dumps({"model": server.name, "prompt": TEXT, "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{server.address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
    for _ in range(300):
        now = server.figures()
        if now["vllm:num_requests_running"] == 0 and now["kvpatch_ended_requests_total"] > before:
            return
        time.sleep(0.1)
    raise AssertionError(now)


def test_what_the_server_tells(server):
    """The model, and the figures beside vLLM's."""
    assert [one["id"] for one in json.loads(server.get("/v1/models"))["data"]] == [server.name]
    before = server.figures()
    usage = server.post("/v1/completions", prompt=TEXT, **USUAL)[1]["usage"]
    gained = {name: value - before[name] for name, value in server.figures().items()}
    assert {f"kvpatch_{name}" + "_total" * (kind == "counter") for name, (kind, _) in ROWS.items()} <= set(gained)
    assert gained["kvpatch_seen_tokens_total"] == usage["prompt_tokens"] + 11
    assert gained["kvpatch_held_tokens_total"] == K and gained["kvpatch_compressed_requests_total"] == 1
