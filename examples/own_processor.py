"""Code of your own inside generate(): a logits processor, a stopping criterion, and a decoding loop (custom_generate).

python -m examples.own_processor
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT = "import os\nimport json\n\n\ndef load(path):\n    with open(path) as file:\n        return "


class NeverTwice(LogitsProcessor):
    """A generated token is not generated again."""

    def __init__(self, read: int) -> None:
        self.read = read

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, self.read :], -float("inf"))


class After(StoppingCriteria):
    """Stop behind so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.tokens)


def second_best(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **given: Any) -> Tensor:
    """A loop that takes the second likeliest token; the cache is the block's own."""
    name = "cache" if "cache" in given else "past_key_values"  # before transformers 5.24
    new = input_ids
    while not stopping_criteria(input_ids, None).all():
        logits = model(new, **{name: given[name]}, use_cache=True).logits[:, -1]
        new = logits_processor(input_ids, logits).topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, new], 1)
    return input_ids


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 0.5, new: int = 10) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    read = inputs["input_ids"].shape[1]
    options = {
        "max_new_tokens": 2 * new,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([NeverTwice(read)]),
        "stopping_criteria": StoppingCriteriaList([After(read + new)]),
    }
    with kvpatch.patched(model, policy, k) as patch:
        greedy = model.generate(**inputs, **options)
        second = model.generate(**inputs, **options, custom_generate=second_best)
        held = patch.report().held()
    for out in (greedy, second):
        print(repr(tokenizer.decode(out[0, read:])))
    return {"greedy": greedy[0, read:].tolist(), "second": second[0, read:].tolist(), "held": held, "read": read}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
