"""Run vLLM in a process of its own: `python -m tests.vllm.serve jobs.json answers.json`, one engine after another.

A job is an engine and what it is asked: {model, settings, options, prompts, sampling}, and perhaps

- `variable`: KVPATCH_VLLM;
- `arrivals`: the seed of a random schedule of the prompts, and `cancelled`: how likely one is cancelled at a step;
- `schedules`: several such seeds, one after another;
- `lengths`: tokens to generate for each prompt, all of which are there from the beginning;
- `asks`: what each prompt asks for in SamplingParams.extra_args;
- `beside`: another job, whose engine is made before the first one is asked;
- `first`: prompts that are asked one by one before, each perhaps refused; or `first_asks`: such requests of the first prompt.

Its answer has the tokens of each sequence, or the error that the engine was refused with; `refused`: the errors of the
first prompts; `running`: with `lengths`, the requests in each step; `said`: what kvpatch's log said; `seen`: with `--cuda`,
what was noted as if on CUDA (pretend.py).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    GLOO_SOCKET_IFNAME="lo",
)


def run(job: dict[str, Any], engines: list[Any] | None = None) -> dict[str, Any]:
    """Answer one job. engines: a list to which its engine is added, so that it stays."""
    from vllm import LLM

    if job.get("settings") is not None:
        job["options"] = {**job["options"], "additional_config": {"kvpatch": job["settings"]}}
    os.environ.pop("KVPATCH_VLLM", None)
    if "variable" in job:
        os.environ["KVPATCH_VLLM"] = job["variable"]
    said = _listen()
    usual = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
    try:
        engine = LLM(model=job["model"], **{**usual, **job["options"]})
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if engines is not None:
        engines.append(engine)
    others = list[Any]()  # vLLM ends what its engines share with the first of them that goes
    beside = run(job["beside"], others) if "beside" in job else None
    return {**_asked(engine, job), "said": said, "beside": beside}


def _asked(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    asks = job.get("asks") or [None] * len(job["prompts"])
    sampling = [SamplingParams(detokenize=False, ignore_eos=True, extra_args=one, **job["sampling"]) for one in asks]
    if "schedules" in job:
        return {"schedules": [_scheduled(engine.llm_engine, {**job, "arrivals": seed}, sampling) for seed in job["schedules"]]}
    if "lengths" in job:
        return _counted(engine.llm_engine, job)
    if "arrivals" in job:
        return {"tokens": _scheduled(engine.llm_engine, job, sampling), "pages": _pages(engine.llm_engine)}
    refused = []
    trials = [(ids, None) for ids in job.get("first", ())] + [(job["prompts"][0], one) for one in job.get("first_asks", ())]
    for ids, one in trials:
        try:
            told = SamplingParams(detokenize=False, ignore_eos=True, extra_args=one, **job["sampling"])
            engine.generate([{"prompt_token_ids": ids}], told, use_tqdm=False)
        except Exception as error:
            refused.append(str(error))
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    return {"tokens": [[list(one.token_ids) for one in output.outputs] for output in outputs], "refused": refused}


def _listen() -> list[str]:
    """Return a list to which what kvpatch logs is added."""
    said, log = list[str](), logging.getLogger("vllm.kvpatch")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    return said


def _scheduled(engine: Any, job: dict[str, Any], sampling: list[Any]) -> list[list[list[int]] | None]:
    """Give requests at random steps and cancel some: None in their place."""
    rnd, ended = random.Random(job["arrivals"]), dict[str, list[list[int]] | None]()
    waiting, most = list(enumerate(job["prompts"])), 0
    free = _free(engine)
    while waiting or engine.has_unfinished_requests():
        while waiting and rnd.random() < 0.3:
            index, ids = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": ids}, sampling[index])
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = [list(one.token_ids) for one in output.outputs]
        most = max(most, free - _free(engine))
        running = [name for name in map(str, range(len(job["prompts"]) - len(waiting))) if name not in ended]
        if running and rnd.random() < job.get("cancelled", 0.02):
            name = rnd.choice(running)
            ended[name] = None
            engine.abort_request([name])
    engine.most = most
    return [ended[str(index)] for index in range(len(job["prompts"]))]


def _counted(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Give all requests at once, each with a number of tokens to generate, and count those that run in each step."""
    from vllm import SamplingParams

    asks = job.get("asks") or [None] * len(job["prompts"])
    for index, (ids, new, ask) in enumerate(zip(job["prompts"], job["lengths"], asks, strict=True)):
        sampling = SamplingParams(detokenize=False, ignore_eos=True, temperature=0, max_tokens=new, extra_args=ask)
        engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
    running, ended, scheduler = list[int](), dict[str, list[list[int]]](), engine.engine_core.engine_core.scheduler
    while engine.has_unfinished_requests():
        outputs = engine.step()
        running.append(len(scheduler.running) + sum(output.finished for output in outputs))
        ended |= {output.request_id: [list(one.token_ids) for one in output.outputs] for output in outputs if output.finished}
    return {"tokens": [ended[str(index)] for index in range(len(job["prompts"]))], "running": running}


def _free(engine: Any) -> int:
    return engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def _pages(engine: Any) -> int:
    """The most pages that were in use at once."""
    return engine.most


if __name__ == "__main__":
    answers, seen = [], set[str]()
    if "--cuda" in sys.argv:
        from tests.vllm.pretend import SEEN as seen
        from tests.vllm.pretend import pretend

    for job in json.loads(Path(sys.argv[1]).read_text()):
        if "--cuda" in sys.argv:
            seen.clear()
            pretend(job.get("variable"))
        answers.append({**run(job), "seen": sorted(seen)})
        gc.collect()
    Path(sys.argv[2]).write_text(json.dumps(answers))
