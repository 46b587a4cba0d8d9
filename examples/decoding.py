"""Every way to pick tokens that generate() has, under one budget, beside the unpatched model.

python -m examples.decoding -k 0.5
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import WatermarkingConfig, set_seed

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer, parse_k

PROMPT = (
    "import json\nimport os\n\n\ndef read(path):\n    with open(path) as file:\n        return json.load(file)\n\n\n"
    "def write(path, data):\n    with open(path, 'w') as file:\n        return json."
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "nucleus": {"do_sample": True, "top_p": 0.9, "typical_p": 0.95},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "sequence bias": {"do_sample": False, "sequence_bias": [[[7], 4.0]]},
    "watermark": {"do_sample": False, "watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "guidance": {"do_sample": False, "guidance_scale": 1.5},
    "prompt in chunks": {"do_sample": False, "prefill_chunk_size": 16},
    "stop strings": {"do_sample": False, "stop_strings": ["("]},
}


def run(model: Any, inputs: Any, strategy: dict[str, Any], tokenizer: Any, new: int) -> torch.Tensor:
    set_seed(0)
    extra = {"tokenizer": tokenizer} if "stop_strings" in strategy else {}
    return model.generate(**inputs, max_new_tokens=new, **strategy, **extra)


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 0.5, new: int = 12) -> dict[str, Any]:
    """Per strategy: is the text the unpatched model's, and the most tokens that a head held."""
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    plain = {name: run(model, inputs, strategy, tokenizer, new) for name, strategy in STRATEGIES.items()}
    results: dict[str, Any] = {}
    with kvpatch.patched(model, policy, k) as patch:
        for name, strategy in STRATEGIES.items():
            out = run(model, inputs, strategy, tokenizer, new)
            results[name] = {"same": torch.equal(out, plain[name]), "held": int(patch.report().held().max())}
            text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
            print(f"{name:17} {'=' if results[name]['same'] else ' '} {results[name]['held']:3} held  {text!r}")
    return {"results": results, "read": inputs["input_ids"].shape[1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    parser.add_argument("-k", type=parse_k, default=0.5)
    given = parser.parse_args()
    main(given.model, k=given.k)
