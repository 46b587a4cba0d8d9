"""What transformers changes on a model while a call runs, and leaves there if an error ends it: undone here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def restore_depth(model: Any, early_exit: int | None) -> Iterator[None]:
    """Let `model` run all its layers again after a generate() that drafts by early exit, for `_run_with_cache`.

    transformers sets num_hidden_layers in the configuration while it drafts, and leaves it so after an error: later calls would
    run the first layers alone. early_exit: None for a call without such drafts.
    """
    config = getattr(model, model.base_model_prefix, model).config
    layers = None if early_exit is None else config.num_hidden_layers
    try:
        yield
    finally:
        if layers is not None:
            config.num_hidden_layers = layers
