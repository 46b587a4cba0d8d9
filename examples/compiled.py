"""A compiled decode step under a budget, beside the same step uncompiled.

    python -m examples.compiled --backend inductor

On a GPU `generate(..., compile_config=CompileConfig())` does it by itself; on a CPU transformers leaves it, and a loop does.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv[1:]:\n        if os.path."


def decode(patch: kvpatch.Patch, model: Any, step: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, Any]:
    """The prompt uncompiled, then `new` tokens by `step`: logits of every token."""
    cache = patch.new_cache(room=new)
    logits = [model(ids, past_key_values=cache).logits[:, -1:]]
    for _ in range(new):
        logits.append(step(logits[-1].argmax(-1), past_key_values=cache).logits)
    return torch.cat(logits, 1), cache


def main(
    model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 0.5, new: int = 8,
    backend: str = "inductor",
) -> dict[str, Any]:  # fmt: skip
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with kvpatch.patched(model, policy, k) as patch, torch.no_grad():
        want, plain = decode(patch, model, model, ids, new)
        step = torch.compile(model.forward, fullgraph=True, backend=backend)
        got, cache = decode(patch, model, step, ids, new)
    difference = float((want - got).abs().max())
    print(f"{new} compiled steps, logits within {difference:.1e} of uncompiled ones; {int(cache.held(0)[0, 0])} tokens held")
    print(repr(tokenizer.decode(got.argmax(-1)[0])))
    return {"difference": difference, "held": cache.held(0), "plain": plain.held(0), "seen": cache.get_seq_length()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    parser.add_argument("--backend", default="inductor")
    given = parser.parse_args()
    main(given.model, backend=given.backend)
