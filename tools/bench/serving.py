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
import json
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
from typing import Annotated, Any

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

from .lines import Line, where

SCALE, SLOTS, PAGE, K, REQUESTS = 4, 2048, 16, 95, 64
VOCAB, LONGEST = 512, 1152
BATCH, STEPS, ROUNDS = 16, 8, 7
Requests = list[tuple[list[int], int]]  # prompts, each with the number of tokens to generate
FULL = "full"  # the engine's own cache
app = typer.Typer(add_completion=False)


class Load:
    """Requests in flight over time, while others wait."""

    def __init__(self) -> None:
        self.held = self.time = 0.0
        self.before, self.most = time.perf_counter(), 0

    def look(self, running: int, waiting: int) -> None:
        now = time.perf_counter()
        if waiting and running:
            self.held, self.time = self.held + running * (now - self.before), self.time + now - self.before
        self.before, self.most = now, max(self.most, running)


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


def in_transformers(
    asked: Requests, policy: str, load: Load | None, one: LlamaForCausalLM | None = None, slots: int = SLOTS
) -> float:
    """Serve by transformers' manager; returns the seconds it took. load: None to leave its thread alone meanwhile."""
    one = model() if one is None else one
    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    engine = ContinuousBatchingConfig(num_blocks=slots // PAGE, page_size=PAGE, max_batch_tokens=LONGEST)
    with patched(one, policy):
        manager = one.init_continuous_batching(generation_config=config, continuous_batching_config=engine)
        for ids, new in asked:
            manager.add_request(ids, max_new_tokens=new)
        manager.start()
        began, ended = time.perf_counter(), 0
        if load is not None:
            load.before = began
        while ended < len(asked):
            found = manager.get_result(timeout=0.5 if load is None else 0.005)
            if found is not None:
                assert found.error is None, found.error
                ended += 1
            scheduler = getattr(getattr(manager, "batch_processor", None), "scheduler", None)
            if scheduler is not None and load is not None:
                load.look(len(scheduler.active_requests), len(scheduler.waiting_requests))
        took = time.perf_counter() - began
        manager.stop(block=True)
    return took


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


def in_vllm(asked: Requests, policy: str, load: Load) -> float:
    """Serve by vLLM; returns the seconds it took."""
    engine = vllm_engine(asked, policy, SLOTS)
    scheduler = engine.engine_core.engine_core.scheduler
    began = load.before = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        load.look(len(scheduler.running), len(scheduler.waiting))
    return time.perf_counter() - began


ENGINES: dict[str, Callable[[Requests, str, Load], float]] = {"transformers": in_transformers, "vllm": in_vllm}


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
            load = Load()
            took, (called, k) = ENGINES[name](asked, policy, load), named(policy)
            yield {
                **where(),
                "case": "serving", "engine": name, "policy": called, "k": k, "slots": SLOTS,
                "requests": len(asked), "tokens": tokens, "in_flight": load.held / load.time if load.time else load.most,
                "most": load.most, "per_second": tokens / took, "seconds": took, "n_over_k": held / (k or K),
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
        took = {}
        for policy, engine in engines.items():
            moments = [time.perf_counter()]
            for _ in range(STEPS):
                engine.step()
                moments.append(time.perf_counter())
            took[policy] = median_between(moments)
        yield took


def steps_in_transformers(policies: list[str]) -> Iterator[dict[str, float]]:
    """Seconds of a step by policy, once per round: its manager runs in a thread, so that every round begins anew."""
    one, moments = model(), list[tuple[int, float]]()

    def note(module: Any, args: Any, told: dict[str, Any]) -> None:
        moments.append((told["input_ids"].numel(), time.perf_counter()))

    one.register_forward_pre_hook(note, with_kwargs=True)
    asked = [(ids, 2 * STEPS) for ids, _ in batch()]
    for _ in range(ROUNDS):
        took = {}
        for policy in policies:
            moments.clear()
            in_transformers(asked, policy, None, one, BATCH * LONGEST)
            whole = [moment for columns, moment in moments if columns == BATCH]
            took[policy] = median_between(whole[1:])  # the first joins rows
        yield took


def median_between(moments: list[float]) -> float:
    return statistics.median(after - before for before, after in pairwise(moments))


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


def step_table(kept: list[Line]) -> str:
    """Return the table of a step's time."""
    rows = ["| engine | policy | ms per step | least | most | to its own cache |", "|---|---|---:|---:|---:|---:|"]
    own = {line["engine"]: line["ms"] for line in kept if line["policy"] == FULL}
    for line in kept:
        plain = line["policy"] == FULL
        policy = "its own cache" if plain else f"{line['policy']}, k={line['k']}"
        ratio = "" if plain or line["engine"] not in own else f"{line['ms'] / own[line['engine']]:.2f}"
        cells = line["engine"], policy, *(f"{line[name]:.1f}" for name in ("ms", "least_ms", "most_ms")), ratio
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def markdown(kept: list[Line]) -> str:
    """Return the table of docs/benchmarks.md."""
    if kept and kept[0]["case"] == "step":
        return step_table(kept)
    rows = ["| engine | policy | in flight | most | to its own cache | n/k | tokens per second | to its own cache |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|---:|")
    own = {line["engine"]: line for line in kept if line["policy"] == FULL}
    for line in kept:
        base = own.get(line["engine"], line)
        plain = line["policy"] == FULL
        more, faster = (f"{line[name] / base[name]:.2f}" for name in ("in_flight", "per_second"))
        policy = "its own cache" if plain else f"{line['policy']}, k={line['k']}"
        ratio = "" if plain else f"{line['n_over_k']:.2f}"
        cells = (line["engine"], policy, f"{line['in_flight']:.1f}", str(line["most"]), "" if plain else more, ratio)
        rows.append("| " + " | ".join((*cells, f"{line['per_second']:.0f}", "" if plain else faster)) + " |")
    return "\n".join(rows)


@app.command()
def main(
    engines: Annotated[str, typer.Option(help="transformers, vllm")] = "transformers,vllm",
    policies: Annotated[str, typer.Option(help="names, each perhaps with :k; full: the engine's own cache")] = "full,h2o",
    case: Annotated[str, typer.Option(help="serving, or step")] = "serving",
    json_file: Annotated[Path | None, typer.Option("--json", help="append a JSON line per run to this file")] = None,
    table: Annotated[Path | None, typer.Option("--markdown", help="print this JSON-lines file as a table")] = None,
) -> None:
    """Measure engines with a budget and without."""
    if table is not None:
        print(markdown([json.loads(line) for line in table.read_text().splitlines()]))
        return
    torch.set_num_threads(1)
    kept = []
    if case not in ("serving", "step"):
        raise typer.BadParameter(f"{case!r} is neither 'serving' nor 'step'.")
    found = (step_lines if case == "step" else lines)(engines.split(","), policies.split(","))
    for line in found:
        kept.append(line)
        told = f"{line['ms']:.1f} ms per step" if case == "step" else f"{line['in_flight']:.1f} in flight"
        print(f"{line['engine']} {line['policy']}: {told}", flush=True)
        if json_file is not None:
            with json_file.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(markdown(kept))


if __name__ == "__main__":
    app()
