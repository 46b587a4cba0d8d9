"""A chat on one cache, by patch.chat(): each turn reads only what is new, and the budget is the whole conversation's.

    python -m examples.chat

The template's markers are never evicted. The model here writes Python and has no template: any template does that the tokenizer
has tokens for.
"""

from __future__ import annotations

import argparse
from typing import Any

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<bos># system\nYou write Python.<eos>' }}{% endif %}"
    "{% for message in messages %}{{ '<bos># ' + message['role'] + '\n' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos># assistant\n' }}{% endif %}"
)
TURNS = [
    "Write a function that reads a JSON file and returns what is in it, with a docstring and a type for every argument.",
    "Now one that writes it, and that makes the folder where there is none.",
    "And a test for both.",
]


def main(
    model_name: str = str(MODELS / "llama-python"),
    policy: str = "streaming_llm",
    k: Any = 48,
    new: int = 10,
    template: str = TEMPLATE,
) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = template
    markers = tokenizer.convert_tokens_to_ids([tokenizer.bos_token, tokenizer.eos_token])
    with kvpatch.patched(model, policy, k, protect=markers) as patch:
        chat = patch.chat(tokenizer, max_new_tokens=new, do_sample=False)
        for turn in TURNS:
            answer = chat.send(turn)
            print(f"{turn}\n  {answer!r}\n  {int(chat.cache.held(0).max())} of {chat.ids.shape[1]} tokens held")
    cache = chat.cache
    whole = tokenizer.apply_chat_template(chat.messages, tokenize=False)
    return {
        "text": chat.ids, "read": tokenizer.decode(chat.ids[0]), "whole": whole, "markers": markers, "held": cache.held(0),
        "positions": cache.positions(0),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
