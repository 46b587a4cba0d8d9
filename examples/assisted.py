"""Assisted decoding under a budget: what a draft evicted comes back when the draft is taken back.

    python -m examples.assisted

The assistant may be a model of another size, unpatched or on a budget of its own, or the model itself.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT = (
    "import os\n\n\ndef names(folder):\n    found = []\n    for name in os.listdir(folder):\n"
    "        path = os.path.join(folder, name)\n        if os.path.isfile(path):\n            found."
)


def smaller(model: Any) -> Any:
    """The model's first layer and its own embeddings: a draft model that costs nothing to make."""
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1})
    assistant = LlamaForCausalLM(config).eval()
    assistant.load_state_dict(model.state_dict(), strict=False)
    return assistant


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 0.4, new: int = 16) -> dict[str, Any]:
    """Largest difference to the logits without assistance, by who assists."""
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    assistant, unsure = smaller(model), smaller(model)
    unsure.generation_config.assistant_confidence_threshold = 0.3  # drafts end where the assistant is unsure
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    difference: dict[str, float] = {}
    with kvpatch.patched(model, policy, k), kvpatch.patched(assistant, "window", 16):
        plain = model.generate(**inputs, **options)
        for name, helper in {
            "a smaller model, on a budget": {"assistant_model": assistant},
            "a smaller model, unsure": {"assistant_model": unsure},
            "its own first layers": {"assistant_early_exit": 1},
            "the model itself": {"assistant_model": model},
            "prompt lookup": {"prompt_lookup_num_tokens": 4},
        }.items():
            out = model.generate(**inputs, **options, **helper)
            assert torch.equal(out.sequences, plain.sequences)
            difference[name] = max(float((a - b).abs().max()) for a, b in zip(out.logits, plain.logits, strict=True))
            print(f"{name:30} logits within {difference[name]:.1e}")
    print(tokenizer.decode(plain.sequences[0, inputs["input_ids"].shape[1] :]))
    return {"difference": difference, "held": plain.past_key_values.held(0)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
