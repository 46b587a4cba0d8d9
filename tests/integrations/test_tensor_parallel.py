"""A model sharded by transformers' own tp_plan keeps what it keeps in one process: two processes, started once, run it all."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import kvpatch
from tests.helpers.comparing import same_tokens
from tests.helpers.tiny import make
from tests.integrations import sharded

pytestmark = pytest.mark.slow  # two processes for all of them

ROOT = Path(__file__).parents[2]
TOLERANCE = 5e-5  # sums over heads are taken in another order


def torchrun(*arguments):
    """Two processes on this machine; their output."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, text=True,
        capture_output=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if line.startswith("[rank"))
    return done.stdout


@pytest.fixture(scope="module")
def models():
    made = {"llama": make("llama_gqa"), "mistral": make("mistral_sliding"), "mqa": make("llama_mqa")}
    for model in made.values():  # some versions share the head's rows out evenly, or not at all
        model.resize_token_embeddings(98)
    return made


@pytest.fixture(scope="module")
def halves(models, tmp_path_factory):
    """What each of two processes found; run by the first of pytest's own processes that asks."""
    folder = tmp_path_factory.mktemp("sharded", numbered=False)
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parents[1] / "sharded"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "1.pt").exists():
            for name, model in models.items():
                model.save_pretrained(folder / name)
            torchrun("-m", "tests.integrations.sharded", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def _case(index):
    name, policy, k, options = sharded.CASES[index]
    return f"{index}-{name}-{policy}-{k}" + "".join(f"-{key}={value}" for key, value in options.items())


@pytest.mark.parametrize("index", range(len(sharded.CASES)), ids=_case)
def test_two_processes_keep_what_one_keeps(models, halves, index):
    name, *case = sharded.CASES[index]
    logits, positions = sharded.run(models["llama" if name == "whole" else name], *case)
    for rank, half in enumerate(halves):
        own_logits, own_positions = half["cases"][index]
        torch.testing.assert_close(own_logits, logits, atol=TOLERANCE, rtol=0)
        for mine, theirs in zip(own_positions, positions, strict=True):
            H = theirs.shape[1] if name == "whole" else theirs.shape[1] // 2
            first = 0 if name == "whole" else rank * H
            assert mine.shape[1] == H
            assert same_tokens([mine], [theirs[:, first : first + H]])


def test_cases_differ(halves):
    """Of all cases on one model no two end alike, so that each is a test of its own."""
    logits = [half for half, (name, *_) in zip(halves[0]["cases"], sharded.CASES, strict=True) if name == "llama"]
    for i, (one, _) in enumerate(logits):
        assert not any(torch.allclose(one, other, atol=1e-3) for other, _ in logits[:i])


@pytest.mark.parametrize(
    ("name", "options"), [("greedy", {}), ("lookup", {"prompt_lookup_num_tokens": 3}), ("beams", {"num_beams": 2})]
)
def test_generate(models, halves, name, options):
    expected = sharded.generated(models["llama"], do_sample=False, **options)
    for half in halves:
        torch.testing.assert_close(half[name], expected, atol=TOLERANCE, rtol=0)


def test_loss_and_gradient_of_blocks(models, halves):
    loss, gradient = sharded.trained(models["llama"])
    assert gradient.abs().max() > 1e-3
    for rank, half in enumerate(halves):
        mine = half["trained"][1]
        expected = gradient if len(mine) == len(gradient) else gradient.chunk(2)[rank]  # transformers 5.15 keeps plain shards
        torch.testing.assert_close(half["trained"][0], loss, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=0)


def test_saved_caches_belong_to_a_process(models, halves, tmp_path):
    expected = sharded.kept(models["llama"], tmp_path / "cache.safetensors")
    for rank, half in enumerate(halves):
        torch.testing.assert_close(half["kept"], expected, atol=TOLERANCE, rtol=0)
        assert f"the heads of process {1 - rank} of 2" in half["another's cache"]
        assert f"the heads of process {rank} of 2" in half["another's cache"]


def test_report_is_of_one_process(models, halves):
    with kvpatch.patched(models["llama"], "adaptive(tova)", 0.4) as patch:
        _, cache = sharded.force(models["llama"], sharded.IDS, sharded.FED[:, :2])
        whole = patch.report()
    assert cache.nbytes == whole.nbytes
    assert "counted here" not in str(whole)
    for rank, half in enumerate(halves):
        report = half["report"]
        assert report.part == report.to_dict()["part"] == f"the heads of process {rank} of 2"
        assert f"counted here          the heads of process {rank} of 2" in str(report)
        assert torch.equal(report.held(), whole.held()[:, :, rank : rank + 1])
        assert report.full_nbytes * 2 == whole.full_nbytes


def test_heads_that_cannot_be_shared(halves):
    for half in halves:
        assert half["mqa"] == (
            "2 processes cannot share the 1 KV heads of a layer evenly: start a number of processes that divides 1 (torchrun "
            "--nproc-per-node)."
        )


def test_weights_sharded_by_hand(halves):
    for half in halves:
        assert half["by hand"] == (
            "Attention weights are sharded by something other than transformers, so that nothing says which heads are on this "
            "process: load the model with from_pretrained(..., tp_plan='auto')."
        )


def test_example():
    told = torchrun("-m", "examples.tensor_parallel")
    assert "counted here          the heads of process 0 of 2" in told
    for rank in (0, 1):
        (line,) = [line for line in told.splitlines() if line.startswith(f"process {rank} of 2: ")]
        figures = ast.literal_eval(line.split(": ", 1)[1])
        assert figures["same text"] and figures["same tokens kept"]
        assert 0 < figures["largest difference of logits"] < 1e-3
        mine, whole = figures["bytes"]
        assert mine * 2 == whole
