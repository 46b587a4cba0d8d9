"""Implementation of `kvpatch generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from ..patching import patched
from ..policies import Policy
from .loading import Source, fit_prompt
from .output import print_json, print_note, print_waiting

MARK = "---- what was kept ----"
"""Line between the text and the report."""


def list_arguments(new: int, temperature: float | None = None, top_p: float | None = None) -> dict[str, Any]:
    """Return arguments of generate() for the command `generate`: greedy at temperature 0, or without temperature and top_p."""
    if temperature == 0 or (temperature is None and top_p is None):
        return {"max_new_tokens": new, "do_sample": False}
    temperature, top_p = (1.0 if one is None else one for one in (temperature, top_p))
    return {"max_new_tokens": new, "do_sample": True, "temperature": temperature, "top_p": top_p}


def run(
    source: Source, text: str, raw: bool, policy: Policy, k: Any, settings: dict[str, Any], how: dict[str, Any], json: bool
) -> None:
    """Generate from `text` and print the new text and the report of kept tokens, or both as JSON; seeds torch's generator.

    `generate` (the command) calls it. raw: feed the text without a chat template. settings: keyword arguments of `patched`.
    how: as `list_arguments` returns them. The model is unpatched again at the end.

    Raises:
        KVPatchError: the model or its tokenizer cannot be loaded, the prompt does not fit, or `patched` refuses a setting.
    """
    model, tokenizer = source.model(), source.tokenizer()
    ids_1T, message = encode_message(model, tokenizer, text, raw, how["max_new_tokens"])
    if message:
        print_note(message)
    streamer = None if json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    # the model reads and generates under the patch, which is removed at the end of the block
    torch.manual_seed(settings["seed"])
    with patched(model, policy, k, **settings) as patch:
        print_waiting(f"reading {ids_1T.shape[1]:,} tokens ...\n")
        new_1T = continue_ids(model, ids_1T, streamer=streamer, **how)
    report = patch.report()
    if json:
        message = tokenizer.decode(new_1T[0], skip_special_tokens=True)
        print_json({"model": source.name, "text": message, "new_tokens": new_1T.shape[1], "report": report.to_dict()})
        return
    print(f"\n{MARK}\n{report}\n\nfrom the first token to the last, a line per layer:\n{report.strip()}")


def continue_ids(model: Any, ids_1T: Tensor, **arguments: Any) -> Tensor:
    """Return the tokens [1,m] that a model writes after a text, for `generate`, `compare` and `demo`; arguments: of generate().

    A model without a padding token is given 0 for it, which a single row never uses.
    """
    padding = model.generation_config.pad_token_id
    arguments["pad_token_id"] = 0 if padding is None else padding
    out_1T = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **arguments)
    return out_1T[:, ids_1T.shape[1] :]


def encode_message(model: Any, tokenizer: Any, text: str, raw: bool, new: int) -> tuple[Tensor, str]:
    """Encode a command's prompt: as a user's message if there is a chat template and `raw` is False, else as it is.

    `run` of `kvpatch generate` and `read_text` of `compare` call it. Returns token ids [1,n] that leave room for `new` tokens,
    and a sentence about omitted tokens, or "".

    Raises:
        KVPatchError: the whole prompt would be omitted, or the tokenizer belongs to another model.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return fit_prompt(model, tokenizer(text, return_tensors="pt").input_ids.long(), new)
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    print_waiting("the text goes through the model's chat template; --raw feeds it as it is")
    return fit_prompt(model, encoded["input_ids"].long(), new)
