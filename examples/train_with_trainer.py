"""A transformers Trainer inside the block: it trains as outside, bit for bit, and what it samples on the way has a budget.

    python -m examples.train_with_trainer
    python -m examples.train_with_trainer --model llama-python-1 --steps 50

Without `block=` a training forward runs the model's own code: losses, gradients and checkpoints are those of the unpatched
model. What is generated inside the block, here by a callback in the middle of training, is generated under the budget.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from transformers import Trainer, TrainerCallback, TrainingArguments

import kvpatch
from tools.training import tasks


def rows(tokenizer: Any, module: str = "textwrap", length: int = 64) -> list[dict[str, Any]]:
    """The source of a module of Python's library, cut into rows."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    ids = tokenizer(Path(spec.origin).read_text(encoding="utf-8")).input_ids
    starts = range(0, len(ids) - length, length)
    return [{"input_ids": ids[start : start + length], "labels": ids[start : start + length]} for start in starts]


class Samples(TrainerCallback):
    """Writes on from a prompt every few steps."""

    def __init__(self, prompt: torch.Tensor, every: int) -> None:
        self.prompt, self.every, self.texts = prompt, every, []  # type: ignore[var-annotated]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            model.eval()
            self.texts.append(model.generate(self.prompt, max_new_tokens=16, do_sample=False, pad_token_id=2)[0])
            model.train()


def train(model: Any, data: list[dict[str, Any]], folder: str, callbacks: list[Any], **options: Any) -> Trainer:
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4, "logging_steps": 1, "seed": 1, "use_cpu": True}
    arguments |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no", **options}
    settings = TrainingArguments(folder, **arguments)
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    trainer.train()
    return trainer


def main(
    model: Annotated[str, typer.Option(help="a shipped model")] = "llama-python",
    policy: Annotated[str, typer.Option(help="any of `kvpatch policies`")] = "h2o",
    k: Annotated[float, typer.Option(help="the budget")] = 0.25,
    steps: Annotated[int, typer.Option(help="of training")] = 4,
) -> dict[str, Any]:
    """Train twice, outside the block and inside, and compare."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for where in ("outside", "inside"):
        net, tokenizer = tasks.load(model)
        data = rows(tokenizer)
        samples = Samples(torch.tensor([data[0]["input_ids"]]), every=2)
        with TemporaryDirectory() as folder, kvpatch.patched(net, policy, k) if where == "inside" else nullcontext() as patch:
            trainer = train(net, data, folder, [samples], max_steps=steps)
            loss = trainer.evaluate()["eval_loss"]
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found[where] = {"losses": losses, "eval_loss": loss, "weights": net.state_dict(), "texts": samples.texts}
        print(f"{where:8} losses {losses}, evaluation {loss}")
        if patch is not None:
            found["held"] = patch.report().held()
            print(f"sampled under the budget: {tokenizer.decode(samples.texts[-1][-16:])!r}\n{patch.report()}")
    mine, theirs = found["inside"]["weights"], found["outside"]["weights"]
    found["same weights"] = all(torch.equal(mine[name], theirs[name]) for name in theirs)
    print(f"weights are the same, bit for bit: {found['same weights']}")
    return found


if __name__ == "__main__":
    typer.run(main)
