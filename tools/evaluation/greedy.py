"""Greedy text from a batch of prompts of different lengths, in one turn or in two."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpatch import Patch
from kvpatch.errors import KVPatchError

from .task import Request, Subject, Task

Tokens = list[int]


def padded(rows: list[Tokens], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one batch, padded on the left, and its mask."""
    width = max(len(row) for row in rows)
    ids_BT = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids_BT, mask_BT


def ends(subject: Subject) -> set[int]:
    """The tokens after which a text is over."""
    found = getattr(subject.model.generation_config, "eos_token_id", None)
    found = getattr(subject.tokenizer, "eos_token_id", None) if found is None else found
    return set(found if isinstance(found, list) else [] if found is None else [found])


@torch.no_grad()
def generate(
    subject: Subject, prompts: list[Tokens], new: int, first: int | None = None, patch: Patch | None = None
) -> list[Tokens]:
    """What the model writes after each prompt, at most `new` tokens, with the one that ends it.

    first: all but the last `first` tokens of each prompt are read as a turn of their own, before the rest is seen.
    """
    model: Any = subject.model
    stop, pad = ends(subject), getattr(subject.tokenizer, "pad_token_id", None)
    pad = pad if pad is not None else min(stop, default=0)
    ids_BT, mask_BT = padded(prompts, pad, model.device)
    given: dict[str, Any] = {}
    if first is not None:
        past = patch.new_cache() if patch is not None else DynamicCache(config=model.config)
        given["past_key_values"] = _read(model, ids_BT[:, :-first], mask_BT[:, :-first], past)
    out_BT = model.generate(
        ids_BT, attention_mask=mask_BT, max_new_tokens=new, do_sample=False, pad_token_id=pad,
        eos_token_id=sorted(stop) or None, **given,
    )  # fmt: skip
    written = out_BT[:, ids_BT.shape[1] :].tolist()
    return [row[: next((i + 1 for i, token in enumerate(row) if token in stop), len(row))] for row in written]


def _read(model: Any, ids_BT: Tensor, mask_BT: Tensor, past: Any) -> Any:
    """A cache that has seen these tokens."""
    known = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0), "logits_to_keep": 1}
    given = {name: value for name, value in given.items() if name in known}
    return model(ids_BT, attention_mask=mask_BT, past_key_values=past, use_cache=True, **given).past_key_values


def number(task: Task, request: Request, name: str, otherwise: int) -> int:
    """An option that is a number of tokens. Raises KVPatchError where it is none."""
    value = task.option(request, name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KVPatchError(f"-o {name}={value} must be a number of tokens, at least 1.")
    return value
