"""Ask one engine of whichever vLLM is found first: `python -m tests.vllm.plain job.json answer.json`.

The engine runs in a process of its own, as vLLM's usually do. The answer has vLLM's version, the tokens, the classes of the
attention of its layers, the modules of kvpatch that the engine has loaded, and kvpatch's figures among those of this process;
or the error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # look() is sent to the engine's process
    GLOO_SOCKET_IFNAME="lo",
)


def look(model: Any) -> dict[str, list[str]]:
    """Name classes and modules in the process of a model."""
    layers = [module for module in model.modules() if hasattr(module, "impl")]
    parts = [type(layer.impl) for layer in layers] + [layer.attn_backend for layer in layers]
    classes = {f"{part.__module__}.{part.__qualname__}" for part in parts}
    return {"classes": sorted(classes), "loaded": sorted(name for name in sys.modules if name.startswith("kvpatch"))}


def ask(job: dict[str, Any]) -> dict[str, Any]:
    """Answer the job: {model, prompts, new, options}."""
    import vllm

    from tests.vllm import plain  # the engine's process imports look() by this name, and has another __main__

    usual = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
    try:
        engine = vllm.LLM(model=job["model"], **usual, **job["options"])
    except Exception as error:
        return {"version": vllm.__version__, "error": f"{type(error).__name__}: {error}"}
    sampling = vllm.SamplingParams(detokenize=False, ignore_eos=True, max_tokens=job["new"], temperature=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    answer = {"version": vllm.__version__, "tokens": tokens, **engine.apply_model(plain.look)[0]}
    return {**answer, "figures": read_figures()}


def read_figures() -> dict[str, float]:
    """Read kvpatch's figures where vLLM's are told."""
    from prometheus_client import REGISTRY, generate_latest

    lines = generate_latest(REGISTRY).decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("kvpatch_"))}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(ask(json.loads(Path(sys.argv[1]).read_text()))))
