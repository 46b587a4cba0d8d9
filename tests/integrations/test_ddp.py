"""Two processes that train together, as torchrun starts them; and what sharded parameters allow, in one process."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import kvpatch
from examples.train_ddp import WAYS
from tests.helpers.tiny import make, prompt
from tests.integrations.test_peft import gradients

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_they_do_unpatched(tmp_path):
    """Gradient accumulation with no_sync() included. A run under `block=` differs, and its processes agree with each other."""
    program = "import torch.distributed as dist; from examples import train_ddp; dist.init_process_group('gloo')"
    program += "; train_ddp.main(['--steps', '2']); train_ddp.main(['--steps', '1', '--block', '8'])"
    program += "; dist.destroy_process_group()"
    script = tmp_path / "both.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2 * 2 * len(WAYS) and all(line["processes agree"] for line in lines)
    for rank in (0, 1):
        plain, *patched, bare, evicted, again = (line for line in lines if line["rank"] == rank)
        assert all(line["same weights"] and line["losses"] == plain["losses"] for line in patched)
        assert not evicted["same weights"] and evicted["losses"] != bare["losses"]
        assert evicted["losses"] == again["losses"], "patched before it was wrapped or after"
    mine, theirs = (next(line for line in lines if line["rank"] == rank) for rank in (0, 1))
    assert mine["losses"] != theirs["losses"], "each process reads rows of its own"


@pytest.mark.parametrize("block", [None, 6])
@pytest.mark.parametrize("name", ["llama_gqa", "mpt"])
def test_a_replica_of_data_parallel_has_its_own_weights(name, block):
    """nn.DataParallel, in which the Trainer wraps a model where it sees several GPUs, copies a module with its attributes."""
    model, ids = make(name).train(), prompt(2, 24)
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        weight.data.mul_(1.5)
    losses = []
    for one in (twin, model):
        with kvpatch.patched(one, "h2o", 7, block=block):
            reader = one if one is twin else _replicate(model, 1.5)
            losses.append(reader(ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    assert losses[0] == losses[1]
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(1.5 * one.grad, other.grad)


def _replicate(model, scale):
    """Copy a model as torch.nn.parallel.replicate does, which needs GPUs, with weights of another device's in its place."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in made.items():
        for name, child in module.named_children():
            replica._modules[name] = made[child]
        for name, weight in module._parameters.items():
            setattr(replica, name, None if weight is None else weight * scale)
    return made[model]


@pytest.mark.parametrize("block", [None, 6])
@pytest.mark.parametrize("order", ["shard, then patch", "patch, then shard"])
def test_fully_sharded_layers(order, block, alone):
    ids, options = prompt(2, 24), {"policy": "h2o", "k": 7, "block": block}

    def shard(model):
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def whole(found):
        return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]

    plain = make("llama_gqa").train()
    if block is None:
        want = gradients(plain, ids)
    else:
        with kvpatch.patched(plain, **options):
            want = gradients(plain, ids)
    model = make("llama_gqa").train()
    if order == "shard, then patch":
        model = shard(model)
    with kvpatch.patched(model, **options):
        if order == "patch, then shard":
            model = shard(model)
        assert all(map(torch.equal, whole(gradients(model, ids)), want))


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_replay_of_a_wrapped_learner(wrapper, alone):
    """Rollouts of the plain model, replayed by a learner that is wrapped or sharded: the same loss and gradients."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(2, 20)
    with kvpatch.patched(model, "h2o", 7, record=True) as patch:
        texts = model.generate(ids, max_new_tokens=8, do_sample=False)
        record = patch.record()
    with kvpatch.replay(model.train(), record):
        want = gradients(model, texts)
    model.zero_grad()
    if wrapper == "DDP":
        learner = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        learner = fully_shard(model, mesh=mesh)
    with kvpatch.replay(learner, record):
        got = gradients(learner, texts)
    got = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in got]
    assert len(want) > 8 and all(map(torch.equal, want, got))
    learner.zero_grad()
    assert not torch.equal(gradients(learner, texts)[0], want[0]), "outside of the replay nothing is evicted"


REPLAYS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import kvpatch
from tests.helpers.tiny import make, prompt
from tests.integrations.test_peft import gradients

dist.init_process_group("gloo")
rank = dist.get_rank()
model = make("llama_gqa", dtype=torch.float64)
with kvpatch.patched(model, "h2o", 7, record=True) as patch:
    texts = model.generate(prompt(2, 20 + rank, seed=rank), max_new_tokens=8, do_sample=False)
    record = patch.record()
with kvpatch.replay(model.train(), record):
    want = gradients(model, texts)[1:]  # without the loss
for one in want:
    dist.all_reduce(one)
model.zero_grad()
if sys.argv[1] == "DDP":
    learner = DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    learner = fully_shard(model, mesh=mesh)
with kvpatch.replay(learner, record):
    got = gradients(learner, texts)[1:]
got = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in got]
assert len(want) == len(got) > 8
off = max(float((a / 2 - b).abs().max()) for a, b in zip(want, got, strict=True))
sys.stdout.write(f"off by {off} of {float(want[0].abs().max())}\\n")  # in one piece: both processes write to the same pipe
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_two_learners_replay_rollouts_of_their_own(wrapper, tmp_path):
    """The gradients are the mean of both: each process follows its own record."""
    script = tmp_path / "replays.py"
    script.write_text(REPLAYS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), wrapper]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("off by")]
    assert len(lines) == 2 and all(float(line[2]) < 1e-12 < 1e-3 < float(line[4]) for line in lines), lines


def test_flat_parameters_are_refused_in_words(alone):
    """The older FullyShardedDataParallel leaves no parameters on the model that it wraps, unless it is asked to."""
    cpu, ids = torch.device("cpu"), prompt(2, 24)
    want = gradients(make("llama_gqa").train(), ids)[0]
    with pytest.raises(kvpatch.KVPatchError, match=r"no parameters of its own.*before it is wrapped.*use_orig_params=True"):
        kvpatch.patch(FullyShardedDataParallel(make("llama_gqa"), device_id=cpu), "h2o", 0.3)
    model = make("llama_gqa").train()
    with kvpatch.patched(model, "h2o", 0.3):
        assert torch.equal(gradients(FullyShardedDataParallel(model, device_id=cpu), ids)[0], want)
    model = FullyShardedDataParallel(make("llama_gqa").train(), device_id=cpu, use_orig_params=True)
    with kvpatch.patched(model, "h2o", 0.3):
        assert torch.equal(gradients(model, ids)[0], want)
