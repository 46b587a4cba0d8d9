"""The base class of adapters, which describe how an architecture's attention differs, and their registry."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import KVPatchError, match_name, suggest

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[..., Any]
IN_HIDDEN_STATES = "its positions are added to the hidden states, so that they are inside the keys for good"


class Adapter:
    """Description of one architecture: subclass it, override what differs, and pass an instance to `register_arch`.

    The attention modules that it serves have a `layer_idx`; their forward takes hidden states first, receives the cache among
    its other arguments, and returns (output, weights).

    Attributes:
        name: as listed by `list_architectures()`.
        classes: the attention classes, or their qualified names "package.module.ClassName".
        summary: one line for tables.
        projection: attribute of the output projection if it is a single module, else None.
        renumbers: whether keys can be cached without positions, which needs `without_rotation`, `rotary_table` and `rotate`
            where they are rotated.
        why_not: the reason if they cannot, for the error message.
        turns_back: whether the rotation of queries and keys can be undone, which needs `rotary_table`, `rotate` and
            `rotate_back` where they are rotated.
        positions_from_mask: whether the decoder derives positions from the padding mask. The patch withholds that mask, so it
            passes position_ids to such a decoder instead.
        one_mask: whether the module's own code refuses masks that differ by head.
        distances_from_mask: whether ALiBi counts distances in the padding mask, so that padding between two tokens adds
            nothing to their distance.

    Example:
        class MyAdapter(LlamaAdapter):
            name, classes = "mine", ("my_package.modeling_mine.MyAttention",)

        kvpatch.register_arch(MyAdapter())
    """

    name: str
    classes: tuple[str | type, ...]
    summary: str = ""
    projection: str | None = None
    renumbers: bool = False
    why_not: str = "its adapter does not say how queries and keys are rotated"
    turns_back: bool = False
    positions_from_mask: bool = False
    one_mask: bool = False
    distances_from_mask: bool = False

    def run(self, attn: Any, own: Forward, core: Core, hidden_BQE: Tensor, call: dict[str, Any]) -> Any:
        """Run the module's forward with `core` in place of its attention, and return what that forward returns.

        The patched forward of each layer (`make_forward`) calls it in each pass through a cache. `core` writes to the cache.

        Args:
            attn: the attention module.
            own: the module's unpatched forward.
            core: attention through the cache: queries [B,H*G,Q,D], keys and values [B,H,Q,D] -> output [B,Q,H*G*D].
            hidden_BQE: hidden states.
            call: the forward's other arguments by name.
        """
        return self.output(attn, core(*self.project(attn, hidden_BQE, **call))), None

    def attributes(self, attn: Any) -> dict[str, Any]:
        """Return attributes to set on the module while it is patched, by name; `Installation._change_model` asks."""
        return {}

    def project(self, attn: Any, hidden_BQE: Tensor, *args: Any, **call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries [B,H*G,Q,D], keys and values [B,H,Q,D], and apply positions to queries and keys.

        `run` calls this before it attends. args, call: the other arguments of the module's forward.
        """
        raise NotImplementedError

    def without_rotation(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a forward's arguments, changed so that it applies no positions: under positions="renumbered" `rotate` does."""
        return call

    def obstacle(self, decoder: Any, renumbered: bool) -> str | None:
        """Return the reason that rotations cannot be undone in a decoder, or positions renumbered; None if they can."""
        return None if (self.renumbers if renumbered else self.turns_back) else self.why_not

    def rotary_table(self, decoder: Any, device: torch.device, count: int) -> Any:
        """Build the table (such as cosines and sines) that `rotate` needs for positions below `count`, if any."""
        return None

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Apply positions `places_BHT` to queries or keys; return them unchanged if positions are not part of them (ALiBi)."""
        return x_BHTD

    def rotate_back(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Undo `rotate` exactly, also if its table makes vectors longer, as some scalings of rotary positions do."""
        return x_BHTD

    @property
    def projects(self) -> bool:
        """Tell whether the output projection is known, so that it can be applied to values."""
        return self.projection is not None or type(self).output is not Adapter.output

    def output(self, attn: nn.Module, y_BQE: Tensor) -> Tensor:
        """Apply the output projection to attention's output [B,Q,H*G*D] in `run`, or to unit vectors to measure its weight."""
        if self.projection is None:
            raise NotImplementedError
        return getattr(attn, self.projection)(y_BQE)

    def overrides(self, decoder: nn.Module) -> dict[str, Any]:
        """Return attributes (by name) to set on the decoder while it runs a pass through the cache.

        `Installation._change_model` asks, at patched(). They disable what the decoder would build from its padding mask and
        attention through the cache computes itself, such as ALiBi.
        """
        return {}

    def scale(self, attn: nn.Module) -> float:
        """Return the factor of the logits, 1 / sqrt(D) in most models."""
        return attn.scaling  # type: ignore[return-value]

    def slopes(self, attn: nn.Module) -> Tensor | None:
        """Return the ALiBi slopes [H*G], on any device, or None for other positions.

        `Target` asks when a model is patched, and `BoundAdapter.geometry` for each new cache. Key i's logit for the query at t
        gets slope * (i - t) added.
        """
        return None

    def coarse(self, attn: nn.Module) -> float | None:
        """Return the factor of ALiBi in a model that rounds slopes times positions to bfloat16 before that, else None."""
        return None

    def sliding(self, attn: nn.Module) -> int | None:
        """Return the number of tokens that a query sees, itself included, or None if it sees all.

        `Target` asks when a model is patched, and `BoundAdapter.geometry` for each new cache. An int is a sliding window. A
        Chunk (a subclass of int) means that the layer cuts the text into chunks of so many tokens: a query sees tokens of the
        chunk in which it is.
        """
        return None

    def counts_columns(self, attn: nn.Module) -> bool:
        """Tell if the module's code takes a token's index in the sequence dimension for its position, and ignores position_ids.

        `Target` asks when a model is patched. If True, features whose rows of a batch are at different positions are refused.
        """
        return False

    def softcap(self, attn: nn.Module) -> float | None:
        """Return c if logits x become c * tanh(x / c) before masking, else None."""
        return None

    def sinks(self, attn: nn.Module) -> Tensor | None:
        """Return the attention sinks [H*G], or None without them: logits in the softmax of a head that belong to no key."""
        return None

    def dropout(self, attn: nn.Module) -> float:
        """Return the dropout of attention probabilities in training."""
        return getattr(attn, "attention_dropout", 0.0)

    def kv_shape(self, attn: nn.Module) -> tuple[int, int]:
        """Return KV heads H and head size D of the keys; under a tp_plan, H counts the heads of all processes."""
        raise NotImplementedError

    def value_size(self, attn: nn.Module) -> int:
        """Return the head size of the values, which latent attention makes smaller than the keys' head size."""
        return self.kv_shape(attn)[1]

    def latent(self, attn: nn.Module) -> bool:
        """Tell whether a value is the first `value_size` numbers of its key, so that the cache holds keys alone."""
        return False

    def head_values(self, attn: nn.Module, v_BHTD: Tensor) -> Tensor:
        """Return the values [B,N,T,D] that the output projection is applied to: those held, or by query head (N = H*G)."""
        return v_BHTD

    def max_positions(self, config: Any) -> int | None:
        """Return the number of positions that the model has, or None if it is unbounded."""
        return None

    def check(self, model: nn.Module) -> None:
        """Raise KVPatchError, for `Target.find`, for a model that this adapter does not serve; here with cross-attention."""
        if getattr(getattr(model, "config", None), "add_cross_attention", False):
            raise KVPatchError(f"This {type(model).__name__} has add_cross_attention=True: kvpatch serves causal decoders.")


def heads_first(tensor_BQE: Tensor, head_dim: int) -> Tensor:
    """Return a view [B,heads,Q,D] of a projection's output [B,Q,heads*D]."""
    return tensor_BQE.view(*tensor_BQE.shape[:-1], -1, head_dim).transpose(1, 2)


def project_heads(hidden_BQE: Tensor, head_dim: int, *projections: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Project hidden states to queries, keys and values [B,heads,Q,D] by the three projections, for `project`."""
    q, k, v = (heads_first(projection(hidden_BQE), head_dim) for projection in projections)
    return q, k, v


def source_module(attn: nn.Module) -> Any:
    """Return the Python module that defines the class of `attn`; the family's rotary functions are there too."""
    return sys.modules[type(attn).__module__]


REGISTRY: dict[str, Adapter] = {}  # by the qualified name of an attention class


def register_arch(adapter: Adapter, *, exist_ok: bool = False) -> None:
    """Register an adapter, so that models with its attention classes can be patched. Users call it, and this package at import.

    Args:
        adapter: an instance of a subclass of Adapter, whose `classes` names the attention classes.
        exist_ok: replace the adapter of the same name, and those of the same classes. For a notebook's cell that is run again.

    Raises:
        KVPatchError: `adapter` is not an instance of Adapter or is incomplete, or one of its classes has an adapter already.

    Example:
        kvpatch.register_arch(
            kvpatch.InterfaceAdapter("jais2", "transformers.models.jais2.modeling_jais2.Jais2Attention", "Jais 2")
        )
    """
    if not isinstance(adapter, Adapter):
        raise KVPatchError("register_arch takes an instance of a kvpatch.arch.Adapter subclass, as in MyAdapter().")
    name, classes = getattr(adapter, "name", None), getattr(adapter, "classes", None)
    if isinstance(classes, tuple | list):
        classes = adapter.classes = tuple(class_name(one) if isinstance(one, type) else one for one in classes)
    if not isinstance(name, str) or not name:
        raise KVPatchError(
            f"{type(adapter).__name__} has no name: set name = 'my_architecture', which list_architectures() lists."
        )
    if not isinstance(classes, tuple | list) or not classes or not all(isinstance(one, str) and "." in one for one in classes):
        example = f" such as ({classes!r},)" if isinstance(classes, str) and "." in classes else ""
        raise KVPatchError(
            f"{type(adapter).__name__}.classes={classes!r} must be a tuple of qualified names, "
            f"'package.module.ClassName'{example}."
        )
    for qualified in classes:
        if qualified in REGISTRY and not exist_ok:
            other = REGISTRY[qualified].name
            raise KVPatchError(
                f"{qualified} is served by the adapter {other!r} already: give other classes, or pass exist_ok=True to "
                "replace it."
            )
    if exist_ok and name in list_architectures():
        unregister_arch(name)
    REGISTRY.update(dict.fromkeys(classes, adapter))


def unregister_arch(name: str) -> None:
    """Remove an architecture's adapter; for users. Models that are patched keep theirs.

    Raises:
        KVPatchError: there is no architecture of that name.
    """
    registered = match_name(name, list_architectures())
    if registered is None:
        names = list_architectures()
        raise KVPatchError(f"Unknown architecture {name!r}.{suggest(name, names)} Known: {', '.join(names)}.")
    for qualified in [qualified for qualified, adapter in REGISTRY.items() if adapter.name == registered]:
        del REGISTRY[qualified]


def list_architectures() -> tuple[str, ...]:
    """Return the names of all architectures with an adapter."""
    return tuple(dict.fromkeys(adapter.name for adapter in REGISTRY.values()))


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter that serves `module`, or None if it is not a known attention module."""
    return REGISTRY.get(qualified_name(module))


def qualified_name(module: nn.Module) -> str:
    """Return the name under which a module's class is registered, "package.module.ClassName"."""
    return class_name(type(module))


def class_name(cls: type) -> str:
    """Return the qualified name of a class, "package.module.ClassName"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's activations: its first floating-point parameter's."""
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point)
    return next(dtypes, torch.get_default_dtype())


def keys_dtype(model: nn.Module, device: str) -> torch.dtype:
    """Return the dtype of a forward pass's keys on a device: autocast's if on, else the model's. `_begin_pass` asks for it."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype_of(model)
