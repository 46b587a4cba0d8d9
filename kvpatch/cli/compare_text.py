"""Texts of `kvpatch compare`: a prompt, and what is fed after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..serving.edits import count_common
from .generating import continue_ids, encode_message

LEAST = 8
"""Fewest tokens of a prompt; a shorter one leaves nothing to choose from."""


class ComparedText(NamedTuple):
    """Text of a comparison.

    Attributes:
        ids_1T: tokens of the prompt, and after its n tokens those that are fed.
        n: tokens of the prompt.
        notes: sentences about omitted tokens.
        asked: tokens of a question that are fed first.
    """

    ids_1T: Tensor
    n: int
    notes: list[str]
    asked: int = 0


def read_text(
    model: Any, tokenizer: Any, prompt: str, continuation: str | None, new: int, raw: bool = False, later: str | None = None
) -> ComparedText:
    """Encode one text for `compare`: the prompt's tokens, and those that are fed after it one by one.

    `run` calls it for each text before it measures any. With `later`, that question is fed first, when the prompt has been
    evicted; `asked` of the result counts its tokens. The first tokens of prompt and question together that equal the prompt's
    alone then count as the prompt.

    Args:
        model: the unpatched model.
        tokenizer: of the model.
        prompt: text of the prompt.
        continuation: text to feed; None for the unpatched model's greedy continuation.
        new: tokens to feed after the question, at most.
        raw: whether the prompt is fed without the model's chat template.
        later: a question to feed before the continuation.

    Raises:
        KVPatchError: the prompt is too short, there is nothing to feed after it or no room for that, or the tokenizer belongs
            to another model.
    """
    fed = None
    if continuation is not None:
        fed = tokenizer(continuation, add_special_tokens=False, return_tensors="pt").input_ids.long()
    if fed is not None and (not fed.numel() or int(fed.max()) >= model.get_input_embeddings().num_embeddings):
        raise KVPatchError("--continuation-file: the tokenizer makes no tokens of it that this model knows.")
    notes = []
    if fed is not None and fed.shape[1] > new:
        notes.append(f"The continuation has {fed.shape[1]:,} tokens: the first {new:,} are fed (--max-new-tokens).")
    # the prompt, with the later question after it, in the positions that the fed tokens leave
    room = new if fed is None else min(new, fed.shape[1])
    ids, note = encode_message(model, tokenizer, prompt if later is None else f"{prompt.rstrip()}\n\n{later}", raw, room)
    n = ids.shape[1]
    if later is not None:
        if note:
            raise KVPatchError(f"--later: the text and its question do not fit. {note}")
        alone = encode_message(model, tokenizer, prompt.rstrip(), raw, room)[0]  # without the question
        n = count_common(ids[0].tolist(), alone[0].tolist())
    if n < LEAST:
        raise KVPatchError(f"The prompt has {n} tokens; with fewer than {LEAST} there is nothing to choose from.")
    fed = _continue_greedily(model, ids, new) if fed is None else fed[:, :new].to(ids.device)
    return ComparedText(torch.cat([ids, fed], 1), n, [note] * bool(note) + notes, ids.shape[1] - n)


def _continue_greedily(model: Any, ids_1T: Tensor, new: int) -> Tensor:
    """Generate a continuation [1,m] greedily by the unpatched model, without its end token; raise KVPatchError if it is empty.

    `read_text` calls it for a text for which the user gives no continuation.
    """
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    fed = continue_ids(model, ids_1T, max_new_tokens=new, do_sample=False, num_beams=1)
    if int(fed[0, -1]) in ends:  # predictions after the end of a text say nothing about it
        fed = fed[:, :-1]
    if not fed.numel():
        raise KVPatchError("The model ends its text right after this prompt: give one to feed with --continuation-file.")
    return fed
