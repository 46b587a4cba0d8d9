"""Scores from a sample of a prompt's rows: the time that they save, and how much of what is kept stays the same.

    python -m tools.bench.sampled                       every policy that samples, at 2,048 and 8,192 tokens
    python -m tools.bench.sampled --policies h2o --lengths 4096

Times: the Llama of the benchmark with 3 of its 12 layers, in turns with the same model unpatched; medians of process CPU time.
Agreement: the entries that both keep over those that either does (Jaccard), mean over layers, heads and seeds, for
random tokens through that model and for source text through the small model that comes with kvpatch (trained on 256 tokens).
"""

import statistics
import sysconfig
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import kvpatch
from kvpatch.cli.loading import MODELS
from kvpatch.cli.needles import SOURCE

from .lines import rows
from .models import build, forward, tokens, twin
from .prompt import summary

LAYERS, BUDGETS = 3, (0.5, 0.2)
POLICIES = "h2o,scissorhands,roco,keyformer"
Scores = Literal["all", "sampled"]
SCORES: tuple[Scores, ...] = ("all", "sampled")


def shallow(n: int) -> PreTrainedModel:
    """The benchmark's Llama with its first layers alone."""
    model = build("llama", n, tiny=False)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model


def source(n: int) -> tuple[PreTrainedModel, Tensor]:
    """The small model, and n tokens of a library file that it has not seen, repeated if it is shorter."""
    folder = MODELS / "llama-python"
    text = (Path(sysconfig.get_paths()["stdlib"]) / SOURCE).read_text()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids.repeat(1, 1 + n // ids.shape[1])[:, :n]


def kept(model: PreTrainedModel, ids: Tensor, policy: str, k: float, seed: int, scores: Scores) -> list[Tensor]:
    """Positions that each layer's heads keep of a prompt [1,H,K], sorted."""
    with kvpatch.patched(model, policy, k=k, seed=seed, scores=scores):
        cache = forward(model, ids)[0]
    assert isinstance(cache, kvpatch.EvictingCache)
    return [cache.positions(layer).sort(-1).values for layer in range(len(cache.layers))]


def jaccard(one: list[Tensor], other: list[Tensor]) -> float:
    """Entries in both over entries in either, mean over layers and heads; every head keeps as many."""
    shares = []
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine[0], theirs[0], strict=True):
            a, b = a[a >= 0], b[b >= 0]
            both = int(torch.isin(a, b).sum())
            shares.append(both / (len(a) + len(b) - both))
    return statistics.fmean(shares)


def agreement(model: PreTrainedModel, ids: Tensor, policy: str, k: float, seeds: int) -> float:
    """Mean Jaccard over seeds, which keyformer's noise shares."""
    pairs = [[kept(model, ids, policy, k, seed, scores) for scores in SCORES] for seed in range(seeds)]
    return statistics.fmean(jaccard(*pair) for pair in pairs)


def ratios(model: PreTrainedModel, ids: Tensor, policy: str, repeats: int) -> list[float]:
    """Time of a prompt over the unpatched model's, with all rows and with a sample of them."""
    found = []
    for scores in SCORES:
        other = twin(model)
        with kvpatch.patched(other, policy, k=0.5, scores=scores):
            pairs = [tuple(forward(one, ids)[1] for one in (model, other)) for _ in range(repeats + 1)]
        found.append(summary(pairs[1:])["ratio"])
    return found


def main(
    policies: Annotated[str, typer.Option(help="names, comma-separated")] = POLICIES,
    lengths: Annotated[str, typer.Option(help="prompt lengths, comma-separated")] = "2048,8192",
    repeats: Annotated[int, typer.Option(help="pairs whose median counts; 0 measures no times", min=0)] = 3,
    seeds: Annotated[int, typer.Option(help="of the agreement; 0 measures none", min=0)] = 3,
) -> None:
    """Print a Markdown table."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    columns = ["policy", "n", *(["all rows", "sampled"] if repeats else [])]
    columns += ["random, k = 0.5", "k = 0.2", "source, k = 0.5", "k = 0.2"] if seeds else []
    print(rows(columns, [], left=1))
    for n in map(int, lengths.split(",")):
        model = shallow(n)
        pairs = [(model, tokens(model, n)), source(n)]
        for policy in policies.split(","):
            times = ratios(*pairs[0], policy, repeats) if repeats else []
            shares = [agreement(*pair, policy, k, seeds) for pair in pairs for k in BUDGETS] if seeds else []
            cells = [f"{figure:.2f}" for figure in (*times, *shares)]
            print(f"| {policy} | {n} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
