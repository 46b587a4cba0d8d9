"""Fine-tune a model under the budget that it will be used with, so that it learns to live with its evictions.

    python -m examples.finetune_under_budget                          # one shipped model, one seed
    python -m examples.finetune_under_budget --models all --seeds 3 --write docs/finetuning.md

With `block=` a training forward evicts as it reads, and gradients flow through what is left. Three arms are compared on
text that none has read: the shipped model, a control that takes the same steps on the same rows with its full cache, and
the model that took them under the budget. Dimension key: B rows, T tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from torch import Tensor

import kvpatch
from examples.finetune_table import page, short
from kvpatch.evaluation.teacher_forcing import feed, widen
from kvpatch.policies.budgets import share
from tools.training import tasks
from tools.training.text import TEXT_LENGTH, python_sources, text_rows, text_stream

ALL = ("llama-python", "llama-python-1", "llama-python-2")
ARMS = ("shipped", "control", "tuned")
COUNTED = TEXT_LENGTH // 2
"""Tokens at the end of each window whose loss is measured."""


def finetune(model: Any, rows: Iterator[Tensor], steps: int, learning_rate: float) -> list[float]:
    """A training loop as anyone would write it; the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0), []
    model.train()
    for step in range(steps):
        ids_BT = next(rows)
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def nats(model: Any, ids_BT: Tensor, way: str) -> Tensor:
    """Cross entropy of the last `COUNTED` tokens, [B,C], under whatever patch is in force.

    way: "token" reads the others as a prompt and these one by one; "block" reads all in one pass, which a patch may cut.
    """
    n = ids_BT.shape[1] - COUNTED
    if way == "token":
        logits_BCV = feed(model, ids_BT[:, :-1], n).logits_BSV
    else:
        logits_BCV = model(ids_BT, use_cache=False, logits_to_keep=COUNTED + 1).logits[:, :-1]
    return F.cross_entropy(widen(logits_BCV).mT, ids_BT[:, n:], reduction="none")


def measure(model: Any, held_BT: Tensor, policy: str, k: float, block: int) -> dict[str, list[float]]:
    """Nats per token of each window's end: with the full cache, and under the budget read in blocks or token by token."""
    tokens = max(1, share(k, held_BT.shape[1]))
    found = {"full": nats(model, held_BT, "block").mean(1).tolist()}
    with kvpatch.patched(model, policy, tokens, block=block):
        found["block"] = nats(model, held_BT, "block").mean(1).tolist()
    with kvpatch.patched(model, policy, tokens, schedule="both"):
        found["token"] = nats(model, held_BT, "token").mean(1).tolist()
    return found


def run(name: str, seeds: list[int], given: dict[str, Any], policy: str, k: float, block: int) -> Iterator[dict[str, Any]]:
    """All arms of one model for each seed of the training rows: nats of every window, and the losses of training."""
    model, tokenizer = tasks.load(name)
    read, held = (text_stream(tokenizer, python_sources(held_out)) for held_out in (False, True))
    starts = torch.linspace(0, len(held) - TEXT_LENGTH, given["windows"]).long().tolist()
    held_BT = text_rows(held, starts, tokenizer.bos_token_id)
    shipped = measure(model, held_BT, policy, k, block)
    for seed in seeds:
        found = {"model": name, "seed": seed, "policy": policy, "k": k, "block": block, **given, "shipped": shipped}
        for arm in ARMS[1:]:
            model, _ = tasks.load(name)
            rows = batches(read, tokenizer.bos_token_id, given["rows"], seed)
            with kvpatch.patched(model, policy, k, block=block) if arm == "tuned" else nullcontext():
                found[f"losses of {arm}"] = finetune(model, rows, given["steps"], given["learning_rate"])
            found[arm] = measure(model, held_BT, policy, k, block)
        yield found


def batches(stream: Tensor, bos: int, rows: int, seed: int) -> Iterator[Tensor]:
    """Rows [B,T] from anywhere in the text; both arms of a seed read the same."""
    rng = random.Random(seed)
    while True:
        yield text_rows(stream, [rng.randrange(len(stream) - TEXT_LENGTH) for _ in range(rows)], bos)


def main(
    models: Annotated[str, typer.Option(help="shipped models that read Python, or `all`")] = ALL[0],
    seeds: Annotated[int, typer.Option(help="how many orders of the training rows")] = 1,
    policy: Annotated[str, typer.Option(help="any of `kvpatch policies`")] = "window",
    k: Annotated[float, typer.Option(help="the budget, a share of each row")] = 0.2,
    block: Annotated[int, typer.Option(help="tokens between evictions")] = 16,
    steps: Annotated[int, typer.Option(help="of fine-tuning")] = 80,
    rows: Annotated[int, typer.Option(help="rows of 256 tokens per step")] = 4,
    learning_rate: Annotated[float, typer.Option(help="falls to 0")] = 7e-4,
    windows: Annotated[int, typer.Option(help="of held-out text to measure with")] = 32,
    lines: Annotated[Path | None, typer.Option(help="add the runs to this file; those it has are not run again")] = None,
    write: Annotated[Path | None, typer.Option(help="write the page, here and to this file")] = None,
) -> list[dict[str, Any]]:
    """Fine-tune under a budget, beside a control, and say what it brought."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines and lines.exists() else []
    given = {"steps": steps, "rows": rows, "learning_rate": learning_rate, "windows": windows}
    setting = {"policy": policy, "k": k, "block": block, **given}
    done = [one for one in done if setting.items() <= one.items()]
    for name in ALL if models == "all" else models.split(","):
        ready = {one["seed"] for one in done if one["model"] == name}
        wanted = [seed for seed in range(seeds) if seed not in ready]
        for found in run(name, wanted, given, policy, k, block) if wanted else ():
            done.append(found)
            typer.echo(short(found))
            if lines:
                with lines.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    if write:
        write.write_text(page(done))
    return done


if __name__ == "__main__":
    typer.run(main)
