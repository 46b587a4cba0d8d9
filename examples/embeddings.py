"""A prompt of embeddings, such as a soft prompt or an image's, and a second call that goes on from the first one's cache.

python -m examples.embeddings
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT, MORE = "import os\nimport sys\n\n\ndef main():\n    print(", "\n\n\nif __name__ == '__main__':\n    "


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "snapkv", k: Any = 0.5, new: int = 8) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    ids, more = (tokenizer(text, return_tensors="pt").input_ids for text in (PROMPT, MORE))
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with kvpatch.patched(model, policy, k, window=4), torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        soft = model.generate(inputs_embeds=embeds, **options)  # returns the new tokens only
        both = model.generate(input_ids=ids, inputs_embeds=embeds, **options)
        plain = model.generate(ids, **options)
        text = torch.cat([plain.sequences, more], 1)
        again = model.generate(text, past_key_values=plain.past_key_values, **options)
    for out in (soft, both, plain, again):
        print(repr(tokenizer.decode(out.sequences[0])))
    logits = {name: torch.stack(out.logits) for name, out in {"soft": soft, "both": both, "plain": plain}.items()}
    return {"logits": logits, "again": again.sequences, "seen": again.past_key_values.get_seq_length(),
            "held": again.past_key_values.held(0)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
