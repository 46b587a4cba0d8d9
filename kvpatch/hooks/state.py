"""State shared by the hooks of one patch: its settings, facts about the model, and the log of the passes that ran."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arch.adapter import Adapter
from ..arch.interface import ATTENTION, STATES
from ..arch.upstream import CACHE, CACHE_NAMES
from ..cache.cache import EvictingCache
from ..cache.lifetimes import Record
from ..cache.model_stamp import ModelStamp
from ..cache.prefix import Prefixes
from ..cache.recurrent import Stack
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from ..policies.served import FeatureSet
from ..storage.schema import LayerShape
from .run_log import RunLog

Changed = tuple[tuple[Any, ...], dict[str, Any]] | None
"""Arguments that a pre-hook puts in place of those of a call; None leaves them as they are."""


class _Missing(Enum):
    MISSING = "no such attribute"


MISSING = _Missing.MISSING  # the same object in a deep copy


def _refuse_pickle(self: object, protocol: object) -> Any:
    """Raise KVPatchError in place of pickling: pickle and torch.save call this `__reduce_ex__` of a patched model's state."""
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
        """Copy the list of undos when copy.deepcopy copies the module that has this mark: the copy can be unpatched as well."""
        new = memo[id(self)] = Mark(self.policy)
        new.undo = copy.deepcopy(self.undo, memo)
        return new

    __reduce_ex__ = _refuse_pickle


class NotCaptured(KVPatchError):
    """Error of a step that cannot be captured, raised before it has changed anything."""


class Capturing(threading.local):
    """The cache of the step that is being traced for a graph (graph.py), in each thread."""

    cache: EvictingCache | None = None


class OuterInputs(threading.local):
    """Token ids of the pass that has begun in the model around the decoder, which merges images into their embeddings.

    reader: that model, until its decoder has begun the pass.
    """

    ids: Tensor | None = None
    reader: weakref.ref[nn.Module] | None = None

    def take(self, B: int, Q: int) -> Tensor | None:
        """Return the ids if they are of a pass of this shape, and clear them; the decoder's pre-hook calls this."""
        ids, self.ids = self.ids, None
        return ids if ids is not None and ids.shape == (B, Q) else None

    def take_reader(self) -> nn.Module | None:
        """Return the model around the decoder in which this pass has begun, or None, and clear it."""
        reader, self.reader = self.reader, None
        return None if reader is None else reader()


class RunOptions(NamedTuple):
    """Ways in which generate() runs under a patch, whatever its caches keep.

    graphs: its steps may run by CUDA graphs (generate_steps.py). lossless: it drafts and verifies against the entries of all
    tokens (lossless.py), which are kept in a file in `folder`, or in host memory (None).
    """

    graphs: bool = True
    lossless: bool = False
    folder: Path | None = None


class PatchState:
    """The settings of a patch and the facts about the model that its hooks need; it never keeps the Patch alive.

    max_positions: the number of positions that the model has. shapes: of the cache's layers. decoder_parameters: names of
    the parameters of the decoder's forward; cache_name: the cache's among them. overrides: for each attribute of the decoder
    that changes during a pass under the patch, the model's own value and ours. log: of the passes. capturing: the cache
    whose step is traced for a graph. options: how generate() runs. replayed: the record that passes without a cache follow,
    or None. prefixes: compressed texts that others begin with. measured: the model that a calibration is of, or None.
    outer_inputs: what a pass was given in front of the decoder, in each thread. why_positions_fixed: the reason that the
    decoder counts positions by columns and can be told no others, or None. generators: the models with a generate() around it.
    """

    def __init__(
        self,
        settings: CacheSettings,
        adapter: Adapter,
        max_positions: int | None,
        shapes: list[LayerShape],
        decoder_parameters: tuple[str, ...],
        measured: ModelStamp | None,
        why_positions_fixed: str | None,
        options: RunOptions,
    ) -> None:
        """Hold what all hooks of one patch share; `Patch._make_state` calls it once, before the patch is installed.

        max_positions: of the model, None if there is no limit. shapes: of the cache's layers. decoder_parameters: names of the
        decoder's arguments. measured: stamp (fingerprint) of the model that a calibration is of, or None. why_positions_fixed:
        the reason that the decoder can be told no positions, or None.
        """
        self.settings, self.adapter, self.max_positions, self.shapes = settings, adapter, max_positions, shapes
        self.decoder_parameters, self.log = decoder_parameters, RunLog(settings, options.lossless)
        self.cache_name = next((name for name in CACHE_NAMES if name in decoder_parameters), CACHE)
        self.overrides: dict[str, tuple[Any, Any]] = {}  # attributes of the decoder to replace: (its value, ours)
        self.capturing = Capturing()
        self.options = options
        self.replayed: Record | None = None
        self.prefixes, self.measured = Prefixes(), measured
        self.outer_inputs, self.why_positions_fixed = OuterInputs(), why_positions_fixed
        self.generators = weakref.WeakSet[nn.Module]()

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchState:
        return self  # a copied model evicts by the same settings

    __reduce_ex__ = _refuse_pickle

    @property
    def lossless(self) -> bool:
        """True if generate() drafts by the budgeted cache and verifies with all tokens: patched() got lossless=True."""
        return self.options.lossless

    def list_features(self, **facts: Any) -> FeatureSet:
        """Return the patch's features for the table of refusals (served.py). facts: features that only the caller knows."""
        return self.settings.list_features(lossless=self.lossless, positions_fixed=self.why_positions_fixed, **facts)

    def new_cache(self, layers: int | None = None) -> EvictingCache:
        """Make an empty EvictingCache of this patch. layers: its first ones alone, for drafts by early exit; None: all."""
        return EvictingCache(self.settings.first_layers(layers))


def pass_mask(device: torch.device) -> Tensor:
    """Make the mask that the decoder gets in a pass under the patch: attention through the cache masks by positions instead.

    `_begin_pass`, `_begin_step` and `begin_replay` call it at each pass. The decoder takes a 4-D mask as it is: no n x n mask
    is built, and its size need not match the cache's length.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def mask_by_kind(stack: Stack | None, mask: Tensor, real_BT: Tensor | None, Q: int) -> Tensor | dict[str, Tensor | None]:
    """Return the mask of a pass of Q columns as its decoder takes it: one tensor, or for a hybrid one by kind of layer.

    `_begin_pass` and `begin_replay` call it for each pass. A hybrid has recurrent layers, too: these must not read padding, and
    get the padding mask of the new columns, if any. stack: of a hybrid, or None. mask: for the layers that attend. real_BT: the
    caller's padding mask. ATTENTION and STATES name the kinds of layers that attend, and that are recurrent, as configurations
    do.
    """
    if stack is None or not stack.states:
        return mask
    real_BQ = None if real_BT is None or Q == 1 or bool(real_BT[:, -Q:].all()) else real_BT[:, -Q:].contiguous()
    return {**dict.fromkeys(ATTENTION, mask), **dict.fromkeys(STATES, real_BQ)}


def put_attribute(module: nn.Module, name: str, value: object) -> None:
    """Set an instance attribute of a module, for `Installation` and its undo `Attribute`; the value MISSING removes it."""
    if value is MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def switch_overrides(decoder: nn.Module, overrides: dict[str, tuple[Any, Any]], ours: bool) -> None:
    """Set the decoder's attributes that an adapter replaces (such as its ALiBi): to the patch's values (`ours`) or its own.

    `_enter_decoder` and `begin_replay` call it as a pass begins. overrides: by attribute, (the model's value, ours), so that
    the bool `ours` is the index.
    """
    for name, values in overrides.items():
        put_attribute(decoder, name, values[ours])


def has_overrides(decoder: nn.Module, overrides: dict[str, tuple[Any, Any]], ours: bool) -> bool:
    """Tell if the attributes that `switch_overrides` sets have the patch's values (`ours`), or the model's own."""
    return all(vars(decoder).get(name, MISSING) is values[ours] for name, values in overrides.items())
