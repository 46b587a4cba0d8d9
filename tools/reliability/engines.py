"""Budgets in engines at full size: tokens of generate(), of generate_batch() and of vLLM, and random schedules of requests.

    python -m tools.reliability.engines                 20 prompts x 10 policies x 3 models, and 200 schedules
    python -m tools.reliability.engines --prompts 2 --schedules 5
    python -m tools.reliability.engines --schedules 0 --processes 2      vLLM with tensor parallelism

vLLM takes part where it is installed (`make test-vllm` makes such an environment), with pages of 16 slots; two of three of its
requests have a k of their own. All runs are greedy, in float32, on the small models of tests/vllm; with several processes all
prompts are one batch, and schedules run on one. A difference is printed, and makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpatch.serving.vllm.terms import OWN
from tests.helpers.schedules import Schedules
from tests.helpers.serving import alone, batched
from tests.vllm.models import POLICIES, prompts, save

TEN = ("h2o", "roco", "keyformer", "scissorhands", "snapkv", "tova", "streaming_llm", "window", "key_diff", "critical(h2o)")
FAMILIES = ("Llama", "Qwen3", "GPT2")
K, NEW, MOST = 24, 16, 64  # tokens of the budget, new ones, and the most that a request asks for


def texts(count: int) -> list[list[int]]:
    rnd = random.Random(7)
    return prompts(tuple(rnd.randrange(5, 200) for _ in range(count)), seed=7)


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1, help="vLLM's tensor_parallel_size, where it gets prompts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {family: save(family, Path(folder) / family) for family in FAMILIES}
        bad = [*equal(models, Path(folder), texts(given.prompts), given.processes)]
        bad += scheduled(models["Llama"], Path(folder), given.schedules)
    print(*bad, sep="\n")
    return bool(bad)


def equal(models: dict[str, Any], folder: Path, asked: list[list[int]], processes: int) -> Iterator[str]:
    """Yield what differs between generate(), generate_batch() and vLLM."""
    if not asked:
        return
    import kvpatch

    cases = [(policy, family) for policy in TEN for family in models]
    if processes == 1:
        began = time.monotonic()
        for policy, family in cases:
            wanted = generated(models[family], policy, asked)
            with kvpatch.patched(models[family], policy, K, **POLICIES[policy]):
                got = batched(models[family], asked, NEW, max_requests_per_batch=6)
            yield from differing("generate_batch", family, policy, got, wanted)
        said = f"{len(TEN)} policies x {len(models)} models x {len(asked)} prompts x {NEW} tokens"
        print(f"generate() and generate_batch(): {said} compared in {time.monotonic() - began:.0f} s", flush=True)
    answers = vllm([job(folder, family, policy, asked, processes) for policy, family in cases])
    for (policy, family), answer in zip(cases, answers, strict=False):
        got = [one[0] for one in answer["tokens"]] if "tokens" in answer else [[answer["error"]]] * len(asked)
        differ = [*differing("vLLM", family, policy, got, generated_apart(models[family], policy, asked))]
        print(f"vLLM, processes: {processes}, {family}, {policy}: {len(differ)} of {len(asked)} prompts differ", flush=True)
        yield from differ


def differing(engine: str, family: str, policy: str, got: list[Any], wanted: list[list[int]]) -> Iterator[str]:
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one != other:
            yield f"{engine}: {family}, {policy}, prompt {index}: {one} instead of {other}"


def scheduled(model: Any, folder: Path, count: int) -> Iterator[str]:
    """Yield the requests whose tokens a schedule changed."""
    began, schedules = time.monotonic(), Schedules(model)
    for seed in range(count):
        yield from schedules.run(seed)
    done = f"{count} schedules, {schedules.compared} requests compared, {schedules.cancelled} cancelled"
    print(f"generate_batch(): {done}, in {time.monotonic() - began:.0f} s", flush=True)
    began, asked, policies = time.monotonic(), texts(10), ("h2o", "keyformer", "snapkv", "streaming_llm")
    seeds = [list(range(count))[index :: len(policies)] for index in range(len(policies))]
    jobs = [job(folder, "Llama", one, asked, schedules=own) for one, own in zip(policies, seeds, strict=True) if own]
    answers = [*vllm(jobs)]
    compared = cancelled = 0
    for policy, own, answer in zip(policies, seeds, answers, strict=False):
        wanted = generated_apart(model, policy, asked)
        for seed, found in zip(own, answer.get("schedules", ()), strict=True):
            gone = [one for one in found if one is None]
            compared, cancelled = compared + len(found) - len(gone), cancelled + len(gone)
            got = [tokens if one is None else one[0] for one, tokens in zip(found, wanted, strict=True)]
            yield from differing(f"vLLM, schedule {seed}", "Llama", policy, got, wanted)
    if answers:
        done = f"{count} schedules, {compared} requests compared, {cancelled} cancelled"
        print(f"vLLM: {done}, in {time.monotonic() - began:.0f} s", flush=True)


def own_budgets(count: int) -> list[int | None]:
    """The k that each request asks vLLM for, in turn; None: it has the server's."""
    return [(None, 12, MOST)[index % 3] for index in range(count)]


def generated(model: Any, policy: str, asked: list[list[int]], k: int = K) -> list[list[int]]:
    import kvpatch

    with kvpatch.patched(model, policy, k, **POLICIES[policy]):
        return [alone(model, ids, NEW) for ids in asked]


def generated_apart(model: Any, policy: str, asked: list[list[int]]) -> list[list[int]]:
    """What generate() gives each prompt under the k that it asks vLLM for."""
    return [generated(model, policy, [ids], k or K)[0] for ids, k in zip(asked, own_budgets(len(asked)), strict=True)]


def job(folder: Path, family: str, policy: str, asked: list[list[int]], processes: int = 1, **more: Any) -> dict[str, Any]:
    own = {"generation_length": NEW} if policy == "keyformer" else {}  # generate() knows it from max_new_tokens
    settings = {"policy": policy, "k": K, "max_k": MOST, **POLICIES[policy], **own}
    sampling = {"max_tokens": NEW, "temperature": 0}
    asks = [k and {OWN: k} for k in own_budgets(len(asked))]
    named = {"model": str(folder / family), "settings": settings, "prompts": asked, "asks": asks, "sampling": sampling}
    options = {"max_num_batched_tokens": 4096, "tensor_parallel_size": processes, "num_gpu_blocks_override": 512}
    if processes > 1:  # they wait for each other in every layer of every pass: few passes
        options["max_num_seqs"] = len(asked)
    return {**named, "options": options, **more}


def vllm(jobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What vLLM answers, job by job; nothing where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: `make test-vllm` makes an environment with it.", flush=True)
        return
    from vllm.v1.executor import multiproc_executor

    from tests.vllm.serve import run

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # workers do not import vLLM anew
    yield from map(run, jobs)


if __name__ == "__main__":
    sys.exit(main())
