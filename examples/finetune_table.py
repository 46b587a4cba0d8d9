"""docs/finetuning.md, from the runs of finetune_under_budget."""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np

from tools.evidence.statistics import Bootstrap, Estimate
from tools.evidence.tables import markdown, shown

Run = dict[str, Any]

ARMS, WAYS = ("shipped", "control", "tuned"), ("full", "block", "token")
HEADS = ("full cache", "budget, in blocks", "budget, token by token")
PAIRS = (("tuned", "shipped"), ("tuned", "control"), ("control", "shipped"))

TEXT = """# Fine-tuning under a budget

With `block=` a forward in training mode evicts as it reads, and gradients flow through what is left. Does a model that is
trained so learn to live with its evictions? Here are the shipped models that read Python (a million parameters each), policy
`{policy}`, k = {k:g}, {steps} steps of {rows} rows of 256 tokens from the files that they were trained on, AdamW, the learning
rate falling from {learning_rate:g} to 0, eviction after every {block} tokens.

- shipped: the model as it is.
- control: the same steps on the same rows, with the full cache. What the tuned model has beyond it is not due to more training.
- tuned: the same steps under the budget.

## Nats per token

Of the last 128 tokens of {windows} windows of 256 tokens, spread over the files that no model has read; with a full cache,
under the budget read {block} tokens at a time as in training, and under it with these tokens fed one by one, as in generation.

{nats}

Differences, paired by window; below zero the first is better:

{differences}

Brackets: 95% by a bootstrap over shipped models, and over windows within them, where a window's value is its mean over the
seeds of the training rows; {models} models, {seeds} seeds each. Bold: the interval leaves zero out and models agree in sign.

## Each run

In nats per token, under the budget in blocks, and with the full cache.

{runs}

## What this says, and what not

{said}

What is evicted is no longer there, so only a part of the budget's cost can be won back; and the choice of what is evicted has
no gradient: what is learned is to do with what is left. The setting was not searched. `window` was taken after one short run
each of it and `h2o`, because it gained more and costs less to train; another policy, a longer run, or a learning rate chosen
for it, will give other figures. The models are small and take little from further back than 64 tokens.

```
{command}
```
"""


def short(run: Run) -> str:
    """One run in a line."""
    parts = (f"{arm} " + " ".join(f"{way} {mean(run[arm][way]):.3f}" for way in WAYS) for arm in ARMS)
    return f"{run['model']} seed {run['seed']}: " + "; ".join(parts)


def page(runs: list[Run]) -> str:
    """The page. All runs are of one setting."""
    runs = sorted(runs, key=lambda run: (run["model"], run["seed"]))
    one, models = runs[0], sorted({run["model"] for run in runs})
    bootstrap = Bootstrap([("llama-python", model) for model in models for _ in range(one["windows"])])
    values = {(arm, way): _values(runs, models, arm, way) for arm in ARMS for way in WAYS}
    found = {key: bootstrap.estimate(column) for key, column in values.items()}
    gaps = {(pair, way): bootstrap.estimate(values[pair[0], way] - values[pair[1], way]) for pair in PAIRS for way in WAYS}
    nats = [[arm, *(str(found[arm, way]) for way in WAYS)] for arm in ARMS]
    differences = [[f"{a} - {b}", *(shown(gaps[(a, b), way], signed=True) for way in WAYS)] for a, b in PAIRS]
    lines = [
        [run["model"], str(run["seed"]), *(f"{mean(run[arm][way]):.3f}" for way in ("block", "full") for arm in ARMS)]
        for run in runs
    ]
    names = [f"{arm}, {where}" for where in ("budget", "full") for arm in ARMS]
    seeds = "/".join(sorted({str(sum(run["model"] == model for run in runs)) for model in models}))
    return TEXT.format(
        nats=markdown(["", *HEADS], nats),
        differences=markdown(["", *HEADS], differences),
        runs=markdown(["model", "seed", *names], lines),
        said=_said(found, gaps, runs),
        models=len(models),
        seeds=seeds,
        command=_command(one, len(models), max(run["seed"] for run in runs) + 1),
        **{name: one[name] for name in ("policy", "k", "block", "steps", "rows", "learning_rate", "windows")},
    )


def _values(runs: list[Run], models: list[str], arm: str, way: str) -> np.ndarray:
    """One value for every window of every model: its mean over seeds."""
    return np.concatenate([np.mean([run[arm][way] for run in runs if run["model"] == name], 0) for name in models])


def _said(found: dict[Any, Estimate], gaps: dict[Any, Estimate], runs: list[Run]) -> str:
    """The verdict, in the figures' own words."""
    below = sum(mean(run["tuned"]["block"]) < mean(run["shipped"]["block"]) for run in runs)
    cost = found["shipped", "block"].mean - found["shipped", "full"].mean
    won, over = (gaps[("tuned", other), "block"].mean for other in ("shipped", "control"))
    control, tuned = (gaps[(arm, "shipped"), "full"].mean for arm in ("control", "tuned"))
    said = (
        f"Under the budget the tuned model is better than the shipped one in {below} of {len(runs)} runs. The budget costs "
        f"the\nshipped model {cost:.3f} nats; the tuned model differs from it by {won:+.3f}, from the control by {over:+.3f}.\n"
        f"With the full cache the control differs from the shipped model by {control:+.3f}, the tuned one by {tuned:+.3f}"
    )
    if control > 0 and tuned > control:
        said += (
            ".\nSo few steps, at a learning rate that the models had left behind, cost both of them something, and the tuned "
            "model has become\none for the budget: with its full cache it is worse than either"
        )
    return said + "."


def _command(one: Run, models: int, seeds: int) -> str:
    options = {"models": "all" if models == 3 else one["model"], "seeds": seeds}
    options |= {name: one[name] for name in ("policy", "k", "block", "steps", "rows", "windows")}
    options |= {"learning-rate": one["learning_rate"], "lines": "docs/finetuning.jsonl", "write": "docs/finetuning.md"}
    return "python -m examples.finetune_under_budget " + " ".join(f"--{name} {value}" for name, value in options.items())
