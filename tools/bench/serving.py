"""Engines at the same bytes of KV memory, with a budget and with their own cache: requests in flight, tokens per second.

    python -m tools.bench.serving                               transformers' engine, and vLLM where it is installed
    python -m tools.bench.serving --engines vllm --policies full,h2o:300 --json serving.jsonl
    python -m tools.bench.serving --case step                   seconds of a step of 16 requests in flight, at equal batch
    python -m tools.bench.serving --markdown serving.jsonl      the table of docs/benchmarks.md

A random Llama of 4 layers of width 256 (4 query and 2 KV heads of size 64), float32, one CPU thread. Lengths of prompts and
outputs are log-uniform, 200 to 4,000 and 50 to 500 tokens, all divided by SCALE. All requests are there from the beginning,
and memory is for SLOTS tokens in each layer, so that requests wait for it. "In flight" is the mean number of requests that run
while others wait, weighted by time. n/k is the mean number of tokens that a request holds without a budget, divided by k.

A step: BATCH requests with prompts of 400 to 800 tokens decode together, all with memory enough; the engine with its own cache
and with budgets take turns in one process, STEPS steps each time, ROUNDS times. From the beginning of a step to that of the
next; medians of a turn, and then of the turns.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import kvpatch

from .lines import Line, keep, number, read, rows, where

SCALE, SLOTS, PAGE, K, REQUESTS = 4, 2048, 16, 95, 64
VOCAB, LONGEST = 512, 1152
BATCH, STEPS, ROUNDS = 16, 8, 7
Requests = list[tuple[list[int], int]]  # prompts, each with the number of tokens to generate
FULL = "full"  # the engine's own cache
app = typer.Typer(add_completion=False)


class Pass(NamedTuple):
    """A forward of an engine: requests that run in it, those that wait meanwhile, its seconds; in transformers its tokens."""

    running: int
    waiting: int
    seconds: float
    tokens: int = 0


def requests(seed: int = 0) -> Requests:
    """Prompts, each with the number of tokens to generate."""
    rnd = random.Random(seed)

    def length(low: int, high: int) -> int:
        return round(math.exp(rnd.uniform(math.log(low), math.log(high))) / SCALE)

    return [([rnd.randrange(2, VOCAB) for _ in range(length(200, 4000))], length(50, 500)) for _ in range(REQUESTS)]


def named(policy: str) -> tuple[str, int | None]:
    """Name and k of a policy as on the command line: k is K if it is not said, and no number for FULL."""
    name, _, k = policy.partition(":")
    return name, None if name == FULL else int(k or K)


def describe(policy: str) -> str:
    """A policy of the command line as tables say it."""
    name, k = named(policy)
    return "its own cache" if k is None else f"{name}, k={k}"


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=682, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        vocab_size=VOCAB, max_position_embeddings=LONGEST, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def patched(one: LlamaForCausalLM, policy: str) -> AbstractContextManager[object]:
    name, k = named(policy)
    return nullcontext() if k is None else kvpatch.patched(one, name, k)


def run_transformers(
    asked: Requests, policy: str, slots: int = SLOTS, page: int | None = None, one: LlamaForCausalLM | None = None
) -> list[Pass]:
    """Serve by transformers' manager; returns its passes."""
    one, page, begun = model() if one is None else one, page or PAGE, list[tuple[int, int, int, float]]()
    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = ContinuousBatchingConfig(num_blocks=slots // page, page_size=page, max_batch_tokens=LONGEST)
    with patched(one, policy):
        manager: Any = one.init_continuous_batching(generation_config=config, continuous_batching_config=engine)

        def note(module: Any, args: Any, told: dict[str, Any]) -> None:
            found = manager.batch_processor.scheduler
            counts = len(found.active_requests), len(found.waiting_requests), told["input_ids"].numel()
            begun.append((*counts, time.perf_counter()))

        hook = one.register_forward_pre_hook(note, with_kwargs=True)
        for ids, new in asked:
            manager.add_request(ids, max_new_tokens=new)
        manager.start()
        left = len(asked)
        while left:
            found = manager.get_result(timeout=0.5)
            if found is not None:
                assert found.error is None, found.error
                left -= 1
        begun.append((0, 0, 0, time.perf_counter()))
        manager.stop(block=True)
        hook.remove()
    return [Pass(running, waiting, ended - began, n) for (running, waiting, n, began), (*_, ended) in pairwise(begun)]


def vllm_engine(asked: Requests, policy: str, slots: int, page: int | None = None) -> Any:
    """vLLM with memory for so many tokens in each layer, told of the requests. page: slots of one; None: the fewest."""
    from vllm import LLM, SamplingParams

    name, k = named(policy)
    page = page or (2 * PAGE if k is None else PAGE)  # the least that its own attention on CPUs takes
    blocks = slots // page
    extra = {} if k is None else {"additional_config": {"kvpatch": {"policy": name, "k": k}}}
    with tempfile.TemporaryDirectory() as folder:
        model().save_pretrained(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=LONGEST, max_num_seqs=REQUESTS,
            max_num_batched_tokens=LONGEST, block_size=page, enable_prefix_caching=False, num_gpu_blocks_override=blocks + 1,
            **extra,
        )  # fmt: skip
    engine: Any = llm.llm_engine
    for index, (ids, new) in enumerate(asked):
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
    return engine


def step_vllm(engine: Any) -> Pass:
    """Let vLLM take a step; those that end with it ran in it."""
    began, outputs = time.perf_counter(), engine.step()
    scheduler = engine.engine_core.engine_core.scheduler
    running = len(scheduler.running) + sum(output.finished for output in outputs)
    return Pass(running, len(scheduler.waiting), time.perf_counter() - began)


def run_vllm(asked: Requests, policy: str, slots: int = SLOTS, page: int | None = None) -> list[Pass]:
    """Serve by vLLM; returns its passes."""
    engine, passes = vllm_engine(asked, policy, slots, page), list[Pass]()
    while engine.has_unfinished_requests():
        passes.append(step_vllm(engine))
    return passes


ENGINES: dict[str, Callable[..., list[Pass]]] = {"transformers": run_transformers, "vllm": run_vllm}


def installed(engines: list[str]) -> Iterator[str]:
    """Yield the engines that are there."""
    for name in engines:
        if name == "vllm" and importlib.util.find_spec("vllm") is None:
            print("vLLM is not installed: `make test-vllm` makes an environment with it.", flush=True)
        else:
            yield name


def lines(engines: list[str], policies: list[str]) -> Iterator[Line]:
    """One line for each engine and policy."""
    asked = requests()
    tokens = sum(new for _, new in asked)
    held = sum(new * (len(ids) + new / 2) for ids, new in asked) / tokens
    for name in installed(engines):
        for policy in policies:
            passes, (called, k) = ENGINES[name](asked, policy), named(policy)
            seconds, most = sum(one.seconds for one in passes), max(one.running for one in passes)
            full = [one for one in passes if one.waiting]
            waited = sum(one.seconds for one in full)
            yield {
                **where(),
                "case": "serving", "engine": name, "policy": called, "k": k, "slots": SLOTS,
                "requests": len(asked), "tokens": tokens, "most": most, "per_second": tokens / seconds, "seconds": seconds,
                "in_flight": sum(one.running * one.seconds for one in full) / waited if waited else most,
                "n_over_k": held / (k or K),
            }  # fmt: skip


# ---- a step ----


def batch() -> Requests:
    """Requests that decode together for all rounds."""
    rnd = random.Random(0)
    return [([rnd.randrange(2, VOCAB) for _ in range(rnd.randrange(400, 801))], STEPS * (ROUNDS + 2)) for _ in range(BATCH)]


def steps_in_vllm(policies: list[str]) -> Iterator[dict[str, float]]:
    """Seconds of a step by policy, once per round."""
    engines = {policy: vllm_engine(batch(), policy, BATCH * LONGEST) for policy in policies}
    for engine in engines.values():
        scheduler = engine.engine_core.engine_core.scheduler
        while scheduler.waiting or any(one.num_output_tokens < STEPS for one in scheduler.running):  # the joins come before
            engine.step()
        assert len(scheduler.running) == BATCH
    for _ in range(ROUNDS):
        yield {policy: statistics.median(step_vllm(engine).seconds for _ in range(STEPS)) for policy, engine in engines.items()}


def steps_in_transformers(policies: list[str]) -> Iterator[dict[str, float]]:
    """Seconds of a step by policy, once per round: its manager runs in a thread, so that every round begins anew."""
    one, asked = model(), [(ids, 2 * STEPS) for ids, _ in batch()]
    for _ in range(ROUNDS):
        took = {}
        for policy in policies:
            passes = run_transformers(asked, policy, BATCH * LONGEST, one=one)
            whole = [each.seconds for each in passes if each.tokens == BATCH]
            took[policy] = statistics.median(whole[1:-1])  # the first joins rows, and the last lasts until results are there
        yield took


STEPPERS: dict[str, Callable[[list[str]], Iterator[dict[str, float]]]] = {
    "transformers": steps_in_transformers, "vllm": steps_in_vllm,
}  # fmt: skip


def step_lines(engines: list[str], policies: list[str]) -> Iterator[Line]:
    """One line for each engine and policy: the median of the rounds, the least and the greatest."""
    prompt = sum(len(ids) for ids, _ in batch()) / BATCH
    for name in installed(engines):
        rounds = list(STEPPERS[name](policies))
        for policy in policies:
            found, (called, k) = sorted(took[policy] for took in rounds), named(policy)
            yield {
                **where(),
                "case": "step", "engine": name, "policy": called, "k": k, "batch": BATCH,
                "prompt": prompt, "rounds": ROUNDS, "steps": STEPS, "ms": 1e3 * statistics.median(found),
                "least_ms": 1e3 * found[0], "most_ms": 1e3 * found[-1],
            }  # fmt: skip


# ---- tables ----

# of each case: the columns behind engine and policy, the figures in them with their digits, or the figure whose ratio it is
TABLES: dict[str, tuple[tuple[str, str, int | None], ...]] = {
    "step": (
        ("ms per step", "ms", 1), ("least", "least_ms", 1), ("most", "most_ms", 1), ("to its own cache", "ms", None),
    ),
    "serving": (
        ("in flight", "in_flight", 1), ("most", "most", 0), ("to its own cache", "in_flight", None), ("n/k", "n_over_k", 2),
        ("tokens per second", "per_second", 0), ("to its own cache", "per_second", None),
    ),
}  # fmt: skip


def markdown(kept: list[Line]) -> str:
    """The table of docs/benchmarks.md."""
    columns = TABLES[kept[0]["case"] if kept else "serving"]
    own = {line["engine"]: line for line in kept if line["policy"] == FULL}

    def cell(line: Line, name: str, digits: int | None) -> str:
        plain = line["policy"] == FULL
        if digits is None:
            return "" if plain or line["engine"] not in own else number(line[name] / own[line["engine"]][name], 2)
        return "" if plain and name == "n_over_k" else number(line[name], digits)

    body = [
        (line["engine"], describe(f"{line['policy']}:{line['k']}"), *(cell(line, name, digits) for _, name, digits in columns))
        for line in kept
    ]
    return rows(("engine", "policy", *(title for title, *_ in columns)), body, left=2)


def tell(line: Line) -> str:
    """A line for the terminal when it is measured."""
    figure = f"{line['ms']:.1f} ms per step" if line["case"] == "step" else f"{line['in_flight']:.1f} in flight"
    return f"{line['engine']} {line['policy']}: {figure}"


@app.command()
def main(
    engines: Annotated[str, typer.Option(help="transformers, vllm")] = "transformers,vllm",
    policies: Annotated[str, typer.Option(help="names, each perhaps with :k; full: the engine's own cache")] = "full,h2o",
    case: Annotated[str, typer.Option(help="serving, or step")] = "serving",
    json_file: Annotated[Path | None, typer.Option("--json", help="append a JSON line per run to this file")] = None,
    table: Annotated[Path | None, typer.Option("--markdown", help="print this JSON-lines file as a table")] = None,
) -> None:
    """Measure engines with a budget and without."""
    torch.set_num_threads(1)
    if case not in TABLES:
        raise typer.BadParameter(f"{case!r} is neither 'serving' nor 'step'.")
    found = (step_lines if case == "step" else lines)(engines.split(","), policies.split(","))
    print(markdown(keep(found, json_file, tell) if table is None else read(table)))


if __name__ == "__main__":
    app()
