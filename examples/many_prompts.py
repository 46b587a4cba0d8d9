"""One patch, many calls: prompts of other lengths and batch sizes, each with a cache of its own size.

python -m examples.many_prompts
"""

from __future__ import annotations

import argparse
from typing import Any

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPTS = [
    "import os\nimport sys\nimport json\nimport re\n",
    "def add(a, b):\n    return a",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
]


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "h2o", k: Any = 0.5, new: int = 8) -> dict[str, Any]:
    """The texts of each prompt alone and of all in one left-padded batch, and what was held."""
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    tokenizer.padding_side = "left"
    options = {"max_new_tokens": new, "do_sample": False}
    alone, held = [], []
    with kvpatch.patched(model, policy, k, recent=2) as patch:
        for prompt in PROMPTS:
            inputs = tokenizer([prompt], return_tensors="pt", return_token_type_ids=False)
            out = model.generate(**inputs, **options)
            alone.append(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))
            held.append(int(patch.report().held().max()))
        batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
        out = model.generate(**batch, **options)
        together = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
        rows = patch.report().held().amax((0, 2)).tolist()
    for prompt, text, n in zip(PROMPTS, together, rows, strict=True):
        print(f"{n:3} tokens held: {prompt!r} -> {text!r}")
    return {"alone": alone, "together": together, "held": held, "rows": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
