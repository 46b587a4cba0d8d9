"""Requests in flight at the same bytes under three loads: short prompts, long ones, and half and half. Counts, and no times.

    python -m tools.bench.loads            transformers' engine, and vLLM where it is installed: the table of docs/benchmarks.md

30 prompts of 40 to 60 tokens, 8 of 400 to 900, 15 and 4 of them; 12 new tokens each. All requests are there from the beginning,
and memory is for SLOTS tokens in each layer of the model of serving.py. vLLM's own cache has pages of 32 slots, the fewest
that its attention on CPUs takes, and of 128, the usual ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .serving import ENGINES, FULL, PAGE, VOCAB, Requests, describe, installed

SLOTS, NEW, BUDGET = 2912, 12, "h2o:256"
OWN_PAGES = {"transformers": (PAGE,), "vllm": (2 * PAGE, 128)}  # slots of the engines' own pages


def loads() -> dict[str, Requests]:
    """Return the requests of each load by its name."""
    rnd = random.Random(0)
    short, long = ([rnd.randrange(*span) for _ in range(n)] for span, n in (((40, 61), 30), ((400, 901), 8)))
    mixed = short[:15] + long[:4]
    rnd.shuffle(mixed)
    lengths = {"short": short, "long": long, "half and half": mixed}
    return {name: [([rnd.randrange(2, VOCAB) for _ in range(n)], NEW) for n in several] for name, several in lengths.items()}


def rows() -> Iterator[str]:
    """Yield the rows of the table: requests in flight at most, their mean, and passes, for each load."""
    for name in installed(list(ENGINES)):
        for policy, page in [*((FULL, page) for page in OWN_PAGES[name]), (BUDGET, PAGE)]:
            cells = [name, describe(policy), str(page)]
            for asked in loads().values():
                running = [one.running for one in ENGINES[name](asked, policy, SLOTS, page)]
                cells.append(f"{max(running)}, {sum(running) / len(running):.1f}, {len(running)}")
            yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| engine | policy | slots of a page | " + " | ".join(loads()) + " |\n|---|---|---:|---:|---:|---:|", flush=True)
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()
