"""Data-parallel training in several processes, with and without a budget.

    torchrun --nproc-per-node 2 -m examples.train_ddp
    torchrun --nproc-per-node 2 -m examples.train_ddp --block 8

Each process patches its own copy of the model, before DistributedDataParallel wraps it or after. Without `--block` the
losses and weights are those of the unpatched run, bit for bit; with it every process reads its rows under the budget.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import kvpatch
from examples.train_with_trainer import rows
from tools.training import tasks

WAYS = ("unpatched", "wrapped, then patched", "patched, then wrapped")


def train(model: Any, data: torch.Tensor, steps: int, accumulate: int = 2) -> list[float]:
    """Losses of this process; gradients are averaged over all processes, once for every `accumulate` batches."""
    ours = data[dist.get_rank() :: dist.get_world_size()]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps * accumulate):
        ids_BT = ours[2 * step : 2 * step + 2]
        last = (step + 1) % accumulate == 0
        with nullcontext() if last else model.no_sync():
            loss = model(input_ids=ids_BT, labels=ids_BT).loss
            (loss / accumulate).backward()
        losses.append(loss.item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def run(name: str, how: str, policy: str, k: float, block: int | None, steps: int) -> dict[str, Any]:
    """One training run, `how` one of WAYS."""
    model, tokenizer = tasks.load(name)
    data = torch.tensor([row["input_ids"] for row in rows(tokenizer, length=32)])
    model.train()
    if how == "unpatched":
        losses = train(DistributedDataParallel(model), data, steps)
    elif how == "patched, then wrapped":
        with kvpatch.patched(model, policy, k, block=block):
            losses = train(DistributedDataParallel(model), data, steps)
    else:
        wrapped = DistributedDataParallel(model)
        with kvpatch.patched(wrapped, policy, k, block=block):
            losses = train(wrapped, data, steps)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"how": how, "losses": losses, "weights": weights}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-python", help="a shipped model")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("-k", type=float, default=0.25)
    parser.add_argument("--block", type=int, help="evict in training too, after every so many tokens")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo")
    found = [run(args.model, how, args.policy, args.k, args.block, args.steps) for how in WAYS]
    for one in found:
        same, total = torch.equal(one["weights"], found[0]["weights"]), one["weights"].double().sum().item()
        line = {"how": one["how"], "rank": dist.get_rank(), "losses": one["losses"], "same weights": same, "sum": total}
        lines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, line)
        if dist.get_rank() == 0:  # one process writes, so that lines stay whole
            for line in lines:
                print(json.dumps(line | {"processes agree": len({each["sum"] for each in lines}) == 1}), flush=True)
    dist.barrier()  # none leaves while another still talks to it
    if started:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
