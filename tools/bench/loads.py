"""Requests in flight at the same bytes under three loads: short prompts, long ones, and half and half. Counts, and no times.

    python -m tools.bench.loads            transformers' engine, and vLLM where it is installed: the table of docs/benchmarks.md

30 prompts of 40 to 60 tokens, 8 of 400 to 900, 15 and 4 of them; 12 new tokens each. All requests are there from the beginning,
and memory is for SLOTS tokens in each layer of the model of serving.py. vLLM's own cache has pages of 32 slots, the fewest
that its attention on CPUs takes, and of 128, the usual ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from .serving import FULL, LONGEST, PAGE, VOCAB, Requests, installed, model, patched, vllm_engine

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


def run_transformers(asked: Requests, policy: str, page: int) -> list[int]:
    """Return how many requests run in each pass of transformers' engine."""
    one, running = model(), list[int]()
    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = ContinuousBatchingConfig(num_blocks=SLOTS // page, page_size=page, max_batch_tokens=LONGEST)
    with patched(one, policy):
        manager: Any = one.init_continuous_batching(generation_config=config, continuous_batching_config=engine)

        def note(*told: Any) -> None:
            running.append(len(manager.batch_processor.scheduler.active_requests))

        one.register_forward_pre_hook(note)
        for ids, new in asked:
            manager.add_request(ids, max_new_tokens=new)
        manager.start()
        left = len(asked)
        while left:
            found = manager.get_result(timeout=0.5)
            if found is not None:
                assert found.error is None, found.error
                left -= 1
        manager.stop(block=True)
    return running


def run_vllm(asked: Requests, policy: str, page: int) -> list[int]:
    """Return how many requests run in each pass of vLLM."""
    engine, running = vllm_engine(asked, policy, SLOTS, page), list[int]()
    scheduler = engine.engine_core.engine_core.scheduler
    while engine.has_unfinished_requests():
        outputs = engine.step()
        running.append(len(scheduler.running) + sum(output.finished for output in outputs))
    return running


RUNS = {"transformers": run_transformers, "vllm": run_vllm}


def rows() -> Iterator[str]:
    """Yield the rows of the table: requests in flight at most, their mean, and passes, for each load."""
    for name in installed(list(RUNS)):
        for policy, page in [*((FULL, page) for page in OWN_PAGES[name]), (BUDGET, PAGE)]:
            cells = [name, "its own cache" if policy == FULL else "{}, k={}".format(*policy.split(":")), str(page)]
            for asked in loads().values():
                running = RUNS[name](asked, policy, page)
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
