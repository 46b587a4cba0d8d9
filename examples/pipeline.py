"""transformers' pipeline inside the block: it calls generate(), which finds a budget.

python -m examples.pipeline --policy h2o -k 0.5
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import pipeline

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer, parse_k

PROMPTS = [
    'import json\n\n\ndef load(path):\n    """Read a JSON file."""\n    with open(path) as file:\n        return json.',
    "import os\n\n\nclass Folder:\n    def __init__(self, path):\n        self.path = path\n\n    def names(self):\n"
    "        return sorted(os.",
]


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 0.5, new: int = 12) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    tokenizer.padding_side = "left"
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": new, "do_sample": False, "return_full_text": False}
    plain = [answer[0]["generated_text"] for answer in write(PROMPTS, batch_size=2, **options)]
    with kvpatch.patched(model, policy, k) as patch:
        texts = [answer[0]["generated_text"] for answer in write(PROMPTS, batch_size=2, **options)]
        report = patch.report()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(prompt + text, end="\n\n")
    print(report)
    return {"texts": texts, "plain": plain, "held": report.held()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("-k", type=parse_k, default=0.5)
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    main(given.model, given.policy, given.k)
