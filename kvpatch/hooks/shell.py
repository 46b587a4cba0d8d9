"""Multimodal models that make attention masks themselves, around the decoder: their pass begins at the shell.

Most such models merge images into embeddings and hand the padding mask on; the decoder's hook serves them. A few (Gemma 3)
make the decoder's masks. Given the mask of a pass under the patch, they hand that one on, as they do with any 4-D mask.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..arch.adapter import source_module
from ..arch.upstream import CACHE_NAMES, cache_of
from ..cache.cache import EvictingCache
from ..cache.prefix import Prefix
from ..errors import KVPatchError
from . import offsets, ownership
from .attention import parameters
from .decoder import before_decoder, runs_own_code
from .state import Changed, PatchState

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def makes_masks(module: nn.Module) -> bool:
    """Tell `Target.find` if a model's forward makes attention masks for its decoder: the patch then hooks this model."""
    if not isinstance(module, PreTrainedModel):
        return False
    home = vars(source_module(module))
    names = inspect.unwrap(type(module).forward).__code__.co_names  # global names that the forward's code uses
    return any(name.startswith("create_") and "mask" in name and name in home for name in names)


def list_hooks(shell: nn.Module | None, decoder: nn.Module, state: PatchState) -> list[tuple[nn.Module, Hook]]:
    """Return the pre-hooks by which a new patch will begin each pass, with their modules, for `Installation._change_model`.

    shell: a model around the decoder that makes its masks, where the pass then begins; or None. Its decoder's hook begins a
    pass only where the decoder is called alone. names: of the parameters of the shell's forward.
    """
    if shell is None:
        return [(decoder, functools.partial(before_decoder, state=state))]
    inner = next(name for name, module in shell.named_modules() if module is decoder)  # by name: a copy has its own
    names = parameters(type(shell))  # type: ignore[arg-type]
    outer = functools.partial(_before_shell, inner=inner, names=names, state=state)
    return [(shell, outer), (decoder, functools.partial(_before_inner, state=state))]


def before_outer(
    outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], state: PatchState
) -> Changed:
    """Note in `state.outer_inputs` the ids that a multimodal model gets, whose decoder gets embeddings: its forward pre-hook.

    torch calls it before each forward of `outer`. None leaves the arguments as they are. A Prefix among the arguments is
    replaced by a cache that starts from it. The model's `rope_deltas` (offsets of positions after images) are set to the
    cache's. names: of the parameters of `outer`'s forward, for positional arguments.
    """
    if torch.compiler.is_compiling():
        return None
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    state.outer_inputs.ids = ids = call.get("input_ids")
    state.outer_inputs.reader = weakref.ref(outer)
    past, changed = cache_of(call), None
    if isinstance(past, Prefix) and cache_of(kwargs) is past:  # now, since the model may ask the cache for its length
        past = ownership.start_from_prefix(past, state)
        changed = args, {name: past if name in CACHE_NAMES else value for name, value in kwargs.items()}
    if ids is not None and call.get("position_ids") is None and (past is None or _is_empty(past)):  # a new text
        offsets.forget_offsets(outer)
    elif isinstance(past, EvictingCache):  # a text that goes on
        offsets.give_back_offsets(outer, past, None if ids is None else len(ids))
    return changed


def _is_empty(past: Any) -> bool:
    return isinstance(past, EvictingCache) and not past.get_seq_length()


def _before_shell(
    shell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inner: str, names: tuple[str, ...], state: PatchState
) -> Changed:
    """Begin a pass at a model that makes its decoder's masks: the forward pre-hook of that model, `shell`.

    It takes its decoder's arguments, so that `before_decoder` can change them here. inner: the decoder's name in it. names: of
    the parameters of its forward.
    """
    call, decoder = {**dict(zip(names, args, strict=False)), **kwargs}, shell.get_submodule(inner)
    if not runs_own_code(decoder, call, state):
        _refuse_open_masks(shell, call)
    return before_decoder(decoder, (), call, state)


def _before_inner(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: PatchState) -> Changed:
    """Begin a pass at the decoder (its forward pre-hook), unless the model around it made its masks and began one already."""
    mask = kwargs.get("attention_mask")
    made = isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4)
    return None if made else before_decoder(decoder, args, kwargs, state)


def _refuse_open_masks(shell: nn.Module, call: dict[str, Any]) -> None:
    """Raise KVPatchError, for `_before_shell`, if token types mark blocks (images) whose tokens attend to each other both ways.

    shell: the model around the decoder that makes its masks. If its code has no function that finds such blocks, any token
    types are refused.
    """
    name, types = next(((n, v) for n, v in call.items() if n.endswith("token_type_ids") and v is not None), ("", None))
    if types is None:
        return
    blocks = vars(source_module(shell)).get("get_block_sequence_ids_for_mask")
    if blocks is None or bool((blocks(types, device=types.device) != -1).any()):
        raise KVPatchError(
            f"{type(shell).__name__} reads the tokens of an image in both directions ({name} says which), but a cache under a "
            f"budget is read causally: give text alone, without pixel_values and {name}, or run images outside of the block."
        )
