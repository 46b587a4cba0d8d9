"""What an adapter says: where an architecture differs, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import KVPatchError

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[..., Any]


class Adapter:
    """One architecture. Subclass it, fill in what differs, and hand an instance to `register_arch`.

    name: what `list_architectures()` lists. classes: qualified names of the attention modules it serves, as
    "package.module.ClassName"; their forward takes hidden states first, finds the cache among its other arguments and returns
    (output, weights); they have a layer_idx.
    projection: the attribute that holds the output projection, if it is one module. renumbers: whether keys can be cached
    without positions (`plain`, `rotary_table` and `rotate` are filled in); why_not says why they cannot. positions_from_mask:
    the decoder counts positions in the padding mask, which it does not get here, so that they are handed to it.
    distances_from_mask: ALiBi counts in the padding mask, so that padding between two tokens adds nothing to their distance.
    """

    name: str
    classes: tuple[str, ...]
    summary: str = ""
    projection: str | None = None
    renumbers: bool = False
    why_not: str = "its adapter does not project keys without positions"
    positions_from_mask: bool = False
    distances_from_mask: bool = False

    def run(
        self, attn: Any, own: Forward, core: Core, hidden_BQE: Tensor, call: dict[str, Any], positioned: bool
    ) -> Any:
        """What the module's forward returns, with `core` in place of its attention.

        own: that forward; call: its arguments behind the hidden states, by name. core: attention through the cache, of queries
        [B,H*G,Q,D], keys and values [B,H,Q,D] -> [B,Q,H*G*D]. positioned: False where keys are cached without positions.
        """
        project = self.project if positioned else self.plain
        return self.output(attn, core(*project(attn, hidden_BQE, **call))), None

    def attributes(self, attn: Any) -> dict[str, Any]:
        """What stands in place of the module's own attributes while it is patched."""
        return {}

    def project(self, attn: Any, hidden_BQE: Tensor, *args: Any, **call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B,H*G,Q,D] and keys, values [B,H,Q,D] with positions applied. `call`: the forward's arguments."""
        raise NotImplementedError

    def plain(self, attn: Any, hidden_BQE: Tensor, *args: Any, **call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As `project`, without positions."""
        raise NotImplementedError

    def rotary_table(self, decoder: Any, device: torch.device, count: int) -> Any:
        """What `rotate` needs for positions below `count`."""
        return None

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Keys or queries without positions, put at `places`; as they are where positions are no part of them (ALiBi)."""
        return x_BHTD

    def output(self, attn: nn.Module, y_BQE: Tensor) -> Tensor:
        """The output projection."""
        assert self.projection is not None
        return getattr(attn, self.projection)(y_BQE)

    def aside(self, decoder: nn.Module) -> dict[str, Any]:
        """Attributes of the decoder and what they are during a pass through the cache: for a decoder that builds from its
        padding mask what the cache knows better."""
        return {}

    def scale(self, attn: nn.Module) -> float:
        """What logits are multiplied with."""
        return attn.scaling  # type: ignore[return-value]

    def slopes(self, attn: nn.Module) -> Tensor | None:
        """ALiBi slopes [H*G] on any device, added as slope * (i - t); None for other positions."""
        return None

    def coarse(self, attn: nn.Module) -> float | None:
        """What ALiBi is multiplied with after slopes times positions were rounded to bfloat16; None where they are not."""
        return None

    def sliding(self, attn: nn.Module) -> int | None:
        """Tokens that a query sees, itself included; None for all."""
        return None

    def softcap(self, attn: nn.Module) -> float | None:
        """c where logits x become c * tanh(x / c) before any mask; None for x as it is."""
        return None

    def sinks(self, attn: nn.Module) -> Tensor | None:
        """A logit of each query head [H*G] that takes its share of the softmax and belongs to no key; None without."""
        return None

    def dropout(self, attn: nn.Module) -> float:
        """Dropout of attention probabilities while training."""
        return getattr(attn, "attention_dropout", 0.0)

    def kv_shape(self, attn: nn.Module) -> tuple[int, int]:
        """KV heads H and head size D of the module; of all processes together where a tp_plan shares them out."""
        raise NotImplementedError

    def max_positions(self, config: Any) -> int | None:
        """Positions that the model has at all, or None where they go on."""
        return None

    def check(self, model: nn.Module) -> None:
        """Raise KVPatchError for a configuration that this adapter does not serve."""


def heads_first(tensor_BQE: Tensor, head_dim: int) -> Tensor:
    """[B,Q,heads*D] -> a view [B,heads,Q,D]."""
    return tensor_BQE.view(*tensor_BQE.shape[:-1], -1, head_dim).transpose(1, 2)


def source_module(attn: nn.Module) -> Any:
    """The module that defines the attention class: the home of its rotary functions."""
    return sys.modules[type(attn).__module__]


REGISTRY: dict[str, Adapter] = {}


def register_arch(adapter: Adapter) -> None:
    """Teach `patched` another architecture.

    Raises:
        KVPatchError: `adapter` is no Adapter instance, or a class it names is served already.
    """
    if not isinstance(adapter, Adapter):
        raise KVPatchError("register_arch takes an instance of a kvpatch.arch.Adapter subclass, as in MyAdapter().")
    name, classes = getattr(adapter, "name", None), getattr(adapter, "classes", None)
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
        if qualified in REGISTRY:
            other = REGISTRY[qualified].name
            raise KVPatchError(f"{qualified} is served by the adapter {other!r} already: give other classes.")
    REGISTRY.update(dict.fromkeys(adapter.classes, adapter))


def list_architectures() -> tuple[str, ...]:
    """Names of all architectures with an adapter."""
    return tuple(dict.fromkeys(adapter.name for adapter in REGISTRY.values()))


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter that serves `module`, or None where it is no known attention module."""
    return REGISTRY.get(f"{type(module).__module__}.{type(module).__qualname__}")


def dtype_bytes(model: nn.Module) -> int:
    """Bytes of one number of the model's activations."""
    return dtype_of(model).itemsize


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of the model's activations: its first floating-point parameter's."""
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point)
    return next(dtypes, torch.get_default_dtype())
