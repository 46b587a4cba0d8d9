"""Configurations, read without transformers: layers, heads, windows, latents and positions of a model's cache."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import KVPatchError

Read = TypeVar("Read")
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SPARSE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
    "mpt": {"max_seq_len": 2048},
}
"""Defaults of configurations whose files leave out what the cache's size depends on."""

_STATES = frozenset(("linear_attention", "conv", "mamba", "mamba2", "recurrent"))  # layers that keep a state of fixed size
_WITHOUT = frozenset(("mlp", "moe"))  # layers that keep nothing
# families of which every layer slides, if the file has a sliding_window; and those whose full attention has wider heads
_ALL_SLIDE = frozenset(("ministral", "mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"))
_WIDER_FULL = frozenset(("gemma4_text", "gemma4_unified_text"))
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma4_text": 6, "cohere2": 4}  # the last of so many layers does not slide
_PATTERNS |= {"gpt_oss": 2, "vaultgemma": 2, "olmo3": 4, "gemma3n_text": 5, "kolibri1": 5, "gemma4_unified_text": 6}
_NAMED = frozenset((  # whose layers differ by a rule of transformers alone where the file does not name them
    "afmoe", "beam", "cwm", "flint", "granite_swa", "granitemoe_swa", "kimi_linear", "lara_mini", "lfm3", "mimo_v2_flash",
    "modernbert-decoder", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba",
))  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Cache of one attention layer.

    heads: KV heads. key, value: numbers of a key and a value. window: tokens that a sliding layer sees, else None. latent:
    whether a value is a part of its key.
    """

    heads: int
    key: int
    value: int
    window: int | None = None
    latent: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a size that is no int above 0, as of a wrong config.json; `refusing_values` names the model."""
        for size in (self.heads, self.key, self.value, 1 if self.window is None else self.window):
            if type(size) is not int or size < 1:
                raise ValueError(f"{size!r} is no number of heads or tokens, nor a head's size")


def refusing_values(read: Callable[..., Read]) -> Callable[..., Read]:
    """Decorate `read_shape`: an error that a bad value in config.json causes becomes a KVPatchError that names the model."""

    @functools.wraps(read)
    def read_or_refuse(config: Configuration, *told: object) -> Read:
        """Call `read` with the same arguments; turn an error that a value causes into a KVPatchError."""
        try:
            return read(config, *told)
        except KVPatchError:
            raise
        except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise KVPatchError(
                f"The config.json of {config.name} (model_type {config.kind}) has a value that cannot be read: {error}. "
                "Compare it with that of a model of this type on the hub."
            ) from error

    return read_or_refuse


@dataclass(frozen=True)
class Shape:
    """Facts of a configuration that the cache's size depends on.

    kind: model_type of the part that writes text. layers: those with keys and values of their own. states: layers with a state
    of fixed size. borrowed: layers that use the keys of others. positions: None for no limit. dtype: of the weights.
    """

    kind: str
    layers: tuple[Layer, ...]
    states: int
    borrowed: int
    positions: int | None
    dtype: str

    @property
    def slides_everywhere(self) -> bool:
        """Tell if every layer has a window, so that the budget acts on all of them."""
        return all(layer.window is not None for layer in self.layers)

    @property
    def bounds(self) -> tuple[int | None, ...]:
        """Each layer's window, which it holds under any policy; None for layers on the budget: all, if every layer slides."""
        return tuple(None if self.slides_everywhere else layer.window for layer in self.layers)


class Configuration:
    """Values of a config.json, for plans; its methods know the names that different architectures give to one value.

    Args:
        values: of the file, with those of the inner "text_config" if the model also reads images.
        name: of the model, for errors.
        path: of the file.
    """

    def __init__(self, values: Mapping[str, Any], name: str, path: Path = Path()) -> None:
        """Unite the values: those of an inner "text_config" replace the outer ones, and both replace the defaults of SPARSE.

        `read` calls it. `kind` is the model_type of the part that writes text, and `outer` that of the whole model.
        """
        inner_parts = (values.get(key) for key in ("text_config", "llm_config"))
        inner: Mapping[str, Any] = next((item for item in inner_parts if isinstance(item, Mapping)), {})
        self.name, self.path, self.kind = name, path, str(inner.get("model_type") or values.get("model_type"))
        self.outer = str(values.get("model_type"))
        # SPARSE: defaults of families whose files leave them out; None in the inner part does not hide an outer value
        self.values = {**SPARSE.get(self.kind, {}), **values, **{key: item for key, item in inner.items() if item is not None}}

    @classmethod
    def read(cls, path: Path, name: str) -> Configuration:
        """Make a Configuration of the config.json at `path`, for `find_configuration`; raise KVPatchError if it is not one."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise KVPatchError(
                f"The config.json of {name} cannot be read: {error}. Name a model whose config.json is whole."
            ) from None
        if not isinstance(values, dict) or not values.get("model_type"):
            raise KVPatchError(f"The config.json of {name} names no model_type: name a folder or a model of transformers.")
        return cls(values, name, path)

    def get(self, *names: str) -> Any:
        """Return the value of the first of these names that config.json has, or None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def require_count(self, *names: str) -> int:
        """Return the value of the first of these names that config.json has; raise KVPatchError if it is no int above 0."""
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KVPatchError(
                f"The config.json of {self.name} (model_type {self.kind}) does not say {names[0]}: add it, such as "
                f'"{names[0]}": 32, or load the model and read patch.report().'
            )
        return value

    @property
    def n_layers(self) -> int:
        """Layers of the decoder."""
        return self.require_count("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers")

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.require_count("hidden_size", "n_embd", "d_model", "n_embed")

    @property
    def heads(self) -> int:
        """The number of query heads, for `kv_heads` and `head_size`. Families name it in different ways."""
        return self.require_count(
            "decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"
        )

    @property
    def head_size(self) -> int:
        """Numbers of a query, and of a key unless attention is latent: the file's own, or the width by the number of heads."""
        return self.get("head_dim", "attention_head_dim", "kv_channels") or self.width // self.heads

    @property
    def kv_heads(self) -> int:
        """The number of KV heads, for `_make_layer`; in a copy that `_read_layer` makes, of one layer."""
        if self.kind == "falcon":
            falcon_heads = self.get("num_kv_heads") if self.get("new_decoder_architecture") else None
            return falcon_heads or (
                1 if self.values.get("multi_query", True) and not self.get("new_decoder_architecture") else self.heads
            )
        if self.kind == "gpt_bigcode":
            return 1 if self.values.get("multi_query", True) else self.heads
        return self.get("num_key_value_heads") or self.heads

    @property
    def dtype(self) -> str:
        """Dtype of the weights, float32 where the file names none that transformers computes in."""
        name = str(self.get("dtype", "torch_dtype")).removeprefix("torch.")
        return name if name in ITEMSIZES else "float32"

    @refusing_values
    def read_shape(self) -> Shape:
        """Read what the cache's size depends on, for `plan`: layers, states, positions. KVPatchError: some are wrong."""
        kinds, windows = self._list_kinds(), self._list_windows()
        borrowed = self.get("num_kv_shared_layers") or 0  # the last layers, which use the keys of others
        own_layers = list(enumerate(zip(kinds, windows, strict=True)))[: len(kinds) - borrowed]
        # only attention layers have keys and values
        layers = [
            self._read_layer(index, window)._make_layer(window) for index, (kind, window) in own_layers if _is_attention(kind)
        ]
        # LongCat-Flash has two attention modules in each of its num_layers
        layers *= 2 if self.kind == "longcat_flash" and not self.get("num_hidden_layers") else 1
        # layers that keep a state of fixed size, beside keys or without
        states = sum(kind in _STATES or kind.startswith("hybrid") for kind in kinds)
        if not layers:
            raise KVPatchError(
                f"{self.name} (model_type {self.kind}) has no layer with keys and values: there is nothing to evict."
            )
        names = "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"
        limit = None if self._has_alibi() else self.get(*names)
        if limit is not None and type(limit) is not int:
            raise ValueError(f"{limit!r} is no number of positions")
        return Shape(self.kind, tuple(layers), states, borrowed, limit, self.dtype)

    def _has_alibi(self) -> bool:
        return self.kind in ("bloom", "mpt") or bool(self.get("alibi"))

    def _read_layer(self, index: int, window: int | None) -> Configuration:
        """Return a copy with the values of one layer, for `read_shape`: by "per_layer_config", or by a rule of two families.

        These are Gemma 4, of which older files lack that entry (layers of full attention have wider heads), and MiMo, whose
        layers with a window have twice the KV heads. window: of the layer, or None.
        """
        by_layer = {int(number): values for number, values in (self.get("per_layer_config") or {}).items()}  # such as "05"
        values = by_layer.get(index, {})
        if self.kind in _WIDER_FULL and window is None and "per_layer_config" not in self.values:
            heads = self.get("num_global_key_value_heads") if self.get("attention_k_eq_v") else None
            values = {"head_dim": self.get("global_head_dim") or 512, "num_key_value_heads": heads or self.kv_heads}
        if self.kind == "mimo_v2_flash" and window is not None:
            values = {"num_key_value_heads": 2 * self.kv_heads}
        layer = copy.copy(self)
        layer.values = {**self.values, **values}
        return layer

    def _make_layer(self, window: int | None) -> Layer:
        """Return the sizes of a layer's cache, for `read_shape`: of one latent vector a token, or of keys and values."""
        rank, rotary = self.get("kv_lora_rank"), self.get("qk_rope_head_dim")
        if rank and rotary:
            return Layer(1, rank + rotary, rank, window, latent=True)
        return Layer(self.kv_heads, self.head_size, self.get("v_head_dim") or self.head_size, window)

    def _list_kinds(self) -> list[str]:
        """List each layer's kind, such as "full_attention", for `read_shape`: as given, or by the keys of older families."""
        n, types = self.n_layers, self.get("layer_types", "layers_block_type")
        if types:
            return list(types)
        names = "attn_layer_period", "full_attention_interval", "layer_group_size"
        period, offset = self.get(*names), self.get("attn_layer_offset")
        if period and self.kind != "zamba":  # zamba's first layers do not follow the period
            attention_index = period - 1 if offset is None else offset
            return ["full_attention" if i % period == attention_index else "linear_attention" for i in range(n)]
        if (chosen := self.get("attn_layer_indices", "full_attn_idxs")) is not None:
            return ["full_attention" if i in chosen else "linear_attention" for i in range(n)]
        numbers = (self.get("linear_attn_config") or {}).get("full_attn_layers")  # Kimi Linear's begin with 1
        if numbers is not None:
            return ["full_attention" if i + 1 in numbers else "linear_attention" for i in range(n)]
        if self.kind == "falcon_h1":
            return ["hybrid"] * n  # each layer has attention and a state
        if self.kind in _NAMED or any("mamba" in name or name.startswith("ssm_") for name in self.values):
            raise KVPatchError(
                f"The config.json of {self.name} (model_type {self.kind}) does not say layer_types, the kind of each of its "
                'layers: add it, such as "layer_types": ["linear_attention", "full_attention"].'
            )
        return ["full_attention"] * n

    def _list_windows(self) -> Sequence[int | None]:
        """List layers' windows in tokens (Llama 4: chunks) or None, for `read_shape`; families have keys of their own."""
        n, types, window = self.n_layers, self.get("layer_types"), self.get("sliding_window")
        if self.kind == "gpt_neo":
            gpt_neo_kinds = [
                kind for part, times in self.get("attention_types") or [[["global"], n]] for _ in range(times) for kind in part
            ]
            return [self.values.get("window_size", 256) if kind == "local" else None for kind in gpt_neo_kinds]
        if (chunk := self.get("attention_chunk_size")) is not None and self.kind.startswith("llama4"):
            if not types:
                rotated = self.get("no_rope_layers") or [(i + 1) % 4 for i in range(n)]
                return [chunk if rotates else None for rotates in rotated]
            return [chunk if kind == "chunked_attention" else None for kind in types]
        if window is None or self.values.get("use_sliding_window") is False:
            return [None] * n
        if types:
            return [window if "sliding" in kind else None for kind in types]
        if (period := self.get("sliding_window_pattern", "_sliding_window_pattern") or _PATTERNS.get(self.kind)) is not None:
            # the last of each `period` layers has full attention
            return [None if isinstance(period, int) and (i + 1) % period == 0 else window for i in range(n)]
        if self.get("use_sliding_window") and self.kind not in _ALL_SLIDE:
            return [window if i >= (self.get("max_window_layers") or 0) else None for i in range(n)]
        return [window if self.kind in _ALL_SLIDE else None] * n


def _is_attention(kind: str) -> bool:
    return kind not in _STATES and kind not in _WITHOUT
