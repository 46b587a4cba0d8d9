"""Teacher forcing: a prompt in one forward pass, then known tokens one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arch.upstream import cache_argument, cache_of


@dataclass(frozen=True)
class Fed:
    """Result of feeding a text.

    Attributes:
        logits_BSV: `predictions` after the prompt and after each further token, in float32 or float64.
        cache: the cache afterwards.
    """

    logits_BSV: Tensor
    cache: Any

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in the cache, kvpatch's or transformers' own."""
        if hasattr(self.cache, "nbytes"):
            return self.cache.nbytes
        pairs = ((getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in self.cache.layers)
        return sum(t.nbytes for pair in pairs for t in pair if t is not None)


@torch.no_grad()
def feed(
    model: Any, ids_BT: Tensor, n: int, mask_BT: Tensor | None = None, watch: Callable[[Any], None] = lambda cache: None
) -> Fed:
    """Feed `ids_BT[:, :n]` in one forward pass and the rest token by token, and return the predictions and the cache.

    `Checks`, `Comparison` and the demo compare two caches by the predictions of one known text under each of them.

    Args:
        model: a causal language model.
        ids_BT: token ids.
        n: tokens of the prompt.
        mask_BT: 0 for left padding.
        watch: called with the cache after each pass.
    """
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    past, logits, name = None, [], cache_argument(type(model).forward)
    for start, stop in [(0, n), *((t, t + 1) for t in range(n, ids_BT.shape[1]))]:
        extra = {name: past} | ({"position_ids": positions_BT[:, start:stop]} if takes_positions else {})
        out = model(ids_BT[:, start:stop], attention_mask=mask_BT[:, :stop], use_cache=True, **extra)
        past = cache_of(out)
        watch(past)
        logits.append(widen(predictions(out)[:, -1:]))
    return Fed(torch.cat(logits, 1), past)


def predictions(out: Any) -> Tensor:
    """Return a model's logits [B,Q,V], or the last hidden states [B,Q,E] of a model without a head."""
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def widen(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 if its dtype is narrower."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def positions_of(model: Any) -> int | None:
    """Return how many positions a text must fit into, by the model's configuration; None: no limit. Commands call it."""
    config = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((count for count in counts if isinstance(count, int) and count > 0), None)
