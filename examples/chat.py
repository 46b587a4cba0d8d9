"""A chat whose template's markers are never evicted: one cache for all turns, each turn's prompt is compressed as it comes.

    python -m examples.chat

The model here writes Python, and has no template of its own: any template does that the tokenizer has tokens for.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<bos># ' + message['role'] + '\n' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos># assistant\n' }}{% endif %}"
)
TURNS = [
    "Write a function that reads a JSON file and returns what is in it, with a docstring and a type for every argument.",
    "Now one that writes it, and that makes the folder where there is none.",
    "And a test for both.",
]


def main(
    model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 48, new: int = 10
) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    markers = tokenizer.convert_tokens_to_ids([tokenizer.bos_token, tokenizer.eos_token])
    text = torch.empty(1, 0, dtype=torch.long)
    with kvpatch.patched(model, policy, k, protect=markers) as patch:
        cache = patch.new_cache()
        for turn in TURNS:
            message = [{"role": "user", "content": turn}]
            asked = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            text = torch.cat([text, asked["input_ids"]], 1)
            n = text.shape[1]
            text = model.generate(text, past_key_values=cache, max_new_tokens=new, do_sample=False)
            print(f"{turn}\n  {tokenizer.decode(text[0, n:])!r}\n  {int(cache.held(0).max())} of {text.shape[1]} tokens held")
    return {"text": text, "markers": markers, "held": cache.held(0), "positions": cache.positions(0)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
