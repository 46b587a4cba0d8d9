"""A chat on one cache: the template renders the whole conversation in each turn, and only the new part of it is read.

    python -m examples.chat

The template's markers are never evicted. The model here writes Python and has no template: any template does that the tokenizer
has tokens for.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

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


class Chat:
    """A conversation: its messages, the text and the ids that the cache has read, and the cache."""

    def __init__(self, model: Any, tokenizer: Any, patch: kvpatch.Patch) -> None:
        self.model, self.tokenizer, self.patch = model, tokenizer, patch
        self.messages: list[dict[str, str]] = []
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was read, for a template that changes an earlier turn, such as one that drops its reasoning."""
        self.text, self.ids, self.cache = "", torch.empty(1, 0, dtype=torch.long), self.patch.new_cache()

    def ask(self, message: str, new: int) -> str:
        """Add a user's message and the model's answer."""
        self.messages.append({"role": "user", "content": message})
        prompt = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        if not prompt.startswith(self.text):
            self.begin_again()
        unread = self.tokenizer(prompt[len(self.text) :], return_tensors="pt", add_special_tokens=False).input_ids
        asked = torch.cat([self.ids, unread], 1)
        self.ids = self.model.generate(asked, past_key_values=self.cache, max_new_tokens=new, do_sample=False)
        written = self.ids[0, asked.shape[1] :]
        self.text = prompt + self.tokenizer.decode(written)
        self.messages.append({"role": "assistant", "content": self.tokenizer.decode(written, skip_special_tokens=True)})
        return self.messages[-1]["content"]


def main(
    model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 48, new: int = 10, template: str = TEMPLATE
) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = template
    markers = tokenizer.convert_tokens_to_ids([tokenizer.bos_token, tokenizer.eos_token])
    with kvpatch.patched(model, policy, k, protect=markers) as patch:
        chat = Chat(model, tokenizer, patch)
        for turn in TURNS:
            answer = chat.ask(turn, new)
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
