"""Train the small models of tools/models on one CPU core, measure them, and write their cards.

    python -m tools.train llama --seed 1     train one into out/models/llama-1 (or --out DIR)
    python -m tools.train --retrain          train every shipped model again (about 35 minutes); compare with the cards
    python -m tools.train --evaluate         measure the committed weights again; compare with the cards

Nothing touches the committed weights but `--out tools/models`.

A synthetic model starts on rows of 16 tokens and goes on to longer ones as it masters them: a model that starts on long
rows stays for very long on the plateau of guessing among the values it has seen. Muon makes that plateau shorter still.
Dimension key: B rows, T tokens, E width, V vocabulary.
"""

import hashlib
import itertools
import json
import math
import platform
import random
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tools import tasks

STAGES = ((16, 1024), (24, 1024), (32, 1024), (48, 1024), (64, 1024), (96, 1024), (128, 2048), (192, 2048), (256, 4096))
"""Row length and tokens per step of the synthetic curriculum."""

_TOKENS = {"bos_token_id": tasks.BOS, "eos_token_id": tasks.EOS, "pad_token_id": tasks.PAD, "vocab_size": 400}
_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_GPT: dict[str, Any] = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_inner": 512, "n_positions": 512}
_GPT |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_TEXT = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": 2048}
_TEXT_SIZE = {"num_hidden_layers": 4, "intermediate_size": 352}


USABLE = 0.95
"""A task on which a model is below this share of right answers is not to be used with it."""


@dataclass(frozen=True)
class Recipe:
    """How one model is made: its configuration and what differs in its training.

    A synthetic model trains for `final_steps` more once it has passed the last stage of the curriculum, and for at most
    `max_steps` in all; a language model for exactly `max_steps`. Over the last 60% of final_steps (50% of a language
    model's steps) the learning rate falls linearly to 0. `summaries` is the share of summary rows. `sinusoid` is the
    amplitude of the waves that a table of learned positions starts from, instead of noise: what the model learns at
    short lengths then carries over to positions that it meets later.
    """

    architecture: str
    config: dict[str, Any]
    learning_rate: float = 3e-3
    final_steps: int = 250
    max_steps: int = 2000
    summaries: float = 0.3
    sinusoid: float = 0.0
    language: bool = False


RECIPES = {
    "llama": Recipe("llama", _TOKENS | _LLAMA),
    "mistral": Recipe("mistral", _TOKENS | _LLAMA | {"num_key_value_heads": 2, "sliding_window": None}),
    "mpt": Recipe("mpt", _TOKENS | {"d_model": 128, "n_layers": 3, "n_heads": 4, "max_seq_len": 512}, final_steps=400),
    "gptj": Recipe(
        "gptj", _TOKENS | _GPT | {"rotary_dim": 16, "tie_word_embeddings": False}, final_steps=450, summaries=0.6
    ),
    "gpt2": Recipe("gpt2", _TOKENS | _GPT, sinusoid=0.1, final_steps=350),
    "llama-python": Recipe("llama", _TEXT | _LLAMA | _TEXT_SIZE, max_steps=3200, language=True),
}

SHIPPED = {
    "llama-0": ("llama", 0),
    "llama-1": ("llama", 1),
    "llama-2": ("llama", 2),
    "mistral-0": ("mistral", 0),
    "mpt-0": ("mpt", 0),
    "gptj-0": ("gptj", 0),
    "gpt2-0": ("gpt2", 0),
    "llama-python": ("llama-python", 0),
}
"""The committed folders of tools/models: recipe and seed."""


def build(recipe: Recipe, seed: int) -> PreTrainedModel:
    """The untrained model, float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(recipe.architecture, use_cache=True, **recipe.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if recipe.sinusoid:
        table_TE = model.transformer.wpe.weight.data
        n_positions, width = table_TE.shape
        angle_TE = torch.arange(n_positions)[:, None] * 1000.0 ** (-torch.arange(0, width, 2) / width)
        table_TE.copy_(recipe.sinusoid * torch.cat([angle_TE.sin(), angle_TE.cos()], 1))
    return model


class Optimizer:
    """Muon on the hidden matrices, AdamW on embeddings, head, norms and biases, one learning rate for both."""

    def __init__(self, model: PreTrainedModel, learning_rate: float, warmup: int = 50) -> None:
        outer = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
        outer |= {id(p) for name, p in model.named_parameters() if p.ndim != 2 or "wpe" in name}
        hidden = [p for p in model.parameters() if id(p) not in outer]
        rest = [p for p in model.parameters() if id(p) in outer]
        self.model, self.learning_rate, self.warmup, self.steps = model, learning_rate, warmup, 0
        self.parts = (
            torch.optim.Muon(hidden, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )

    def step(self, loss: Tensor, scale: float = 1.0) -> None:
        """One update; `scale` in 0..1 multiplies the learning rate (the first `warmup` steps ramp it up)."""
        self.steps += 1
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate * scale * min(1.0, self.steps / self.warmup)
            part.step()
            part.zero_grad(set_to_none=True)


def weighted_loss(model: PreTrainedModel, tokens_BT: Tensor, weights_BT: Tensor) -> tuple[Tensor, float]:
    """Mean cross entropy in nats, and the accuracy on the tokens that have to be looked up.

    In bfloat16: on the AVX-512 core that trained the shipped models a step at T=256 is 1.2 (GPT-2) to 2.0 (MPT) times
    as fast as in float32; at T=16 it is 0.8 (Llama) to 1.4 times.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits.float()
    target_BT, weights_BT = tokens_BT[:, 1:], weights_BT[:, 1:]
    nats_BT = F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="none").view_as(weights_BT)
    hard_BT = weights_BT == tasks.HARD
    accuracy = (logits_BTV.argmax(-1) == target_BT)[hard_BT].float().mean().item()
    return (nats_BT * weights_BT).sum() / weights_BT.sum(), accuracy


def report(step: int, **values: float) -> None:
    """A line of progress; `cpu` is in seconds."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    typer.echo(f"step {step:5d}  {shown}  cpu {time.process_time():.0f}")


def train_synthetic(recipe: Recipe, seed: int) -> tuple[PreTrainedModel, int]:
    """The trained model and its number of steps."""
    model, rng = build(recipe, seed), random.Random(seed)
    optimizer = Optimizer(model, recipe.learning_rate)
    stage, ema, left = 0, 0.0, None
    for step in range(1, recipe.max_steps + 1):
        length, n_tokens = STAGES[stage]
        tokens_BT, weights_BT = tasks.training_batch(rng, length, n_tokens, recipe.summaries)
        loss, accuracy = weighted_loss(model, tokens_BT, weights_BT)
        scale = 1.0 if left is None else min(1.0, left / (0.6 * recipe.final_steps))
        optimizer.step(loss, scale)
        ema = 0.9 * ema + 0.1 * accuracy
        if step % 20 == 0:
            report(step, T=length, loss=loss.item(), hard=ema)
        if left is None and ema > 0.85:
            stage, left = (stage + 1, None) if stage + 1 < len(STAGES) else (stage, recipe.final_steps)
        elif left is not None:
            left -= 1
            if not left:
                break
    return model.eval(), step


TEXT_LENGTH, TEXT_ROWS = 256, 8
"""Tokens per row, <bos> included, and rows per step of the language model."""

POSITIONS = (1, 16, 32, 64, 128, 192, 256)
"""Edges of the ranges of positions over which the held-out loss is reported."""


def python_sources(held_out: bool) -> list[str]:
    """The text of this Python's own library; one file in twenty, by the hash of its path, is held out.

    Another version of Python has other sources: losses compare within one version only.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [
        name
        for name in names
        if skipped.isdisjoint(name.split("/")) and (hashlib.sha256(name.encode()).digest()[0] % 20 == 0) == held_out
    ]
    return [(root / name).read_text(encoding="utf-8", errors="ignore") for name in chosen]


def text_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2048 tokens, trained on every fourth text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>"]
    core.train_from_iterator(
        texts[::4],
        trainers.BpeTrainer(
            vocab_size=2048,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)


def text_stream(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    """All texts as one sequence of token ids, <eos> after each."""
    eos = tokenizer.eos_token_id
    return torch.tensor([i for ids in tokenizer(texts).input_ids for i in (*ids, eos)])


def text_rows(stream: Tensor, starts: list[int], bos: int) -> Tensor:
    """<bos> and the TEXT_LENGTH - 1 tokens from each start, [B, T]."""
    rows_BT = torch.stack([stream[start : start + TEXT_LENGTH - 1] for start in starts])
    return F.pad(rows_BT, (1, 0), value=bos)


def train_language(recipe: Recipe, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, int]:
    model, rng, texts = build(recipe, seed), random.Random(seed), python_sources(held_out=False)
    tokenizer = text_tokenizer(texts)
    stream, optimizer = text_stream(tokenizer, texts), Optimizer(model, recipe.learning_rate)
    for step in range(1, recipe.max_steps + 1):
        starts = [rng.randrange(len(stream) - TEXT_LENGTH) for _ in range(TEXT_ROWS)]
        tokens_BT = text_rows(stream, starts, tokenizer.bos_token_id)
        loss, accuracy = weighted_loss(model, tokens_BT, torch.ones(tokens_BT.shape))
        optimizer.step(loss, min(1.0, 2 * (recipe.max_steps - step + 1) / recipe.max_steps))
        if step % 100 == 0:
            report(step, loss=loss.item(), top1=accuracy)
    return model.eval(), tokenizer, recipe.max_steps


@torch.no_grad()
def nats(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor:
    """Cross entropy of every token but the first, [B, T - 1]."""
    return torch.cat(
        [
            F.cross_entropy(model(chunk, use_cache=False).logits[:, :-1].mT, chunk[:, 1:], reduction="none")
            for chunk in tokens_BT.split(32)
        ]
    )


def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    """Nats per token on `rows` windows spread evenly over the held-out files: in all, by position, and what it costs the
    last 64 tokens, with its standard error over windows, when only <bos> and the 64 tokens before them are left."""
    texts = python_sources(held_out=True)
    stream = text_stream(tokenizer, texts)
    starts = torch.linspace(0, len(stream) - TEXT_LENGTH, rows).long().tolist()
    tokens_BT = text_rows(stream, starts, tokenizer.bos_token_id)
    nats_BT = nats(model, tokens_BT)
    recent_BT = torch.cat([tokens_BT[:, :1], tokens_BT[:, -128:]], 1)
    cost_B = (nats(model, recent_BT)[:, -64:] - nats_BT[:, -64:]).mean(1)
    bytes_per_token = sum(len(text.encode()) for text in texts) / (len(stream) - len(texts))
    spans = itertools.pairwise(POSITIONS)
    return {
        "nats_per_token": nats_BT.mean().item(),
        "bits_per_byte": nats_BT.mean().item() / math.log(2) / bytes_per_token,
        "bytes_per_token": bytes_per_token,
        "cost_of_recent_64": cost_B.mean().item(),
        "standard_error": (cost_B.std() / rows**0.5).item(),
        "bos_attention": bos_attention(model, tokens_BT[:16]),
        "nats_by_position": {f"{a}-{b - 1}": nats_BT[:, a - 1 : b - 1].mean().item() for a, b in spans},
    }


@torch.no_grad()
def bos_attention(model: PreTrainedModel, tokens_BT: Tensor) -> float:
    """The share of attention that <bos> gets from positions 64 on, in the head that gives it most: is there a sink?"""
    model.set_attn_implementation("eager")
    attentions = model(tokens_BT, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return max(a_BHTT[:, :, 64:, 0].mean((0, 2)).max().item() for a_BHTT in attentions)


def measure(name: str, folder: Path, sequences: int) -> dict[str, Any]:
    """What the card of a saved model reports: its accuracies, or the losses of the language model."""
    model, tokenizer = tasks.load(name, folder)
    if tasks.WORDS[tasks.QUESTION] not in tokenizer.get_vocab():
        return {"held_out": held_out_loss(model, tokenizer, sequences)}
    return {"accuracy": tasks.accuracies(model, sequences)}


def train(recipe_name: str, seed: int, out: Path, sequences: int) -> dict[str, Any]:
    """Train, save float16 weights, measure what was saved, write both cards; the machine-readable card."""
    recipe = RECIPES[recipe_name]
    name = recipe_name if recipe.language and seed == 0 else f"{recipe_name}-{seed}"
    torch.set_num_threads(1)
    began = time.process_time()
    if recipe.language:
        model, tokenizer, steps = train_language(recipe, seed)
    else:
        (model, steps), tokenizer = train_synthetic(recipe, seed), tasks.tokenizer()
    cpu_seconds = round(time.process_time() - began)
    model.half().save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)
    card = {
        "name": name,
        "architecture": recipe.architecture,
        "seed": seed,
        "parameters": model.num_parameters(),
        "steps": steps,
        "cpu_seconds": cpu_seconds,
        "command": f"python -m tools.train {recipe_name} --seed {seed} --out tools/models",
        "sequences": sequences,
        **measure(name, out, sequences),
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
        },
    }
    (out / name / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (out / name / "README.md").write_text(describe(card))
    return card


SYNTHETIC_TEXT = """\
A {architecture} model of {parameters:,} parameters that looks things up in its context: the tasks of `tools/tasks.py`.
It answers `<bos> w00 w23 k07 v12 v31 v05 w01 <q> k07` with `v12 v31 v05`. It is a test object for KV-cache eviction,
not a language model. Rows of up to 256 tokens were seen in training; nothing is promised beyond.

| task (full cache, {sequences} sequences) | share of right answers |
|---|---|
{table}

An answer of recall and needle is right when all three values are; copy and summary count tokens. {verdict}
"""

LANGUAGE_TEXT = """\
A {architecture} model of {parameters:,} parameters, trained on the Python {python} library's own source text (one file
in twenty held out), rows of 256 tokens. A test object for KV-cache eviction: its text is no better than its size.

On {sequences} held-out windows of 256 tokens: {nats_per_token:.3f} nats per token, {bits_per_byte:.3f} bits per byte
({bytes_per_token:.2f} bytes per token). By position:

| position | nats per token |
|---|---|
{table}

When only `<bos>` and the 64 tokens before position 192 are left, the last 64 tokens cost {cost_of_recent_64:+.3f} nats
each (standard error {standard_error:.3f}): above zero, context further back is used. Of all heads, the one that looks
most at `<bos>` gives it {bos_attention:.3f} of its attention from position 64 on; an attention sink would get most.
"""

FACTS = """\

Made by `{command}`:
{steps} steps, {cpu_seconds} CPU seconds on one core, in bfloat16 autocast.
Stored in float16; the figures were measured on the stored weights in float32.
Python {python}, torch {torch}, transformers {transformers}. The same facts are in `card.json`.
"""


def describe(card: dict[str, Any]) -> str:
    """The model card in words."""
    facts = card | card["versions"] | card.get("held_out", {})
    if "accuracy" in card:
        scores = card["accuracy"]
        table = "\n".join(f"| {task} | {share:.4f} |" for task, share in scores.items())
        poor = [task for task, share in scores.items() if share < USABLE]
        verdict = f"Below {USABLE}, so not to be used: {', '.join(poor)}." if poor else f"Every task is above {USABLE}."
        body = SYNTHETIC_TEXT
    else:
        positions = card["held_out"]["nats_by_position"]
        table = "\n".join(f"| {span} | {nats:.3f} |" for span, nats in positions.items())
        verdict, body = "", LANGUAGE_TEXT
    return f"# {card['name']}\n\n" + (body + FACTS).format(**facts, table=table, verdict=verdict)


def compare(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Print card against measurement; the largest absolute difference, 0 where the two are not comparable."""
    key = "accuracy" if "accuracy" in old else "held_out"
    if key == "held_out" and old["versions"]["python"] != platform.python_version():
        typer.echo(f"{old['name']:14} was measured on the library of Python {old['versions']['python']}: not compared")
        return 0.0
    gaps = [0.0]
    for what, before in old[key].items():
        if isinstance(before, float):
            gaps.append(abs(new[key][what] - before))
            typer.echo(f"{old['name']:14} {what:16} card {before:.4f}  now {new[key][what]:.4f}")
    return max(gaps)


def card_of(name: str) -> dict[str, Any]:
    return json.loads((tasks.MODELS / name / "card.json").read_text())


def main(
    name: Annotated[str | None, typer.Argument(help=f"one of {', '.join(RECIPES)}")] = None,
    seed: Annotated[int, typer.Option(help="of the first weights and of the training rows")] = 0,
    out: Annotated[Path, typer.Option(help="the folder in which the model's folder is written")] = Path("out/models"),
    sequences: Annotated[int, typer.Option(help="how many to measure with, per task")] = 256,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="train every shipped model; compare with its card")
    ] = False,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="measure the committed models; compare")] = False,
) -> None:
    """Train one small model, or check the shipped ones."""
    transformers.logging.set_verbosity_error()
    if sum((name is not None, retrain, evaluate)) != 1:
        raise typer.BadParameter("give one of: a NAME, --retrain, --evaluate")
    if name is not None:
        if name not in RECIPES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(RECIPES)}", param_hint="NAME")
        typer.echo(json.dumps(train(name, seed, out, sequences), indent=2))
        return
    gap = 0.0
    for shipped, (recipe, its_seed) in SHIPPED.items():
        old = card_of(shipped)
        new = train(recipe, its_seed, out, sequences) if retrain else measure(shipped, tasks.MODELS, old["sequences"])
        gap = max(gap, compare(old, new))
    typer.echo(f"largest difference {gap:.4f}")
    raise typer.Exit(int(evaluate and gap > 0.01))


if __name__ == "__main__":
    typer.run(main)
