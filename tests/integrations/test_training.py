"""Training inside the block: without `block=` it is training outside it, bit for bit; with it, a model learns to live with its
evictions. The examples run as their users would run them, on less."""

import hashlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

import kvpatch
from examples import finetune_table, finetune_under_budget, rollouts_under_budget, train_with_trainer
from tests.helpers.tiny import make, prompt
from tests.integrations.test_peft import gradients

REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
LATEST = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SOURCE = Path(__file__).read_text()


def trainer(model, folder, **options):
    data = [{"input_ids": row, "labels": row} for row in prompt(16, 24)]
    options = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", **options}
    options |= {"report_to": [], "use_cpu": True, "seed": 1, "disable_tqdm": True}
    arguments = TrainingArguments(folder, per_device_train_batch_size=2, **options)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])


def history(trainer):
    """Losses and gradient norms of every step, and the losses of evaluations."""
    return [[line.get(key) for key in ("loss", "grad_norm", "eval_loss")] for line in trainer.state.log_history]


def same_weights(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_the_trainer_example():
    found = train_with_trainer.main(steps=2)
    inside, outside = found["inside"], found["outside"]
    assert found["same weights"] and inside["losses"] == outside["losses"] and inside["eval_loss"] == outside["eval_loss"]
    assert found["held"].eq(16).all(), "a quarter of the prompt's 64 tokens"
    assert not torch.equal(inside["texts"][0], outside["texts"][0])


@pytest.mark.parametrize("options", [REENTRANT, LATEST, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_a_trainer_run_is_bit_for_bit_the_same(name, options, tmp_path):
    runs = []
    for patching in (False, True):
        model = make(name)
        with kvpatch.patched(model, "h2o", 0.3) if patching else nullcontext():
            one = trainer(model, tmp_path, eval_strategy="steps", eval_steps=2, **options)
            one.train()
        runs.append((model, history(one)))
    (model, lines), (other, theirs) = runs
    assert lines == theirs and len(lines) == 7
    assert same_weights(model, other)


def files(folder):
    """Hashes of all files but training_args.bin, which names its folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "training_args.bin"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_checkpoints_of_the_block_are_those_of_the_model(tmp_path):
    """Saved inside and outside, and gone on with inside from what was saved there."""
    models = {}
    for where in ("outside", "inside"):
        model = make("llama_gqa")
        with kvpatch.patched(model, "h2o", 0.3) if where == "inside" else nullcontext():
            trainer(model, tmp_path / where, save_strategy="steps", save_steps=2).train()
            model.save_pretrained(tmp_path / where / "saved")
            keys = list(model.state_dict())
        models[where] = model
        assert keys == list(make("llama_gqa").state_dict())
    found, want = files(tmp_path / "inside"), files(tmp_path / "outside")
    assert found == want and {"saved/config.json", "checkpoint-4/model.safetensors"} <= set(found)
    assert not [path for path in (tmp_path / "inside").rglob("*") if path.is_file() and b"_kvpatch" in path.read_bytes()]
    resumed = make("llama_gqa", seed=1)
    with kvpatch.patched(resumed, "h2o", 0.3):
        trainer(resumed, tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "inside" / "checkpoint-2"))
    assert same_weights(resumed, models["outside"])


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_the_block_may_begin_and_end_in_the_middle_of_training(name):
    """With an evaluation and a sample in it: modes may change, and what is generated leaves no trace."""

    def run(patching):
        model, losses, patch = make(name).train(), [], None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        for step in range(5):
            ids = prompt(2, 20, seed=step)
            if patching and step == 1:
                patch = kvpatch.patch(model, "keyformer", 0.3)
            if step == 2:
                model.eval()
                model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
                with torch.no_grad():
                    losses.append(model(ids, labels=ids, use_cache=False).loss)
                model.train()
            if patching and step == 4:
                assert patch.report().held().eq(6).all()
                patch.remove()
            losses.append(model(ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, torch.stack(losses)

    (model, losses), (other, theirs) = run(True), run(False)
    assert torch.equal(losses, theirs) and same_weights(model, other)


@pytest.fixture
def fresh_accelerate():
    """What accelerate keeps for the whole process, the Trainer's included, is not this test's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("order", ["prepare, then patch", "patch, then prepare"])
def test_accelerate_prepares_the_model_before_or_after(order, fresh_accelerate):
    """In bfloat16 and with gradients accumulated over two batches."""

    def run(patching):
        model = make("llama_gqa").train()
        optimizer, early = torch.optim.SGD(model.parameters(), lr=0.1), order == "patch, then prepare"
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        if not early:
            model, optimizer = accelerator.prepare(model, optimizer)
        with kvpatch.patched(model, "h2o", 0.3) if patching else nullcontext():
            if early:
                model, optimizer = accelerator.prepare(model, optimizer)
            losses = []
            for seed in range(4):
                ids = prompt(2, 20, seed=seed)
                with accelerator.accumulate(model):
                    losses.append(model(ids, labels=ids).loss.detach())
                    accelerator.backward(model(ids, labels=ids).loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return accelerator.unwrap_model(model), torch.stack(losses)

    (model, losses), (other, theirs) = run(True), run(False)
    assert torch.equal(losses, theirs) and same_weights(model, other)


@pytest.mark.slow
def test_a_compiled_training_step_is_bit_for_bit_the_same():
    """Compiled outside the block, it may be used inside; and the other way round."""
    model, ids = make("llama_gqa", layers=1).train(), prompt(2, 20)
    outside = torch.compile(model, backend="aot_eager")
    want = gradients(outside, ids)
    with kvpatch.patched(model, "h2o", 0.3):
        used = gradients(outside, ids)
        inside = torch.compile(model, backend="aot_eager")
        made = gradients(inside, ids)
    for found in (used, made, gradients(inside, ids)):
        assert all(map(torch.equal, want, found))


def test_generating_in_training_mode_works_or_is_refused_in_words():
    ids = prompt(1, 20)
    options = {"max_new_tokens": 3, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    model = make("llama_gqa").train()
    want = torch.cat(model.generate(ids, **options).logits)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(torch.cat(model.generate(ids, **options).logits), want, atol=1e-5, rtol=0)
        model.gradient_checkpointing_enable()
        with pytest.raises(kvpatch.KVPatchError, match=r"gradient checkpointing.*call model\.eval\(\) before"):
            model.generate(ids, **options)
        model.eval()
        torch.testing.assert_close(torch.cat(model.generate(ids, **options).logits), want, atol=1e-5, rtol=0)
    dropping = make("gpt2").train()
    words = r"attention dropout of 0\.1.*call model\.eval\(\) to generate"
    with kvpatch.patched(dropping, "h2o", 0.5), pytest.raises(kvpatch.KVPatchError, match=words):
        dropping.generate(ids, **options)


@pytest.mark.slow
def test_fine_tuning_under_a_budget_at_small_size(tmp_path, monkeypatch):
    """On the text that it is measured on, so that a few steps show; the page is made of what was found."""
    monkeypatch.setattr(finetune_under_budget, "python_sources", lambda held_out: [SOURCE])
    lines, written = tmp_path / "runs.jsonl", tmp_path / "page.md"
    given = {"steps": 5, "rows": 2, "windows": 2, "learning_rate": 1e-3, "k": 0.2, "block": 32, "policy": "h2o"}
    (found,) = finetune_under_budget.main(models="llama-python", seeds=1, lines=lines, write=written, **given)
    assert len(found["losses of tuned"]) == 5
    mean = {arm: torch.tensor(found[arm]["block"]).mean() for arm in finetune_table.ARMS}
    assert mean["shipped"] > torch.tensor(found["shipped"]["full"]).mean() + 0.02, "the budget costs something"
    assert mean["tuned"] < mean["shipped"] - 0.1, "gradients flow through what is left"
    assert found["losses of tuned"][0] > found["losses of control"][0], "the control trains with its full cache"
    assert finetune_under_budget.main(models="llama-python", seeds=1, lines=lines, **given) == [found], "not run again"
    assert f"{torch.tensor(found['tuned']['block']).mean():.3f}" in written.read_text()


def test_the_rollouts_example():
    """The learner's probabilities are those that the tokens were drawn with, also after the weights have changed."""
    found = rollouts_under_budget.main(steps=2)
    assert all(replayed < 1e-4 and dense > 1e-2 for _, replayed, dense in found)
