"""TRL's trainers inside the block, with their own code: GRPO with rollouts under a budget, fine-tuning with `block=`."""

import json

import pytest
import torch
from datasets import Dataset

import kvpatch

pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer

from examples import grpo_under_budget, sft_under_budget
from tools.evidence import grpo_table
from tools.training import tasks

SMALL = {"model": "llama-1", "policy": "window", "k": 0.5, "steps": 2, "length": 16, "new": 8, "group": 4, "prompts": 2}
REPLAY = "budget, replay"


def test_the_grpo_example(tmp_path, capsys):
    """The learner's probabilities are those of the rollout in a replay, and visibly not with full attention."""
    asked = {name: SMALL[name] for name in ("policy", "k", "steps", "length", "new", "group")}
    lines = tmp_path / "runs.jsonl"
    found = grpo_under_budget.main(model="llama-1", seeds=1, prompts_per_step=2, learning_rate=1e-3, lines=lines, **asked)
    full, dense, replayed = found
    for one in (full, replayed):
        assert abs(one["ratio"] - 1) < 1e-5 and one["least"] > 1 - 1e-4 and one["most"] < 1 + 1e-4
    assert abs(dense["ratio"] - 1) > 0.05 and dense["least"] < 0.5
    assert replayed["bytes"] == dense["bytes"] < full["bytes"]
    assert f"| {REPLAY} | {replayed['ratio']:.6f} |" in grpo_table.table(grpo_table.read(lines, "window"))
    assert [json.loads(line) for line in lines.read_text().splitlines()] == found
    again = grpo_under_budget.main(model="llama-1", seeds=1, prompts_per_step=2, learning_rate=1e-3, lines=lines, **asked)
    assert again == found, "not run again"
    assert capsys.readouterr().out.count("| difference, paired by seed |") == 2, "the table is printed"


MORE = [{"gradient_checkpointing": True}, {"num_iterations": 2}, {"steps_per_generation": 2}]


@pytest.mark.parametrize("extra", MORE, ids=str)
def test_the_replay_of_grpo_goes_on_until_the_next_rollout(extra):
    """Recomputed layers, old log-probabilities and a rollout used twice are replayed too: nothing is learned at rate 0."""
    found = grpo_under_budget.train(REPLAY, 0, {**SMALL, "steps": 4, "learning_rate": 0.0}, **extra)
    assert abs(found["ratio"] - 1) < 1e-5 and found["least"] > 1 - 1e-4 and found["most"] < 1 + 1e-4


def replayed(net, tokenizer, folder, replaying=True, **extra):
    """Weights after two steps of a GRPOTrainer with its own generation, whose loss is of a replay."""
    asked = grpo_under_budget.prompts(1, 8, 16)
    options = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "seed": 0}
    options |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True, **extra}
    with kvpatch.patched(net, "window", 0.5, record=True) as patch:

        class Replayed(GRPOTrainer):
            def compute_loss(self, *args, **options):
                with patch.replay(patch.record()):
                    return super().compute_loss(*args, **options)

        data = Dataset.from_dict({"prompt": tokenizer.batch_decode(asked), "items": asked[:, 1:-1].tolist()})
        arguments = GRPOConfig(str(folder), learning_rate=1e-3, **options)
        trainer = (Replayed if replaying else GRPOTrainer)(net, grpo_under_budget.said, arguments, data, None, tokenizer)
        trainer.train()
    return net.state_dict()


def test_the_loss_of_trls_own_rollouts_is_replayed_with_checkpointing_too(tmp_path):
    """The backward pass runs outside the replay, and computes layers again there."""
    runs = {}
    for name, replaying, checkpointing in (("plain", True, False), ("again", True, True), ("dense", False, False)):
        runs[name] = replayed(*tasks.load("llama-1"), tmp_path, replaying, gradient_checkpointing=checkpointing)
    torch.testing.assert_close(runs["again"], runs["plain"], atol=1e-6, rtol=0)
    assert any((runs["dense"][key] - runs["plain"][key]).abs().max() > 1e-4 for key in runs["plain"])


def test_the_sft_example():
    found = sft_under_budget.main(steps=4)
    assert [one["step"] for one in found] == [0, 2, 4]
    assert found[0]["budget"] > found[0]["full"] + 0.05, "the budget costs something"
    assert found[-1]["budget"] < found[0]["budget"] - 0.05


def test_sft_counts_the_completion_alone_and_feels_the_budget(tmp_path):
    """TRL's figure is the cross entropy of the completions' tokens in a pass under the budget."""
    net, tokenizer = tasks.load("llama-python")
    losses = sft_under_budget.Losses(net, policy="window", k=0.25, block=8)
    data = sft_under_budget.pairs(tokenizer)
    trainer = sft_under_budget.train(net, tokenizer, data, str(tmp_path), losses, max_steps=1, eval_steps=1, learning_rate=0.0)
    ids = torch.tensor([row["input_ids"] for row in data[:8]])
    with torch.no_grad():
        logits = net.eval()(ids, use_cache=False).logits[:, 31:-1]
        want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 32:].flatten()).item()
    losses.patch.remove()
    reported = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert reported == pytest.approx([want, want], abs=1e-4)
    assert [one["budget"] for one in losses.found] == pytest.approx([want, want], abs=1e-4)
    assert losses.found[0]["full"] < want - 0.05


def test_sft_refuses_packing_of_texts_that_must_not_see_each_other(tmp_path):
    for options in ({"packing": True}, {"padding_free": True}):
        net, tokenizer = tasks.load("llama-python")
        losses = sft_under_budget.Losses(net, policy="window", k=0.25, block=8)
        data = sft_under_budget.pairs(tokenizer)
        options |= {"max_length": 128 if "packing" in options else None, "max_steps": 1}
        options |= {"eval_strategy": "no", "eval_on_start": False}
        with pytest.raises(kvpatch.KVPatchError, match="several texts are packed into one"):
            sft_under_budget.train(net, tokenizer, data, str(tmp_path), losses, **options)
        losses.patch.remove()


def test_sft_of_wrapped_rows(tmp_path):
    """Rows that are cut from one stream of texts are ordinary rows."""
    net, tokenizer = tasks.load("llama-python")
    losses = sft_under_budget.Losses(net, policy="window", k=0.25, block=8)
    options = {"packing": True, "packing_strategy": "wrapped", "max_length": 96, "max_steps": 1, "eval_strategy": "no"}
    options["completion_only_loss"] = False
    rows = [{"input_ids": row["input_ids"]} for row in sft_under_budget.pairs(tokenizer)]
    trainer = sft_under_budget.train(net, tokenizer, rows, str(tmp_path), losses, eval_on_start=False, **options)
    losses.patch.remove()
    assert len(trainer.train_dataset[0]["input_ids"]) == 96
