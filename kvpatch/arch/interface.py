"""The adapter for models that call attention through transformers' AttentionInterface.

Such a module projects, normalizes and rotates, updates the cache, and calls the attention function registered under
config._attn_implementation. While the module is patched, its config names the function `attention` below, which calls
kvpatch's core instead. The family's own forward runs before and after attention, so a family is one row (families.py); the
arguments that its forward passes to attention are compared with the row.
"""

from __future__ import annotations

import copy
import inspect
from operator import attrgetter
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, Cache

from ..errors import KVPatchError
from ..policies.windows import Chunk
from . import latent as latents
from .adapter import IN_HIDDEN_STATES, Adapter, Core, Forward, class_name, qualified_name, source_module
from .handover import Entries, Handover
from .kinds import attends_both_ways, count_query_heads, is_cross_attention, knows_number, make_encoder_error, position_limit
from .rotary import Rotary
from .upstream import attention_of, cache_argument, name_attention

NAME = "kvpatch"
CHUNKED = "chunked_attention"
"""The kind of layers whose window begins anew after every config.attention_chunk_size tokens."""
ATTENTION = frozenset(("full_attention", "sliding_attention", CHUNKED))
"""Kinds of layers whose cache is one set of keys and values of all tokens, or of those in a window."""
STATES = frozenset(("linear_attention", "conv"))
"""Kinds of layers with a state of fixed size, which transformers' own cache layers hold."""
SLIDING = frozenset(("sliding_attention", "hybrid_sliding"))
"""Kinds of layers that hold the keys and values in a window."""
OTHERS = STATES | {"hybrid", "hybrid_sliding", "moe", "mlp"}
"""Kinds of layers beside or around attention that nothing has to be done for."""


class InterfaceAdapter(Adapter):
    """Adapter of a family whose attention module calls AttentionInterface.

    Arguments that name an attribute of the attention module may also name one of its config, as "config.x".

    Args:
        name: as listed by `list_architectures()`.
        attention: the attention class, or its qualified name "package.module.ClassName".
        summary: one line for tables.
        projection: attribute of the output projection; None if the module does more between attention and its output.
        scale: attribute of the logits' factor, or the factor itself.
        slides: whether every layer has the window config.sliding_window. Not needed if config.layer_types names the sliding
            layers.
        softcap: attribute of the cap of the logits.
        sinks: attribute of the attention sinks.
        dropout: attribute of the dropout of attention probabilities.
        learned: whether positions are a table with config.max_position_embeddings rows.
        positions_from_mask: as in Adapter.

    Example:
        kvpatch.register_arch(
            kvpatch.InterfaceAdapter("jais2", "transformers.models.jais2.modeling_jais2.Jais2Attention", "Jais 2")
        )
    """

    why_not = "its row does not declare Llama's rotary positions, one table for all layers"

    def __init__(  # noqa: PLR0913 - a row of the families' table, by keyword
        self,
        name: str,
        attention: str | type,
        summary: str = "",
        *,
        projection: str | None = "o_proj",
        scale: str | float = "scaling",
        slides: bool = False,
        softcap: str | None = None,
        sinks: str | None = None,
        dropout: str = "config.attention_dropout",
        learned: bool = False,
        positions_from_mask: bool = False,
    ) -> None:
        """Note where a family's attention modules keep each setting; the arguments are explained in the class's docstring.

        Called at import for each row of the table of families, and by users. Learned positions are part of the keys, so that
        keys cannot be given new positions: `why_not`, the reason in the error, then says so.
        """
        self.name, self.summary = name, summary
        self.classes = (class_name(attention) if isinstance(attention, type) else attention,)
        self.projection, self.learned, self.positions_from_mask = projection, learned, positions_from_mask
        self._scale, self._slides, self._softcap, self._sinks, self._dropout = scale, slides, softcap, sinks, dropout
        if learned:  # nothing is rotated
            self.why_not, self.turns_back = IN_HIDDEN_STATES, True

    def run(self, attn: Any, own: Forward, core: Core, hidden_BQE: Tensor, call: dict[str, Any]) -> Any:
        """Run `own`, the module's forward, with `core` in place of transformers' attention function.

        The patched forward (`make_forward`) calls it in each pass. In place of the cache the module gets a stand-in (Handover)
        that stores nothing: `core` writes the keys and values. With multi-head latent attention (`absorbs`) `core` writes
        latents, and kv_b_proj is applied to queries and outputs instead.
        """
        call, attended = {name: Handover(value) if isinstance(value, Cache) else value for name, value in call.items()}, False
        absorbs = self.latent(attn)
        if absorbs != ("expand_kv" in vars(attn)):
            raise KVPatchError(
                f"kv_b_proj of {type(attn).__name__} was wrapped, quantized or offloaded inside the block, or no longer is: "
                "what the cache holds was decided where the block began. Change it before patched()."
            )
        if absorbs:
            call[cache_argument(type(attn).forward)] = Entries()  # a stand-in that keeps latents

        def attend(q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any]) -> Tensor:
            """Attend by `core` where the module calls its attention function; asked: that call's keyword arguments."""
            nonlocal attended
            self.compare(attn, asked)
            _refuse_shapes(attn, k, v, (*self.kv_shape(attn), self.value_size(attn)), attended)
            attended = True
            return latents.attend(attn, core, q, k, v) if absorbs else core(q, k, v).unflatten(-1, (q.shape[1], -1))

        out = own(hidden_BQE, **call, kvpatch=attend)
        if not attended:
            raise _refuse_arguments(attn)
        return out

    def attributes(self, attn: Any) -> dict[str, Any]:
        """Return attributes to set on a module when it is patched: a copy of its config that names our attention function.

        A module with latent attention (MLA) also gets a method `expand_kv` that leaves the latents as they are.
        """
        AttentionInterface.register(NAME, attention)  # not at import: transformers would take and list the name for any model
        config = copy.copy(attn.config)
        config._kvpatch_own = attn.config  # which set_attn_implementation() changes
        name_attention(config, NAME)
        return {"config": config, **({"expand_kv": MethodType(latents.expand_kv, attn)} if self.latent(attn) else {})}

    def scale(self, attn: nn.Module) -> float:
        return _find_value(attn, self._scale) if isinstance(self._scale, str) else self._scale

    def sliding(self, attn: nn.Module) -> int | None:
        """Return the module's sliding window in tokens, by its configuration; None if it has no window.

        `Target`, `BoundAdapter.geometry` and `compare` ask. A Chunk (a subclass of int) stands for attention in chunks of so
        many tokens. Without config.layer_types, `slides` of the family's row decides for all layers.
        """
        config: Any = attn.config
        types, slides = getattr(config, "layer_types", None), self._slides
        if types is not None:
            # a layer that knows its index
            kind = types[attn.layer_idx] if knows_number(attn) else None  # type: ignore[index]
            if kind == CHUNKED:
                return Chunk(config.attention_chunk_size)
            slides = kind in SLIDING
        return getattr(config, "sliding_window", None) if slides else None

    def softcap(self, attn: nn.Module) -> float | None:
        return _find_value(attn, self._softcap)

    def sinks(self, attn: nn.Module) -> Tensor | None:
        return _find_value(attn, self._sinks)

    def dropout(self, attn: nn.Module) -> float:
        # the module's own, which it has noted when it was made, before its config, which may have changed since
        own = getattr(attn, self._dropout.rpartition(".")[2], None)
        return own if isinstance(own, float) else _find_value(attn, self._dropout) or 0.0

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        """Return the number of KV heads (0 if layers differ in it) and the head size of keys, from the module or its config.

        `Target` asks at patched(), and `run` in each pass, to check its keys. Latent attention has one head: the latents.
        """
        if self.latent(attn):
            return 1, latents.read_sizes(attn)[0]
        config = attn.config
        group, heads = getattr(attn, "num_key_value_groups", None), getattr(attn, "kv_heads", None)
        names = ("decoder_attention_heads", "num_key_value_heads", "num_attention_heads")
        named = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
        heads = heads or ((count_query_heads(attn, config) or 0) // group if group else 0) or named  # 0 where layers differ
        sizes = (getattr(attn, name, None) for name in ("qk_head_dim", "head_dim", "head_size"))
        head_dim = next((size for size in sizes if size), config.hidden_size // config.num_attention_heads)
        return heads, head_dim

    def value_size(self, attn: Any) -> int:
        if self.latent(attn):
            return latents.read_sizes(attn)[1]
        return getattr(attn, "v_head_dim", None) or self.kv_shape(attn)[1]

    def latent(self, attn: Any) -> bool:
        return latents.is_latent(attn)

    def head_values(self, attn: Any, v_BHTD: Tensor) -> Tensor:
        return latents.project_values(attn, v_BHTD) if self.latent(attn) else v_BHTD

    def max_positions(self, config: Any) -> int | None:
        return position_limit(config) if self.learned else None

    def check(self, model: nn.Module) -> None:
        """Raise KVPatchError for `Target.find`, at patched(), if a model is no causal decoder or has unknown layer types."""
        super().check(model)
        flag, config = "use_bidirectional_attention", model.config
        if (value := getattr(config, flag, False)) and value != "vision":  # "vision": images are refused when they come
            raise KVPatchError(f"This {type(model).__name__} has {flag}={value}: kvpatch serves causal decoders.")
        for name, module in model.named_modules():
            if qualified_name(module) not in self.classes or is_cross_attention(name, module):
                continue
            if attends_both_ways(module):
                raise make_encoder_error(model, f"is_causal=False of {type(module).__name__}")
            parameters = inspect.signature(type(module).forward).parameters.values()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                raise _refuse_arguments(module)
        served = ATTENTION | OTHERS if getattr(config, "attention_chunk_size", None) else (ATTENTION | OTHERS) - {CHUNKED}
        others = set(getattr(config, "layer_types", None) or ()) - served
        if others:
            raise KVPatchError(
                f"This {type(model).__name__} has layers of type {', '.join(sorted(others))}, whose state is no cache of all "
                "keys and values: kvpatch serves full attention, and that in windows and chunks."
            )

    def compare(self, attn: Any, asked: dict[str, Any]) -> None:
        """Raise KVPatchError if the module asks attention for another setting than this adapter says.

        `run` calls it in each pass. asked: the module's keyword arguments to its attention function.
        """
        window = self.sliding(attn)
        # some families pass the window in the mask alone, as all do with chunks; a dropout that the adapter knows was refused
        asked = {"sliding_window": window, "dropout": 0.0, **asked}
        for what, name, mine in (
            ("scale", "scaling", self.scale(attn)),
            ("slides", "sliding_window", window),
            ("softcap", "softcap", self.softcap(attn)),
            ("sinks", "s_aux", self.sinks(attn)),
            ("dropout", "dropout", 0.0),
        ):
            theirs = asked.get(name)
            if theirs is not mine and (isinstance(theirs, Tensor) or theirs != mine):
                raise KVPatchError(
                    f"{type(attn).__name__} asks for {name}={theirs!r}, but its adapter {self.name!r} says {mine!r}: set "
                    f"{what}= of its InterfaceAdapter."
                )


def _refuse_arguments(attn: nn.Module) -> KVPatchError:
    """Return the error for a module whose forward does not pass its **kwargs to the attention function.

    kvpatch hands over its attention, `core`, in one of them. Raised at patched(), or after a forward without attention.
    """
    return KVPatchError(
        f"The forward of {type(attn).__name__} does not hand its further arguments (**kwargs) on to its attention function, "
        "which kvpatch reaches by one of them: hand them on, or write an adapter (kvpatch.Adapter)."
    )


class RotaryInterfaceAdapter(Rotary, InterfaceAdapter):
    """InterfaceAdapter of a family with Llama's rotary positions: they can be left out, applied later, and undone."""


def _refuse_shapes(attn: nn.Module, k: Tensor, v: Tensor, said: tuple[int, int, int], attended: bool) -> None:
    """Raise KVPatchError in `run` if attention is called a second time, or keys and values are of other sizes than `said`.

    said: KV heads, key size and value size by the adapter. attended: attention was called before in this forward.
    """
    name = type(attn).__name__
    if attended:
        raise KVPatchError(
            f"{name} attends more than once in a forward, as differential attention does, but a cache under a budget holds one "
            "set of keys and values per layer: kvpatch does not serve it."
        )
    if (k.shape[-1], v.shape[-1]) != said[1:] or said[0] % k.shape[1]:  # processes of a tp_plan share the heads
        raise KVPatchError(
            f"{name} has {k.shape[1]} KV heads with keys of {k.shape[-1]} numbers and values of {v.shape[-1]}, but its adapter "
            f"says {said[0]}, {said[1]} and {said[2]}: override kv_shape and value_size in a subclass of InterfaceAdapter."
        )


def routes_through_interface(module: nn.Module) -> bool:
    """Tell whether `module` attends through transformers' attention interface, so that an InterfaceAdapter might serve it."""
    home = vars(source_module(module))
    return hasattr(module, "layer_idx") and "Attention" in type(module).__name__ and "ALL_ATTENTION_FUNCTIONS" in home


def _find_value(attn: Any, name: str | None) -> Any:
    """Return a module's attribute by its name in the family's row, such as "config.x", for `scale` and others; or None."""
    try:
        return attrgetter(name)(attn) if name is not None else None
    except AttributeError:
        return None


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend by `core` (attention through kvpatch's cache), which `run` passes as `kvpatch=`, else by the model's function.

    Attention modules call this in place of their attention function while they are patched: their config names it, as NAME.
    """
    core = asked.pop("kvpatch", None)
    if core is None:
        run = AttentionInterface().get_interface(attention_of(module.config), source_module(module).eager_attention_forward)
        return run(module, query, key, value, attention_mask, **asked)
    return core(query, key, value, asked), None
