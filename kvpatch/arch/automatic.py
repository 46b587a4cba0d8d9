"""Automatic rows: adapters for families that families.py has no row for, and that use transformers' attention interface.

Such a row is derived from the attention module by the names that other families use. Before it serves a model it has to pass
the checks of `kvpatch check` on the model's tiny twin (twin.py); the verdict is remembered for the twin.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..errors import KVPatchError
from .adapter import qualified_name
from .interface import STATES, InterfaceAdapter, routes_through_interface
from .kinds import attends_both_ways, knows_number, position_limit
from .proof import check_twin, describe_twin, is_checkable
from .refusals import holder_of, innermost_attentions, make_unknown_error, row_of
from .twin import PARAMETERS, make_twin

_LOG = logging.getLogger(__name__)
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout", "attention_dropout_prob")
_VERDICTS: dict[tuple[type, str], InterfaceAdapter | KVPatchError] = {}  # by decoder class and its twin's configuration
_TRIAL: ContextVar[InterfaceAdapter | None] = ContextVar("trial", default=None)  # the row under check, while a twin is patched


class NeedsWeights(KVPatchError):
    """Error for a small model on the meta device: it has no twin, and could be checked itself once its weights are loaded."""


class AutomaticAdapter(InterfaceAdapter):
    """Adapter derived from an attention module. It names no output projection, since nothing checks that it is a plain one."""

    def obstacle(self, decoder: Any, renumbered: bool) -> str | None:
        """Return the reason that positions cannot be changed, always: nothing proves how a derived row's keys are rotated."""
        return self.why_not


def automatic_adapters(model: nn.Module) -> list[tuple[nn.Module, InterfaceAdapter]]:
    """Return the attention modules of a model without an adapter, each with an automatic row that passed the checks.

    An automatic row is an adapter derived from the modules' attributes. `Target.find` calls this when such a model is patched.
    The checks run on a tiny random model of the class (its twin), once for each class and configuration; meanwhile the twin is
    patched, too, and this returns the row under check.

    Raises:
        KVPatchError: the attention does not go through transformers' interface, or the row did not pass.
    """
    attentions = _causal_attentions(model)
    if not attentions:
        raise make_unknown_error(model)
    name, classes = type(model).__name__, sorted({type(module).__name__ for module in attentions})
    if len(classes) > 1:
        raise KVPatchError(
            f"{name} has attention of several classes ({', '.join(classes)}), for which no row can be derived: write an "
            "adapter (kvpatch.Adapter) that names them."
        )
    trial = _TRIAL.get()  # the row that is under check now, or None
    if trial is not None and qualified_name(attentions[0]) in trial.classes:  # the model is a twin under its check
        return [(module, trial) for module in attentions]
    decoder: Any = holder_of(model, attentions) or model
    derive_adapter(attentions, decoder).check(decoder)  # raises if it is no causal decoder
    row = _find_verdict(model, decoder, attentions)
    return [(module, row) for module in attentions]


def _find_verdict(model: nn.Module, decoder: Any, attentions: list[nn.Module]) -> InterfaceAdapter:
    """Return the row (a derived adapter) that passes the checks for a decoder's class; raise KVPatchError if none does.

    `automatic_adapters` calls it. The first call for a class and configuration runs the checks on a twin (a tiny random model
    of the class), and logs that a row is used. The result, a row or an error, is remembered in `_VERDICTS`.
    """
    key = type(decoder), describe_twin(decoder)
    if key not in _VERDICTS:
        try:
            twin = make_twin(decoder, attentions)
        except Exception as error:  # the model's class may raise anything
            twin = _check_model_itself(model, decoder, attentions[0], error)
        verdict = _VERDICTS[key] = _judge_rows(model, decoder, twin, attentions)
        if isinstance(verdict, InterfaceAdapter):
            _LOG.warning(
                f"[kvpatch] {type(model).__name__} has no row; its attention goes through transformers' attention interface, "
                f"passed the checks and is served by an automatic row ({verdict.name})."
            )
    verdict = _VERDICTS[key]
    if isinstance(verdict, KVPatchError):
        raise KVPatchError(str(verdict))
    return verdict


def _check_model_itself(model: nn.Module, decoder: nn.Module, attn: nn.Module, error: Exception) -> nn.Module:
    """Return the decoder itself, to be checked in place of a tiny twin that could not be built, if it is small and has weights.

    `_find_verdict` calls it. Raises KVPatchError for any other decoder: NeedsWeights if it is small, so that a later call with
    weights may pass. error: the one that building the twin raised.
    """
    if is_checkable(model):
        return decoder
    small = sum(parameter.numel() for parameter in model.parameters()) <= PARAMETERS
    raise (NeedsWeights if small else KVPatchError)(
        f"No adapter for {type(model).__name__}, and no tiny twin of {type(decoder).__name__} could be built to check an "
        f"automatic row ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Register the row, "
        f"{row_of(attn)}, and let kvpatch.check_model(model) compare it with the unpatched model."
    ) from error


def _judge_rows(
    model: nn.Module, decoder: nn.Module, twin: nn.Module, attentions: list[nn.Module]
) -> InterfaceAdapter | KVPatchError:
    """Return the first derived row (adapter) under which a model's tiny twin passes the checks; if none, the error to raise.

    `_find_verdict` calls it, and remembers the result. attentions: the model's attention modules, from which rows are derived.
    """
    failures = list[tuple[str, str]]()
    # try what a module's attributes do not tell: that positions follow the padding mask, that all layers have a window which is
    # in the mask alone, that queries are scaled before attention
    for scaled, slides, from_mask in itertools.product((False, True), repeat=3):
        if scaled and "set scale=" not in failures[0][0]:  # `compare` did not find another scale in the first trial
            break
        row = derive_adapter(attentions, decoder, positions_from_mask=from_mask, slides=slides, scaled=scaled)
        try:
            with _on_trial(row):
                table = check_twin(twin)
        except KVPatchError as error:
            return KVPatchError(f"No adapter for {type(model).__name__}, and no automatic row serves it: {error}")
        except Exception as error:  # an error of the unpatched twin, which may be of any class
            return KVPatchError(
                f"No adapter for {type(model).__name__}, and its tiny twin does not run with a prompt of token ids "
                f"({type(error).__name__}: {error}). Register the row, {row_of(attentions[0])}, and let "
                "kvpatch.check_model(model) compare it with the unpatched model."
            )
        failures += [(result.detail, result.name) for result in table if not result.passed]
        if table.passed:
            return row
    name = type(model).__name__
    detail, check = failures[0]
    if detail.startswith("KVPatchError: "):  # the error says itself what stands in the way
        return KVPatchError(f"No adapter for {name}, and no automatic row serves it: {detail.removeprefix('KVPatchError: ')}")
    return KVPatchError(
        f"No adapter for {name}, and an automatic row did not pass the checks ({check}: {detail}): its attention does more "
        f"than a row can say, or a row has to say it: {row_of(attentions[0])[:-2]}, ...)). kvpatch.check_model(model) "
        "compares it with the unpatched model."
    )


@contextmanager
def _on_trial(row: InterfaceAdapter) -> Iterator[None]:
    """Let `automatic_adapters` return this row (adapter) in the with-block in which `_judge_rows` patches and checks a twin."""
    token = _TRIAL.set(row)
    try:
        yield
    finally:
        _TRIAL.reset(token)


def derive_adapter(
    attentions: list[Any],
    decoder: Any,
    *,
    positions_from_mask: bool = False,
    slides: bool = False,
    scaled: bool = False,
) -> InterfaceAdapter:
    """Return a row (an adapter) for a family without an adapter. `automatic_adapters` and each trial of `_judge_rows` call it.

    Most settings are read from the attention modules' attributes, under the names that transformers' families use. No attribute
    shows the last three arguments: positions_from_mask, slides (as in InterfaceAdapter) and scaled, which is True if the module
    scales its queries before attention, so that logits get no further factor.
    """
    attn, config = attentions[0], attentions[0].config
    # `learned` below: a table of learned position embeddings, for as many positions as the model has
    limit = position_limit(config)
    tables = (m for name, m in decoder.named_modules() if isinstance(m, nn.Embedding) and "position" in name)
    return AutomaticAdapter(
        type(attn).__module__.split(".")[-2],
        qualified_name(attn),
        projection=None,
        scale=1.0 if scaled else next((name for name in ("scaling", "scale") if hasattr(attn, name)), "scaling"),
        slides=slides or any(getattr(one, "sliding_window", None) is not None for one in attentions),
        softcap="attn_logit_softcapping" if hasattr(attn, "attn_logit_softcapping") else None,
        sinks="sinks" if any(isinstance(getattr(one, "sinks", None), torch.Tensor) for one in attentions) else None,
        dropout=next((f"config.{name}" for name in _DROPOUT if hasattr(config, name)), "attention_dropout"),
        learned=isinstance(limit, int) and any(table.num_embeddings >= limit for table in tables),
        positions_from_mask=positions_from_mask,
    )


def _causal_attentions(model: Any) -> list[nn.Module]:
    """Return a model's causal attention modules that call transformers' attention interface, for `automatic_adapters`."""
    config: Any = getattr(model, "config", None)
    text = type(config.get_text_config(decoder=True)) if hasattr(config, "get_text_config") else object
    return [
        module
        for module in innermost_attentions(model)
        if routes_through_interface(module)
        and not attends_both_ways(module)
        and isinstance(getattr(module, "config", None), text)  # those of an image encoder have another configuration
        and not _of_states(module)  # linear attention of a hybrid model, which has no keys
    ]


def _of_states(module: Any) -> bool:
    """Tell `_causal_attentions` if a module is the linear attention of a hybrid, which has a state and no keys."""
    types = getattr(module.config, "layer_types", None)
    return types is not None and knows_number(module) and types[module.layer_idx] in STATES
