"""Proof on a tiny twin that a class of models is served rightly: for automatic rows, and under versions nobody has tested."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import KVPatchError
from .twin import PARAMETERS, make_twin, shrink_config

_LOG = logging.getLogger(__name__)
_PROVED: dict[tuple[type, str, str], str] = {}  # why a class fails, "" if it passes; by class, twin and versions
_PROVING: ContextVar[bool] = ContextVar("proving", default=False)  # True while a twin is under check


def check_twin(twin: nn.Module) -> Any:
    """Run `kvpatch check` on a twin (a tiny model in another's place), which it patches; return the table of checks.

    `_judge_rows` and `_find_failure` call it. The random state is left as it was.
    """
    import kvpatch  # the checks are a layer above: taken by their public name

    token = _PROVING.set(True)  # patching the twin must not start another check (see `prove_class`)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return kvpatch.check_model(twin, "h2o", 0.5)
    finally:
        _PROVING.reset(token)


def prove_class(decoder: nn.Module, attentions: list[nn.Module], untested: str, remedy: str) -> None:
    """Check a class on its tiny twin (a small random model of it) under versions that kvpatch was not tested with.

    `patched` calls it, through `_find_target`, under such versions of torch or transformers; the result is kept in `_PROVED`
    for the process, and success is logged. Nothing is checked while a twin is (`_PROVING`). A decoder that inherits nothing of
    transformers is not checked: its code does not change with the transformers version.

    Args:
        decoder: the decoder that is about to be patched.
        attentions: its attention modules, each with an adapter.
        untested: a sentence that names the versions.
        remedy: the command that installs tested ones.

    Raises:
        KVPatchError: the twin fails a check, or there is none to check.
    """
    if _PROVING.get() or not isinstance(decoder, PreTrainedModel):
        return
    name, key = type(decoder).__name__, (type(decoder), describe_twin(decoder), untested)
    if key not in _PROVED:
        _PROVED[key] = _find_failure(decoder, attentions)
        if not _PROVED[key]:
            _LOG.warning(f"[kvpatch] {untested}; a tiny {name} passed the checks, and {name} is served.")
    if _PROVED[key]:
        raise KVPatchError(f"{untested}, and {name} is not served under it, since {_PROVED[key]}: {remedy}")


def _find_failure(decoder: nn.Module, attentions: list[nn.Module]) -> str:
    """Build a decoder's twin and run the checks on it, for `prove_class`; return why it fails, "" if it passes.

    Without a twin, a small decoder is checked itself.
    """
    try:
        twin = make_twin(decoder, attentions)
    except Exception as error:  # the model's class may raise anything
        if not is_checkable(decoder):
            return f"no tiny twin of it could be built to check ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        twin = decoder
    try:
        table = check_twin(twin)
    except Exception as error:  # an untested version may raise anything
        return f"its tiny twin does not run ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    failed = next((result for result in table if not result.passed), None)
    return "" if failed is None else f"its tiny twin fails a check ({failed.name}: {failed.detail})"


def is_checkable(model: nn.Module) -> bool:
    """Tell whether a model is small and has its weights, so that it can be checked where no tiny twin of it can be built.

    `_check_model_itself` and `_find_failure` ask.
    """
    small = sum(parameter.numel() for parameter in model.parameters()) <= PARAMETERS
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())  # accelerate loads weights as modules run
    return small and (offloaded or not all(parameter.is_meta for parameter in model.parameters()))


def describe_twin(decoder: Any) -> str:
    """Return the key by which a check's result is remembered: the configuration of the tiny twin, else the decoder's, as text.

    `_find_verdict` and `prove_class` use it.
    """
    try:
        return shrink_config(decoder.config).to_json_string(use_diff=False)
    except Exception:  # a configuration may lack anything that a twin needs
        return str(getattr(decoder, "config", ""))
