"""What an unpatched prompt has left in a transformers cache, taken over where that is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from .errors import KVPatchError
from .forward import places

if TYPE_CHECKING:
    from .cache import EvictingCache


def take_over(cache: EvictingCache, past: Cache, mask_BT: Tensor | None) -> None:
    """Fill an empty `cache` with what `past` holds. mask_BT: of padding.

    Raises:
        KVPatchError: the policy asks for more than keys and values, or `past` has dropped tokens.
    """
    _check(cache, past)
    seen, taken = past.get_seq_length(), []
    for index, (_, other) in enumerate(zip(cache.layers, past.layers, strict=True)):
        keys, values = getattr(other, "keys", None), getattr(other, "values", None)
        bound = cache.bounds[index]
        if keys is None or values is None or (keys.shape[2] < seen and (bound is None or keys.shape[2] < bound - 1)):
            raise KVPatchError(f"Layer {index} of the {type(past).__name__} no longer holds every token it has seen.")
        taken.append((keys, values))
    with cache.changing("absorb()"):
        _fill(cache, taken, seen, mask_BT)


def _fill(cache: EvictingCache, taken: list[tuple[Tensor, Tensor]], seen: int, mask_BT: Tensor | None) -> None:
    for index, (mine, (keys, values)) in enumerate(zip(cache.layers, taken, strict=True)):
        B, H, T, _ = keys.shape
        real = torch.ones(B, seen, dtype=torch.bool, device=keys.device)
        if mask_BT is not None:
            real = mask_BT[:, :seen].to(keys.device).bool()
        rows = places(real, torch.zeros(B, dtype=torch.long, device=keys.device), cache.columns)
        positions = rows.masked_fill(~real, -1)[:, -T:]
        entry, score = {}, cache.policies[index].score
        if cache.acting[index] and score is not None:
            entry = score.entry(keys, positions, 1, index, cache.seed, cache.parallel.first(H))
        mine.append(keys, values, positions, entry)
        mine.seen, mine.holes = seen, not bool(real.all())
        if index == 0:
            cache.seen_B, gaps_B = rows[:, -1] + 1, ((rows >= 0) & ~real).sum(-1)
            if cache.columns and bool(gaps_B.any()):
                cache.gaps_B, cache.by_columns = gaps_B, True


def _check(cache: EvictingCache, past: Cache) -> None:
    kind, policy = type(past).__name__, cache.policy
    if not isinstance(past, Cache):
        raise KVPatchError(f"past={past!r:.60} is a {kind}: give a DynamicCache, as an unpatched model makes it.")
    if hasattr(past, "budget"):
        raise KVPatchError(f"past is a {kind}, which is on a budget already: use its clone().")
    if cache.chooses and policy.rows != "none":
        raise KVPatchError(
            f"A {kind} cannot be taken over under policy {policy.name!r}: it scores tokens by the attention of the prompt's "
            "rows, which that cache does not hold. Run the prompt inside the block."
        )
    if cache.chooses and policy.selection is not None:
        raise KVPatchError(
            f"A {kind} cannot be taken over under policy {policy.name!r}: its selection weighs values as they are read. Run "
            "the prompt inside the block."
        )
    if cache.renumbered:
        raise KVPatchError(
            f"A {kind} holds keys at their original positions; with positions='renumbered' run the prompt inside the block."
        )
    if policy.scope.protect is not None:
        raise KVPatchError("protect= marks prompt tokens as they are read: run the prompt inside the block.")
    if len(past.layers) != len(cache.layers):
        raise KVPatchError(
            f"past has {len(past.layers)} layers, but this model has {len(cache.layers)}: give a cache that this model filled."
        )
