"""Supervised fine-tuning with TRL under a budget, and the loss of held-out text under it and with the full cache.

    python -m examples.sft_under_budget
    python -m examples.sft_under_budget --model llama-python-1 --steps 50

With `block=` a training forward evicts as it reads. TRL's SFTTrainer is used as it is: each row is a prompt and a completion,
and the loss counts the completion alone. A callback reports both losses at each evaluation. Made with TRL 1.16.0 and
transformers 5.23.0.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import transformers
import typer
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

import kvpatch
from examples.train_with_trainer import rows
from tools.training import tasks


class Losses(TrainerCallback):
    """The loss of held-out text at each evaluation, under the budget and with the full cache.

    It holds the model's patch, which it takes off and puts on again to measure without: `budget` are patched()'s arguments.
    """

    def __init__(self, model: Any, **budget: Any) -> None:
        self.model, self.budget, self.found = model, budget, list[dict[str, float]]()
        self.patch = kvpatch.patch(model, **budget)

    def on_evaluate(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **others: Any) -> None:
        under = self._loss(eval_dataloader)
        self.patch.remove()
        try:
            full = self._loss(eval_dataloader)
        finally:
            self.patch = kvpatch.patch(self.model, **self.budget)
        self.found.append({"step": state.global_step, "budget": under, "full": full})
        print(f"step {state.global_step}: held-out loss {under:.4f} under the budget, {full:.4f} with the full cache")

    @torch.no_grad()
    def _loss(self, batches: Any) -> float:
        """Nats per token that has a label."""
        training, total, count = self.model.training, 0.0, 0
        self.model.eval()
        for batch in batches:
            given = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask", "labels")}
            labelled = int((given["labels"][:, 1:] != -100).sum())
            total, count = total + labelled * float(self.model(**given, use_cache=False).loss), count + labelled
        self.model.train(training)
        return total / count


def train(model: Any, tokenizer: Any, data: list[dict[str, Any]], folder: str, losses: Losses, **options: Any) -> SFTTrainer:
    """Train on all rows but the first 8; on_evaluate is called before, in the middle and at the end."""
    asked: dict[str, Any] = {"per_device_train_batch_size": 4, "seed": 1, "use_cpu": True, "bf16": False, "logging_steps": 1}
    asked |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "steps", "eval_on_start": True}
    settings = SFTConfig(folder, **{**asked, "completion_only_loss": True, "packing": False, **options})
    read, held_out = Dataset.from_list(data[8:]), Dataset.from_list(data[:8])
    trainer = SFTTrainer(
        model, settings, train_dataset=read, eval_dataset=held_out, processing_class=tokenizer, callbacks=[losses]
    )
    trainer.train()
    return trainer


def pairs(tokenizer: Any, prompt: int = 32) -> list[dict[str, Any]]:
    """Rows of the source of a module as prompt and completion, in tokens."""
    return [{"input_ids": row["input_ids"], "completion_mask": _mask(row["input_ids"], prompt)} for row in rows(tokenizer)]


def _mask(ids: list[int], prompt: int) -> list[int]:
    return [int(column >= prompt) for column in range(len(ids))]


def main(
    model: Annotated[str, typer.Option(help="a shipped model")] = "llama-python",
    policy: Annotated[str, typer.Option(help="any of `kvpatch policies`")] = "window",
    k: Annotated[float, typer.Option(help="the budget")] = 0.25,
    block: Annotated[int, typer.Option(help="tokens between evictions")] = 8,
    steps: Annotated[int, typer.Option(help="of training")] = 20,
    learning_rate: Annotated[float, typer.Option(help="falls to 0")] = 5e-4,
) -> list[dict[str, float]]:
    """Fine-tune under the budget, and print both losses of held-out text as it goes."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    net, tokenizer = tasks.load(model)
    losses = Losses(net, policy=policy, k=k, block=block)
    try:
        with TemporaryDirectory() as folder:
            options = {"max_steps": steps, "eval_steps": max(1, steps // 2), "learning_rate": learning_rate}
            train(net, tokenizer, pairs(tokenizer), folder, losses, **options)
    finally:
        losses.patch.remove()
    return losses.found


if __name__ == "__main__":
    typer.run(main)
