"""A model that does not fit: accelerate brings each layer's weights from memory or disk when the layer runs.

    python -m examples.offloading

Hooks that were there before the block work inside it, and each layer's cache lies where the layer computes. On a machine with
GPUs, device_map="auto" does what the hand-written map does here.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT = "import os\n\n\ndef names(folder):\n    found = []\n    for name in os.listdir(folder):\n        path = "


def by_map(model: Any, folder: str) -> None:
    """Every other layer on disk."""
    layers = model.model.layers
    device_map = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(len(layers))}
    device_map |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    dispatch_model(model, device_map, main_device="cpu", offload_dir=folder)


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "critical_adakv", k: Any = 0.4) -> dict[str, Any]:
    """Largest difference of logits to the model in memory, and where caches lie, by who offloads."""
    inputs = load_tokenizer(model_name)(PROMPT, return_tensors="pt", return_token_type_ids=False)

    def logits(model: Any) -> tuple[torch.Tensor, set[str]]:
        with kvpatch.patched(model, policy, k, window=8):
            out = model.generate(**inputs, max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
        return torch.cat(out.logits), {str(layer.keys.device) for layer in out.past_key_values.layers}

    expected, _ = logits(load_model(model_name, "float32"))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, offload in {
            "cpu_offload": lambda model: cpu_offload(model, torch.device("cpu")),
            "disk_offload": lambda model: disk_offload(model, folder, torch.device("cpu")),
            "a device_map": lambda model: by_map(model, folder),
        }.items():
            model = load_model(model_name, "float32")
            offload(model)
            away = sum(parameter.is_meta for parameter in model.parameters())
            got, devices = logits(model)
            difference = float((got - expected).abs().max())
            found[name] = {"difference": difference, "caches": devices, "away": away}
            print(f"{name:12} {away} weights away, caches on {', '.join(devices)}, logits within {difference:.1e}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
