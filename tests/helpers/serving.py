"""Requests through transformers' continuous batching, and what generate() gives for each alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tests.helpers.tiny import VOCAB

LENGTHS = (20, 61, 9, 100, 33)
PATIENCE = 100  # seconds: far beyond what a busy machine takes, and below what a run on a broken copy may take


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rnd = random.Random(seed)
    return [[rnd.randrange(2, VOCAB) for _ in range(n)] for n in lengths]


def greedy(new: int | None = 12, sequences: int = 1) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config.num_return_sequences = sequences
    return config


def engine(**options: Any) -> ContinuousBatchingConfig:
    """Small pages and few rows, so that requests wait for each other."""
    return ContinuousBatchingConfig(
        **{"num_blocks": 200, "page_size": 16, "max_batch_tokens": 256, "max_requests_per_batch": 3, **options}
    )


def alone(model: Any, ids: list[int], new: int = 12) -> list[int]:
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()


def batched(model: Any, texts: list[list[int]], new: int = 12, sequences: int = 1, **options: Any) -> list[list[int]]:
    """The tokens of each request, in order; an error of a request is raised."""
    rows = 3 * sequences
    outputs = model.generate_batch(
        texts,
        generation_config=greedy(new, sequences),
        continuous_batching_config=engine(**{"max_requests_per_batch": rows, **options}),
    )
    assert len(outputs) == len(texts) * sequences
    for one in outputs.values():
        assert one.error is None, one.error
    return [list(one.generated_tokens) for one in outputs.values()]


@contextmanager
def running(model: Any, new: int | None = 12, wait: bool = False, **options: Any) -> Iterator[Any]:
    """A manager that runs, with wait=True once the test starts it, and is stopped."""
    manager = model.init_continuous_batching(generation_config=greedy(new), continuous_batching_config=engine(**options))
    if not wait:
        manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=PATIENCE)


def collect(manager: Any, names: list[str]) -> dict[str, Any]:
    """Wait for these requests; streamed parts, however many, and others' answers are dropped."""
    found: dict[str, Any] = {}
    end = time.monotonic() + PATIENCE
    while left := set(names) - set(found):
        runs, one = manager.is_running(), manager.get_result(timeout=0.1)
        if one is not None and one.is_finished():
            found[one.request_id] = one
        assert one is not None or (runs and time.monotonic() < end), (left, manager.background_thread_status.fatal_error)
    return found


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, which must then go on to hold."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE} seconds"
        time.sleep(0.1)
