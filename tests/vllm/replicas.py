"""Ask several engines of vLLM that one server has: `python -m tests.vllm.replicas job.json answer.json`.

Each engine runs in a process of its own, and gets every other prompt. The answer has the tokens, how many requests each engine
has ended by its own count, and kvpatch's figures, which are of all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.vllm.plain import read_figures


async def ask(job: dict[str, Any]) -> dict[str, Any]:
    """Answer the job: {model, prompts, new, engines, settings}."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    usual = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
    config = {"data_parallel_size": job["engines"], "additional_config": {"kvpatch": job["settings"]}}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=job["model"], **usual, **config))
    sampling = SamplingParams(detokenize=False, ignore_eos=True, max_tokens=job["new"], temperature=0)

    async def answer(index: int, ids: list[int]) -> list[int]:
        rank = index % job["engines"]
        outputs = engine.generate({"prompt_token_ids": ids}, sampling, str(index), data_parallel_rank=rank)
        return [list(output.outputs[0].token_ids) async for output in outputs][-1]

    try:
        tokens = await asyncio.gather(*(answer(index, ids) for index, ids in enumerate(job["prompts"])))
        return {"tokens": tokens, "ended": count_ended(), "figures": read_figures()}
    finally:
        engine.shutdown()


def count_ended() -> list[int]:
    """Count the requests that each engine has ended, in the file that it counts in."""
    from prometheus_client.mmap_dict import MmapedDict

    from kvpatch.serving.vllm.figures import FOLDER

    files = [MmapedDict.read_all_values_from_file(str(one)) for one in Path(os.environ[FOLDER]).glob("counter_*.db")]
    counts = [{json.loads(key)[1]: value for key, value, *_ in file} for file in files]
    return sorted(int(one["kvpatch_ended_requests_total"]) for one in counts)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(ask(json.loads(Path(sys.argv[1]).read_text())))))
