"""Undo of changes that transformers and PEFT make on a model for one call, and leave there if an error ends it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import KVPatchError
from .state import Changed, PatchState

OF_HOOKS = ("adapter_names", "alora_offsets")  # arguments of a call that PEFT hands to its layers by hooks

Begin = Callable[[nn.Module, dict[str, Any], PatchState], Changed]
"""Begins a pass of a decoder, as `_enter_decoder` does."""


@contextmanager
def restore_depth(model: Any, early_exit: int | None) -> Iterator[None]:
    """Let `model` run all its layers again after a generate() that drafts by early exit, for `_run_with_cache`.

    transformers sets num_hidden_layers in the configuration while it drafts, and leaves it so after an error: later calls would
    run the first layers alone. early_exit: None for a call without such drafts.
    """
    if early_exit is None:
        yield
        return
    config = getattr(model, model.base_model_prefix, model).config
    layers = config.num_hidden_layers
    try:
        yield
    finally:
        config.num_hidden_layers = layers


def remove_adapter_hooks(*models: nn.Module) -> None:
    """Remove the hooks of PEFT's adapters, which PEFT leaves on a model after an error: later calls would use their values.

    The wrapper that `wrap_generate` makes calls it after a KVPatchError, and `clean_up`; no forward of the models runs then.
    """
    for module in (module for model in models for module in model.modules()):
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and any(name in hook.keywords for name in OF_HOOKS):
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                del module._forward_pre_hooks[key]


def clean_up(begin: Begin) -> Begin:
    """Decorate `_enter_decoder`: if it refuses a pass, the decoder and the models around it lose the hooks of that pass."""

    @functools.wraps(begin)
    def begin_pass(decoder: nn.Module, call: dict[str, Any], state: PatchState) -> Changed:
        """Begin a pass by `begin`; if that raises KVPatchError, remove PEFT's hooks of the pass first, and raise it again."""
        try:
            return begin(decoder, call, state)
        except KVPatchError:
            remove_adapter_hooks(decoder, *state.generators)
            raise

    return begin_pass
