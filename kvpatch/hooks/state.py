"""State shared by the hooks of one patch: its settings, and records of the passes that ran."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..arch.adapter import Adapter
from ..cache.cache import EvictingCache
from ..cache.settings import CacheSettings
from ..errors import KVPatchError

_LOG = logging.getLogger(__name__)
Note = Callable[[EvictingCache, bool], None]


class _Missing(Enum):
    MISSING = "no such attribute"


MISSING = _Missing.MISSING  # the same object in a deep copy


def _refuse_pickle(self: object, protocol: object) -> Any:
    raise KVPatchError(
        "A patched model cannot be pickled, nor saved whole by torch.save: leave the block or call Patch.remove() first, or "
        "save model.state_dict(). (copy.deepcopy works: the copy evicts by the same settings.)"
    )


class Mark:
    """The mark of a patched module: the policy's name, and how to undo what the patch changed there, newest change last.

    The copy of a module has a copy of its mark; what undoes a change takes the module that it belongs to.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.undo: list[Callable[[nn.Module], None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        new = memo[id(self)] = Mark(self.policy)
        new.undo = copy.deepcopy(self.undo, memo)
        return new

    __reduce_ex__ = _refuse_pickle


class PatchState:
    """The settings of a patch and the facts about the model that its hooks need; it never keeps the Patch alive.

    max_positions: the number of positions that the model has. kv_shape: KV heads and head size of the first layer. note(cache,
    finished): tells the Patch which cache a pass fills; finished: generate() has ended. decoder_parameters: names of the
    parameters of the decoder's forward. aside: for each attribute of the decoder that changes during a pass under the patch,
    the model's own value and ours.
    """

    def __init__(
        self,
        settings: CacheSettings,
        adapter: Adapter,
        max_positions: int | None,
        kv_shape: tuple[int, int],
        decoder_parameters: tuple[str, ...],
        note: Note,
    ) -> None:
        self.settings, self.adapter, self.max_positions, self.kv_shape = settings, adapter, max_positions, kv_shape
        self.decoder_parameters, self.note = decoder_parameters, note
        self.aside: dict[str, tuple[Any, Any]] = {}
        self.ran = self.felt = False
        self.unfelt = self.longest = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchState:
        return self  # a copied model evicts by the same settings

    __reduce_ex__ = _refuse_pickle

    def new_cache(self, layers: int | None = None) -> EvictingCache:
        """Make an empty cache. layers: number of first layers, for a model that exits early."""
        return EvictingCache(self.settings.first_layers(layers))

    def count(self, call: dict[str, Any], training: bool) -> None:
        """Note if a pass can feel the budget: it continues a cache, or reads more than one block.

        Of the passes that cannot, the longest is noted, unless they asked for a cache or gradients: those are no evaluation.
        """
        tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
        block = self.settings.block
        Q, self.ran = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim > 1 else 0, True
        if call.get("past_key_values") is not None or (block is not None and Q > block):
            self.felt = True
        elif not call.get("use_cache") and not training:
            self.unfelt, self.longest = self.unfelt + 1, max(self.longest, Q)

    def warn_if_unfelt(self) -> None:
        """Log that an evaluation measured the unpatched model, which its results do not show."""
        count, self.unfelt = self.unfelt, 0
        if not self.settings.acts or self.felt or count < 2:  # a single pass serves to look at what a policy keeps
            return
        budgets = ", ".join(dict.fromkeys(map(str, self.settings.budget.per_layer)))
        _LOG.warning(
            f"policy {self.settings.policy.name!r}, k={budgets}: none of {count} forward passes felt the budget, so their "
            "figures are the unpatched model's: a pass computes all of its tokens before it evicts, and nothing went on from "
            f"there. For log-likelihoods and perplexity give block=, fewer than the {self.longest} tokens of the longest pass."
        )


def pass_mask(device: torch.device) -> Tensor:
    """Make the mask of a pass under the patch.

    The decoder takes a 4-D mask as it is: no n x n mask is built, and its size need not match the cache's length.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def put_aside(decoder: nn.Module, aside: dict[str, tuple[Any, Any]], ours: bool) -> None:
    """Set the decoder's attributes that an adapter replaces during a pass under the patch."""
    for name, values in aside.items():
        value = values[ours]
        if value is MISSING:
            vars(decoder).pop(name, None)
        else:
            vars(decoder)[name] = value


def is_aside(decoder: nn.Module, aside: dict[str, tuple[Any, Any]], ours: bool) -> bool:
    """Tell if these attributes of the decoder are in place already, the model's own or ours."""
    return all(vars(decoder).get(name, MISSING) is values[ours] for name, values in aside.items())
