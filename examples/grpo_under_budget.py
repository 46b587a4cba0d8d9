"""GRPO with TRL under a budget: rollouts with a part of the KV cache, and a learner that replays them.

    python -m examples.grpo_under_budget                                # one seed of each arm, small
    python -m examples.grpo_under_budget --seeds 5 --lines docs/grpo.jsonl

TRL's GRPOTrainer is used as it is: generate() runs inside the block, in TRL's hook for rollouts, and the passes of its learner
follow the record. Three arms are compared from the same weights, on the same prompts: rollouts and learner with the full cache;
rollouts under the budget and a learner with full attention; rollouts under the budget and a replay. A prompt is a list of
distinct tokens, and the reward is the share of the new tokens that say one of it, each counted once: the shipped models do this
with their full cache, and under the budget much of the list is evicted when it is asked for.

Made with TRL 1.16.0 and transformers 5.23.0. `python -m tools.docs_tables` writes the table of docs/guides/train.md.
"""

from __future__ import annotations

import copy
import json
import random
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import transformers
import typer
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

import kvpatch
from kvpatch import EvictingCache
from tools.evidence.grpo_table import ARMS, table
from tools.training import tasks


class Rollouts:
    """TRL's `rollout_func`: generates, and lets the passes of the learner follow the record until the next rollout.

    patch: of the model, or None. replaying: follow the record. Notes the seconds of each rollout, and the bytes of keys and
    values of a row at its end.
    """

    def __init__(self, patch: kvpatch.Patch | None, replaying: bool) -> None:
        self.patch, self.replaying, self.following = patch, replaying, ExitStack()
        self.seconds, self.kv_bytes = list[float](), list[float]()

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.following.close()
        asked = trainer.processing_class(prompts, return_tensors="pt", padding=True, padding_side="left")
        asked = {name: asked[name].to(trainer.accelerator.device) for name in ("input_ids", "attention_mask")}
        model, start = trainer.accelerator.unwrap_model(trainer.model).eval(), time.perf_counter()
        how = copy.deepcopy(trainer.generation_config)
        how.update(output_scores=True, return_dict_in_generate=True)
        with torch.no_grad():
            out = model.generate(**asked, generation_config=how)
        self.seconds.append(time.perf_counter() - start)
        self.kv_bytes.append(held_bytes(out.past_key_values) / len(prompts))
        model.train()
        if self.patch is not None and self.replaying:
            self.following.enter_context(self.patch.replay(self.patch.record()))
        chosen = out.sequences[:, asked["input_ids"].shape[1] :]
        drawn = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
        lengths = ends(chosen, trainer.eos_token_ids)
        return {
            "prompt_ids": [ids[real.bool()].tolist() for ids, real in zip(*asked.values(), strict=True)],
            "completion_ids": [ids[:n].tolist() for ids, n in zip(chosen, lengths, strict=True)],
            "logprobs": [row[:n].tolist() for row, n in zip(drawn, lengths, strict=True)],
        }


def ends(chosen: Tensor, stops: list[int]) -> list[int]:
    """Tokens of each row up to its first end of text, which is counted."""
    over = torch.isin(chosen, torch.tensor(stops, device=chosen.device))
    return torch.where(over.any(1), over.int().argmax(1) + 1, chosen.shape[1]).tolist()


def held_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values."""
    if isinstance(cache, EvictingCache):
        return cache.nbytes
    return sum(one.nbytes for layer in cache.layers for one in (layer.keys, layer.values))


class Measured(GRPOTrainer):
    """GRPOTrainer that notes, for each token, the ratio of its learner's probability and the one with which it was drawn."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ratios = list[Tensor]()

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        seen = list[Tensor]()
        hook = model.register_forward_hook(lambda module, given, out: seen.append(out.log_probs.detach()))
        try:
            loss = super().compute_loss(model, inputs, *args, **options)
        finally:
            hook.remove()
        drawn, real = inputs["sampling_per_token_logps"], inputs["completion_mask"].bool()
        self.ratios.append((seen[-1][:, -drawn.shape[1] :] - drawn).exp()[real].cpu())
        return loss


def prompts(seed: int, rows: int, length: int) -> Tensor:
    """Lists of distinct tokens and the token that asks for them again [rows, length + 2]."""
    return tasks.copy(random.Random(seed), rows, length=length).prompt_BT


def said(completion_ids: list[list[int]], items: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of the new tokens that say a token of the list, each counted once."""
    return [len(set(row) & set(wanted)) / max(1, len(row)) for row, wanted in zip(completion_ids, items, strict=True)]


def measure(model: Any, asked: Tensor, new: int, policy: str | None, k: float) -> float:
    """The mean reward of greedy texts on these prompts, under a budget or with the full cache."""
    model.eval()
    with kvpatch.patched(model, policy, k) if policy else nullcontext(), torch.no_grad():
        out = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=new)
    chosen = out[:, asked.shape[1] :]
    rows = [ids[:n].tolist() for ids, n in zip(chosen, ends(chosen, [tasks.EOS]), strict=True)]
    return sum(said(rows, asked[:, 1:-1].tolist())) / len(rows)


def train(arm: str, seed: int, given: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Train one arm: its ratios, rewards, bytes and seconds. extra: more of GRPOConfig, such as gradient_checkpointing."""
    policy, k, length, new = (given[name] for name in ("policy", "k", "length", "new"))
    model, tokenizer = tasks.load(given["model"])
    asked, held_out = prompts(seed + 1, given["steps"] * given["prompts"], length), prompts(0, 64, length)
    data = Dataset.from_dict({"prompt": tokenizer.batch_decode(asked), "items": asked[:, 1:-1].tolist()})
    found: dict[str, Any] = {"arm": arm, "seed": seed, **given, "before": measure(model, held_out, new, policy, k)}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        options: dict[str, Any] = {"learning_rate": given["learning_rate"], "max_steps": given["steps"], "seed": seed}
        options |= {"per_device_train_batch_size": given["prompts"] * given["group"], "num_generations": given["group"]}
        options |= {"max_completion_length": new, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, **extra}
        options |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
        recording = arm == "budget, replay"
        patch = None if arm == "full cache" else stack.enter_context(kvpatch.patched(model, policy, k, record=recording))
        rollouts = Rollouts(patch, recording)
        stack.callback(rollouts.following.close)
        trainer = Measured(model, said, GRPOConfig(folder, **options), data, None, tokenizer, rollout_func=rollouts)
        trainer.train()
    ratios = torch.cat(trainer.ratios)
    found |= {"ratio": ratios.mean().item(), "least": ratios.min().item(), "most": ratios.max().item()}
    found |= {"budget": measure(model, held_out, new, policy, k), "full": measure(model, held_out, new, None, k)}
    found |= {"bytes": rollouts.kv_bytes[-1], "seconds": sum(rollouts.seconds) / len(rollouts.seconds)}
    return found


def main(
    model: Annotated[str, typer.Option(help="a shipped model of the synthetic tasks")] = "llama-1",
    policy: Annotated[str, typer.Option(help="any of `kvpatch policies`")] = "window",
    k: Annotated[float, typer.Option(help="the budget, a share of the prompt")] = 0.5,
    seeds: Annotated[int, typer.Option(help="runs of each arm")] = 1,
    steps: Annotated[int, typer.Option(help="of the optimizer")] = 60,
    length: Annotated[int, typer.Option(help="tokens of the list")] = 32,
    new: Annotated[int, typer.Option(help="tokens that are generated")] = 16,
    prompts_per_step: Annotated[int, typer.Option(help="prompts of each step")] = 8,
    group: Annotated[int, typer.Option(help="rollouts of each prompt")] = 8,
    learning_rate: Annotated[float, typer.Option(help="falls to 0")] = 3e-4,
    lines: Annotated[Path | None, typer.Option(help="add the runs to this file; those it has are not run again")] = None,
) -> list[dict[str, Any]]:
    """Train each arm, print a line for each run, and the table of all with intervals over seeds."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    given = {"model": model, "policy": policy, "k": k, "steps": steps, "length": length, "new": new, "group": group}
    given |= {"prompts": prompts_per_step, "learning_rate": learning_rate}
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines and lines.exists() else []
    done = [one for one in done if given.items() <= one.items()]
    ready = {(one["arm"], one["seed"]) for one in done}
    for seed in range(seeds):
        for arm in [arm for arm in ARMS if (arm, seed) not in ready]:
            done.append(train(arm, seed, given))
            shown = {name: round(value, 4) for name, value in done[-1].items() if isinstance(value, float)}
            typer.echo(f"{arm}, seed {seed}: {shown}")
            if lines:
                with lines.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    typer.echo(table([one for one in done if one["seed"] < seeds]))
    return done


if __name__ == "__main__":
    typer.run(main)
