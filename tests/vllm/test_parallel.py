"""A budget on several processes: engines side by side, heads that are shared out, and what is refused before there are any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import POLICIES, prompts, save
from tests.vllm.test_tokens import ROOT, Answers, first, job

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
TEXTS, NEW, K = prompts((20, 60, 100, 40)), 8, 16
BUDGET = {"policy": "h2o", "k": K}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers(tmp_path_factory.mktemp("vllm"))


def ask(kind: str, folder: Path, variable: str | None = None, **asked: Any) -> tuple[dict[str, Any], str]:
    """Run tests.vllm.`kind` in a process of its own: its answer, and what it said. variable: KVPATCH_VLLM."""
    told, answer = folder / "job.json", folder / "answer.json"
    told.write_text(json.dumps({"prompts": TEXTS, "new": NEW, "options": {}, **asked}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPATCH_"))}
    environment |= {"KVPATCH_VLLM": variable} if variable else {}
    run = [sys.executable, "-m", f"tests.vllm.{kind}", str(told), str(answer)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text()), done.stdout + done.stderr


def test_two_engines(answers):
    """With data_parallel_size=2 each engine has the budget, and the figures are of both."""
    answers.model("Llama")
    found, _ = ask("replicas", answers.folder, model=str(answers.folder / "Llama"), engines=2, settings=BUDGET)
    assert found["tokens"] == answers.generated("Llama", TEXTS, "h2o", K, NEW)
    assert found["ended"] == [2, 2]
    assert found["figures"]["kvpatch_ended_requests_total"] == 4
    assert found["figures"]["kvpatch_held_tokens_total"] == 4 * K


def test_three_processes(answers):
    """Nine heads on three KV heads, as SmolLM2's."""
    heads = {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3}
    answers.models["Nine"] = save("Llama", answers.folder / "Nine", **heads, intermediate_size=192, vocab_size=576)
    policies, sampling = ("h2o", "critical_snapkv"), {"max_tokens": NEW, "temperature": 0}
    options = {"tensor_parallel_size": 3}  # one batch: they wait for each other in every layer of every pass
    jobs = [job("Nine", policy, TEXTS, options=options, sampling=sampling) for policy in policies]
    for policy, answer in zip(policies, answers.of(jobs), strict=True):
        assert first(answer) == answers.generated("Nine", TEXTS, policy, new=NEW, **POLICIES[policy]), policy


def test_heads_that_cannot_be_shared(answers):
    """vLLM gives a copy of a KV head to each process where there are fewer of them; a budget needs it whole on one."""
    answers.models["One"] = save("Llama", answers.folder / "One", num_key_value_heads=1)
    options = {"tensor_parallel_size": 2, "additional_config": {"kvpatch": BUDGET}}
    found, said = ask("plain", answers.folder, model=str(answers.folder / "One"), options=options)
    assert "error" in found
    assert "2 processes cannot share 1 KV heads evenly. Use a number that divides 1." in said


@pytest.mark.parametrize(
    ("options", "variable", "words"),
    [
        ({"pipeline_parallel_size": 2}, False, "layers are on several processes. Use tensor_parallel_size."),
        ({"pipeline_parallel_size": 2}, True, "layers are on several processes. Use tensor_parallel_size."),
        ({"distributed_executor_backend": "ray"}, True, "Ray does not hand KVPATCH_VLLM to workers on other hosts"),
    ],
)
def test_refused_before_workers_are_made(answers, options, variable, words):
    """The error is that of the process which asks, not of a worker's that could not be started."""
    answers.model("Llama")
    given = {} if variable else {"additional_config": {"kvpatch": BUDGET}}
    found, _ = ask(
        "plain",
        answers.folder,
        json.dumps(BUDGET) if variable else None,
        model=str(answers.folder / "Llama"),
        options={**options, **given},
    )
    assert found["error"].startswith("KVPatchError: ") and words in found["error"]
