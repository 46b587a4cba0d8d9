"""Heads that `duo` chooses by a calibration, beside choices by chance: recall's questions after the prompt.

`python -m tools.evaluation.duo` prints a row for each small model: some minutes on one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import kvpatch
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.policies.budgets import share
from tools.docs_tables import markdown

from . import runs
from .recall import scenarios
from .results import FIFTEEN
from .task import Request

TEXTS, CHANCES, PART = 5, 4, 0.5
SIZES = {"sinks": 4, "recent": 20}


def texts(seed: int, count: int) -> tuple[Tensor, int]:
    """Sequences [count,T] with questions behind a prompt, and the tokens of that prompt."""
    made = [scenarios(seed, i)["after"] for i in range(count)]
    return torch.cat([one.tokens_BT for one in made]), made[0].prompt_length


@torch.no_grad()
def rows(models: Sequence[str] = FIFTEEN, count: int = TEXTS) -> Iterator[tuple[str, float, list[float]]]:
    """Yield for each model its KL from the full cache in nats per token, and those of choices by chance, ascending."""
    for name in models:
        model = runs.load(name, Request()).model
        (ids_BT, n), few = texts(0, count), sum(SIZES.values())
        whole = _log_p(model, ids_BT, n)
        calibration = calibrate(model, texts(1, count)[0].split(1))
        heads = [len(own["area"]) for own in calibration.layers.values()]
        found = []
        for chance in range(CHANCES):
            order = torch.randperm(sum(heads), generator=torch.Generator().manual_seed(chance)).tolist()
            flat = iter([1.0 if place < share(PART, sum(heads)) else few for place in order])
            table = [[next(flat) for _ in range(H)] for H in heads]
            with kvpatch.patched(model, "streaming_llm", table, sinks=SIZES["sinks"]):
                found.append(_divergence(whole, _log_p(model, ids_BT, n)))
        with kvpatch.patched(model, "duo", PART, calibration=calibration, **SIZES):
            own = _divergence(whole, _log_p(model, ids_BT, n))
        yield name, own, sorted(found)


def _log_p(model: Any, ids_BT: Tensor, n: int) -> Tensor:
    return feed(model, ids_BT[:, :-1], n).logits_BSV.log_softmax(-1)


def _divergence(whole: Tensor, other: Tensor) -> float:
    return float((whole.exp() * (whole - other)).sum(-1).mean())


def main() -> None:
    torch.set_num_threads(1)
    table, means = [], []
    for name, own, chances in rows():
        table.append((name, f"{own:.3f}", ", ".join(f"{one:.3f}" for one in chances)))
        means.append(own)
        print(table[-1], flush=True)
    print(markdown(("model", "`duo`", "by chance"), table))
    print(f"mean {mean(means):.3f}")


if __name__ == "__main__":
    main()
