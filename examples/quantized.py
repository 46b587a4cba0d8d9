"""Weights in eight bits by torchao, keys and values on a budget.

    python -m examples.quantized

Nothing is special: projections are called as modules. CriticalKV, which weighs tokens by what the output projection makes of
their values, asks a quantized projection what it does to unit vectors.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT = "import os\n\n\ndef names(folder):\n    found = []\n    for name in os.listdir(folder):\n        path = "


def restored(model: Any) -> Any:
    """The model with what its quantized weights stand for."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


def main(model_name: str = str(MODELS / "llama-python"), k: Any = 0.4) -> dict[str, Any]:
    """By policy: how far logits are from those of the same weights written out, and are both caches alike?"""
    inputs = load_tokenizer(model_name)(PROMPT, return_tensors="pt", return_token_type_ids=False)
    small, plain = load_model(model_name, "float32"), load_model(model_name, "float32")
    for model in (small, plain):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # it stays as it is, as embeddings do
        quantize_(model.model, Int8WeightOnlyConfig())
    restored(plain)
    found = {}
    for policy, options in {"h2o": {}, "keyformer": {}, "critical_adakv": {"window": 8}}.items():
        runs = []
        for model in (small, plain):
            with kvpatch.patched(model, policy, k, **options), torch.no_grad():
                out = model(**inputs)
            cache = out.past_key_values
            runs.append((out.logits, [cache.positions(layer).sort(-1).values for layer in range(len(cache.layers))]))
        difference = float((runs[0][0] - runs[1][0]).abs().max())
        alike = all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
        found[policy] = {"difference": difference, "same tokens kept": alike}
        print(f"{policy:15} logits within {difference:.1e}, {'the same' if alike else 'other'} tokens kept")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
