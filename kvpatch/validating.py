"""What a caller hands to a cache, checked before anything changes; each error says what to type instead."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import KVPatchError, suggest
from .policies import Policy
from .policies.budgets import Budget

BUDGETS = ("budget", "ratio", "compression_ratio", "cache_size")  # what others call k
EMPTY = "The cache is empty, so that it has no rows yet: run a prompt through it first."


def made_of(policy: object, budget: object) -> None:
    if not isinstance(policy, Policy) or not isinstance(budget, Budget):
        raise KVPatchError(
            f"EvictingCache({policy!r}, {budget!r}) is made of a Policy and a Budget, by a patch: use Patch.new_cache()."
        )


def no_argument(policy: Policy, options: dict[str, Any], arguments: Sequence[str]) -> None:
    """Raise KVPatchError for a slip in the name of one of patched()'s own `arguments`."""
    known = policy.options()
    for name in [name for name in options if name not in known]:
        if name in BUDGETS:
            raise KVPatchError(
                f"patched() has no option {name!r}: the budget is k, the share or the number of tokens that are kept, such as "
                "k=0.5 or k=1024."
            )
        meant = suggest(name, (*known, *arguments)) or suggest(name.lower(), (*known, *arguments))
        if any(repr(argument) in meant for argument in arguments):
            raise KVPatchError(f"patched() has no option {name!r}.{meant}")


def layer_of(name: str, layer: object, count: int) -> None:
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise KVPatchError(f"{name}={layer!r}: the cache has the layers 0 to {count - 1}, give one of these.")


def filled(is_filled: bool) -> None:
    if not is_filled:
        raise KVPatchError(EMPTY)


# ---- rows of a batch ----


def beams(beam_idx: object, seen_B: Tensor | None) -> None:
    """As many rows as there are, each one that there is."""
    index = _index("beam_idx", beam_idx, (torch.int64, torch.int32))
    if seen_B is None:
        return
    B = len(seen_B)
    if len(index) != B:
        raise KVPatchError(
            f"beam_idx names {len(index)} rows, but the cache has {B}, and a reordered batch has as many: to drop or repeat "
            "rows use batch_select_indices() or batch_repeat_interleave()."
        )
    _in_range("beam_idx", index, 0, B)


def rows(indices: object, seen_B: Tensor | None) -> None:
    """Rows to keep: indices, or a mask over the batch."""
    given = torch.as_tensor(indices) if isinstance(indices, list) and indices else indices
    index = _index("indices", given, (torch.int64, torch.int32, torch.bool))
    if seen_B is None:
        return
    B = len(seen_B)
    if index.dtype == torch.bool and len(index) != B:
        raise KVPatchError(f"indices is a mask of {len(index)} rows, but the cache has {B}: give an entry for each.")
    if not (index.any() if index.dtype == torch.bool else len(index)):
        raise KVPatchError("batch_select_indices would leave no row: let the cache go, or reset() it.")
    if index.dtype != torch.bool:
        _in_range("indices", index, -B, B)


def _index(name: str, value: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    wanted = f"give an int64 tensor of row numbers{' or a bool mask' * (torch.bool in dtypes)}, such as torch.tensor([1, 0])."
    if not isinstance(value, Tensor):
        raise KVPatchError(f"{name}={value!r} is a {type(value).__name__}: {wanted}")
    if value.dtype not in dtypes:
        raise KVPatchError(f"{name} has dtype {value.dtype}: {wanted}")
    if value.ndim != 1:
        raise KVPatchError(f"{name} has shape {list(value.shape)}: {wanted}")
    real(name, value)
    return value


def _in_range(name: str, index: Tensor, low: int, B: int) -> None:
    if not at_hand(index):
        return  # checked on the device by the copy itself, without waiting for it
    wrong = index[(index < low) | (index >= B)]
    if len(wrong):
        raise KVPatchError(f"{name} names row {int(wrong[0])}, but the cache has the rows 0 to {B - 1}: give some of these.")


# ---- tokens ----


def removal(tokens: object, seen: int) -> int:
    """How many of the last tokens crop() is to take back, from either meaning of its argument."""
    one = tokens.item() if isinstance(tokens, Tensor) and tokens.numel() == 1 else tokens
    if isinstance(one, bool) or not isinstance(one, int):
        raise KVPatchError(
            f"tokens_to_remove={tokens!r} must be a whole number: -3 takes back 3 tokens. To empty the cache use reset()."
        )
    count = -one if one <= 0 else max(seen - one, 0)
    if count > seen:
        raise KVPatchError(f"Cannot roll back {count} tokens: the cache has seen {seen}. Give at most so many, or reset() it.")
    return count


def at_hand(tensor: Tensor) -> bool:
    """Whether its numbers can be looked at without waiting for a device."""
    return tensor.device.type == "cpu"


def real(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise KVPatchError(f"{name} lies on the meta device, which holds no numbers: give a tensor of a real device.")


def tokens(call: dict[str, Any], decoder: Any) -> Tensor | None:
    """input_ids [B,Q] or inputs_embeds [B,Q,E] of a pass; None where the model's own error is the right one."""
    ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return None
    name, value, shape = ("input_ids", ids, "[B, tokens]") if embeds is None else ("inputs_embeds", embeds, "[B, tokens, E]")
    if not isinstance(value, Tensor):
        raise KVPatchError(f"{name} is a {type(value).__name__}: give a tensor {shape}, as torch.tensor(...) makes.")
    table = getattr(decoder, "get_input_embeddings", lambda: None)()
    width = getattr(table, "embedding_dim", None)
    if embeds is not None:
        wrong = value.ndim != 3 or (width is not None and value.shape[-1] != width) or not value.is_floating_point()
        sizes, kind = f" with E = {width}" * (width is not None), "floating-point numbers"
    else:
        wrong = value.ndim != 2 or value.dtype not in (torch.int64, torch.int32)
        sizes, kind = "", "token ids (int64)"
    if wrong:
        raise KVPatchError(f"{name} is {value.dtype} of shape {list(value.shape)}: give {kind} {shape}{sizes}.")
    if not value.shape[0]:
        raise KVPatchError(f"{name} has shape {list(value.shape)}, which is no row: give at least one.")
    real(name, value)
    known = getattr(table, "num_embeddings", None)
    if embeds is None and known is not None and at_hand(value) and value.numel():
        low, high = (int(one) for one in value.aminmax())
        if low < 0 or high >= known:
            raise KVPatchError(
                f"input_ids hold token {low if low < 0 else high}, but the model knows {known}: give ids of 0 to {known - 1}, "
                "from the model's own tokenizer."
            )
    return value


def padding_mask(mask: object, B: int, prompt: bool) -> Tensor | None:
    """The caller's attention_mask [B,tokens] of ones and zeros, or None."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise KVPatchError(
            f"attention_mask must be a padding mask [B, tokens], not {shape}: a custom attention pattern cannot be kept "
            "under a budget. Give 1 for tokens and 0 for padding."
        )
    real("attention_mask", mask)
    if mask.shape[0] not in (1, B):
        raise KVPatchError(f"attention_mask has {mask.shape[0]} rows, but the input has {B}: give one for each.")
    if mask.dtype != torch.bool and (prompt or at_hand(mask)):  # reading it waits for the device
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            raise KVPatchError(
                f"attention_mask holds {wrong[0].item():g}; give 1 for tokens and 0 for padding, not what is added to logits."
            )
    return mask


def mask_columns(mask: object, new: int, seen: int) -> None:
    """Of generate(): over the tokens that it is given, or over these and what the cache has seen."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] not in (new, seen + new):
        raise KVPatchError(
            f"attention_mask has {mask.shape[1]} columns, but {seen} tokens were seen and {new} are given: give {new}, or "
            f"{seen + new} over both."
        )


def position_ids(given: object, B: int, Q: int, learned: bool) -> None:
    """learned: positions are rows of a table, in which a negative one is none."""
    if given is None:
        return
    wanted = f"give int64 positions of shape {[B, Q]} or {[1, Q]}, such as attention_mask.cumsum(-1) - 1, or leave them out."
    if not isinstance(given, Tensor):
        raise KVPatchError(f"position_ids is a {type(given).__name__}: {wanted}")
    real("position_ids", given)
    if given.ndim < 2 or given.shape[-1] != Q or given.shape[-2] not in (1, B):
        raise KVPatchError(f"position_ids has shape {list(given.shape)}, but the input has {[B, Q]}: {wanted}")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise KVPatchError(f"position_ids has dtype {given.dtype}: {wanted}")
    if learned and at_hand(given) and int(given.min()) < 0:
        raise KVPatchError(f"position_ids hold {int(given.min())}: give 0 or more, with clamp(min=0) where there is padding.")


def file_path(path: object) -> Path:
    """A path that names a file."""
    if not isinstance(path, str | PathLike) or not str(path) or "\0" in str(path):
        raise KVPatchError(f"path={path!r} is no path: give one such as 'cache.safetensors'.")
    if Path(path).is_dir():
        raise KVPatchError(f"path={str(path)!r} is a folder: give the name of a file in it, such as 'cache.safetensors'.")
    if Path(path).exists() and not Path(path).is_file():
        raise KVPatchError(f"path={str(path)!r} is a device or a pipe: give the name of a file, such as 'cache.safetensors'.")
    return Path(path)
