"""Models without an adapter: the reason that nothing can serve them, or what to type so that something does."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import KVPatchError
from .adapter import Adapter, list_architectures, source_module
from .interface import routes_through_interface
from .kinds import NO_DECODER, attends_both_ways, is_cross_attention, make_encoder_error
from .upstream import attention_of, keeps_state

_LOG = logging.getLogger(__name__)
HOMES = ("transformers", "torch", "peft", "accelerate", "kvpatch")
"""Packages whose code around attention computes what the model's own does, or hands it on."""


def refuse_other_kinds(model: nn.Module) -> None:
    """Raise KVPatchError for a model that no adapter could serve: it is no causal decoder with a KV cache.

    `Target.find` calls it at patched(). Other models pass.
    """
    name, text = type(model).__name__, _text_part(model)
    attentions = innermost_attentions(text)
    if "diffusion" in type(model).__module__:
        raise KVPatchError(
            f"{name} writes by diffusion: it reads whole blocks of text in both directions, again and again. kvpatch serves "
            "models that generate one token after another."
        )
    # models without keys and values
    stateful = any(keeps_state(type(module)) for module in text.modules())
    if stateful and not any(map(routes_through_interface, attentions)):
        raise KVPatchError(f"{name} keeps a recurrent state, not keys and values: there is nothing to evict.")
    # encoders, and decoders with an encoder
    if attentions and all(map(attends_both_ways, attentions)):
        raise make_encoder_error(model, f"is_causal=False of {type(attentions[0]).__name__}")
    if attentions and any(vars(module).get("is_decoder") is False for module in text.modules()):
        raise make_encoder_error(model, NO_DECODER)
    cross_attention = next((path for path, module in text.named_modules() if is_cross_attention(path, module)), None)
    if cross_attention is not None and not _is_lone_decoder(model, text.get_submodule(cross_attention)):
        raise KVPatchError(
            f"{name} attends to what an encoder read, too ({cross_attention} is cross-attention): kvpatch serves decoders that "
            "attend to their own text alone."
        )
    if attentions and not any(map(_may_take_cache, attentions)):
        raise KVPatchError(
            f"{name} keeps no cache of keys and values: every step of generate() reads the whole text anew, so that there is "
            "nothing to evict."
        )


def _may_take_cache(attn: nn.Module) -> bool:
    """Tell `refuse_other_kinds` if an attention's forward may take a cache, by the names of its parameters."""
    # code outside transformers may use other names
    if not type(attn).__module__.startswith("transformers."):
        return True
    takes = inspect.signature(type(attn).forward).parameters.values()
    return any(one.kind is one.VAR_KEYWORD or any(part in one.name for part in ("past", "cache", "mems")) for one in takes)


def _text_part(model: nn.Module) -> nn.Module:
    """Return the decoder of `model` that generates text, without encoders of images or sounds, for `refuse_other_kinds`."""
    part = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    return part if isinstance(part, nn.Module) else model


def _is_lone_decoder(model: nn.Module, cross_attention: nn.Module) -> bool:
    """Tell if the model is one decoder without an encoder, so that its cross-attention never runs; for `refuse_other_kinds`.

    Decoders of transformers that take encoder_hidden_states skip cross-attention where those are None.
    """
    pretrained = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    decoder = holder_of(model, [cross_attention])
    if decoder is None or any(cross_attention not in one.modules() for one in pretrained):  # one of them is an encoder
        return False
    return "encoder_hidden_states" in inspect.signature(type(decoder).forward).parameters


def home_of(code: Any) -> str:
    """Return the top package of a class or function (of a decorated one, the decorator's), to tell code of the user's own.

    `refuse_replaced` and `_only_computes` ask.
    """
    if isinstance(code, functools.partial):
        return home_of(code.func)
    defined_in = getattr(getattr(code, "__func__", code), "__globals__", {}).get("__name__")
    return str(defined_in or getattr(code, "__module__", "")).partition(".")[0]


def refuse_replaced(attn: nn.Module, adapter: Adapter) -> None:
    """Raise KVPatchError if a transformers module attends by the user's own function, which would not run under a budget.

    `Target.find` calls it when a model is patched, and `note_reader` before each prompt. A forward that the user replaced does
    not run either, if the adapter computes attention without it. That is only logged, once, since the user's code may compute
    the same. HOMES: packages whose code counts as no user's.
    """
    if home_of(type(attn)) != "transformers" or home_of(type(adapter)) != "kvpatch":
        return
    name, attributes, home = type(attn).__name__, vars(attn), vars(source_module(attn))
    if "ALL_ATTENTION_FUNCTIONS" in home and "/" not in (chosen := attention_of(attn.config) or "eager"):  # a hub's kernel
        function = home["ALL_ATTENTION_FUNCTIONS"].get(chosen, home.get("eager_attention_forward"))
        if function is not None and home_of(function) not in HOMES:
            raise KVPatchError(
                f"{name} attends by a function of your own ({chosen!r}), which attention under a budget would leave out: call "
                "model.set_attn_implementation('sdpa') before if it computes the same."
            )
    # accelerate's hooks keep the module's own forward as `_old_forward`
    for code in (type(attn).forward, attributes.get("forward"), attributes.get("_old_forward")):
        if type(adapter).run is Adapter.run and code is not None and home_of(code) not in HOMES:
            _warn_once(f"[kvpatch] The forward of {name} is code of {home_of(code)}, which passes under a budget leave out.")


@functools.cache
def _warn_once(message: str) -> None:
    _LOG.warning(message)


def make_unknown_error(model: nn.Module) -> KVPatchError:
    """Return the error for patched() of a model without an adapter: it names the row or the adapter to write.

    `Target.find` and `automatic_adapters` raise it.
    """
    name, supported = type(model).__name__, f"Known architectures: {', '.join(list_architectures())}."
    for module in innermost_attentions(model):
        if routes_through_interface(module) and not attends_both_ways(module):
            return KVPatchError(
                f"No adapter for {name}. {supported} To add one, register a row, for its attention goes through transformers' "
                f"attention interface: {row_of(module)}; then let kvpatch.check_model(model) compare it with the unpatched "
                "model."
            )
    return KVPatchError(
        f"No adapter for {name}. {supported} To add one, subclass kvpatch.Adapter (project, output, kv_shape; see "
        "kvpatch/arch/llama.py) and call kvpatch.register_arch(MyAdapter())."
    )


def row_of(attn: nn.Module) -> str:
    """Return, for `make_unknown_error` and others, the line of code that registers a row (an InterfaceAdapter) for a class."""
    cls = type(attn)
    family = cls.__module__.split(".")[-2]
    return f"kvpatch.register_arch(kvpatch.InterfaceAdapter({family!r}, '{cls.__module__}.{cls.__qualname__}'))"


def innermost_attentions(model: nn.Module) -> list[nn.Module]:
    """Return modules with "attention" in their class name that contain no other of these, for a model without an adapter.

    `_causal_attentions`, `refuse_other_kinds` and `make_unknown_error` look among them.
    """
    named = {module for module in model.modules() if "attention" in type(module).__name__.lower()}
    holders = {module for module in named if any(child in named for child in module.modules() if child is not module)}
    return [module for module in model.modules() if module in named - holders]


def holder_of(model: nn.Module, parts: list[nn.Module]) -> nn.Module | None:
    """Return a model's innermost PreTrainedModel that contains all attention modules `parts`; None if there is none.

    `automatic_adapters` takes it for the decoder of a model that is patched.
    """
    part_ids = {id(part) for part in parts}
    holders = (
        m for m in model.modules() if isinstance(m, PreTrainedModel) and part_ids <= {id(child) for child in m.modules()}
    )
    return max(holders, key=lambda holder: -sum(1 for _ in holder.modules()), default=None)
