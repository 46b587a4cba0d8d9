"""The tiny twin of a model: the same class and attention, few layers and small widths, with random weights."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .interface import OTHERS, STATES
from .kinds import query_heads

PARAMETERS = 40_000_000
"""Parameters that a twin may have, so that checking it takes seconds."""

_LAYERS, _WIDTH, _INNER, _VOCAB, _EXPERTS, _WINDOW = 2, 64, 64, 128, 4, 8
# parts of a field's name, and the most that its number may be in a twin; the first row that fits counts. The last row makes
# windows so short that they show on a short text
_LIMITS = (
    (("pattern", "_every_"), sys.maxsize),
    (("_token_id", "_token_index"), _VOCAB - 1),
    (("vocab_size",), _VOCAB),
    (("intermediate", "ffn", "ff_dim", "d_ff", "n_inner"), _INNER),
    (("n_group", "num_group", "expert_group", "topk_group"), 1),
    (("linear_num",), 4),
    (("lru_width",), _WIDTH),
    (("per_tok", "top_k", "topk", "moe_k"), 2),
    (("experts",), _EXPERTS),
    (("window", "chunk", "block_size", "floor_scale"), _WINDOW),
)
_READERS = "num_kv_shared_layers"
_HEADS = ("decoder_attention_heads", "encoder_attention_heads")


def make_twin(decoder: Any, attentions: list[nn.Module]) -> Any:
    """Return a tiny random model of the class of `decoder` on the CPU, to be checked in its place; torch's random state stays.

    `_find_verdict` and `_find_failure` call it. It computes in float64, so that rounding hides nothing (but not with eager
    attention, whose softmax is in float32). It has a layer of each kind that `attentions` has.

    Raises:
        ValueError: the twin would be large or lacks a kind of layer. The model's class may raise anything else.
    """
    kind, config = type(decoder), shrink_config(decoder.config)
    capped = any("attn_logit_softcap" in key and value for key, value in vars(config).items())  # some versions' sdpa omits it
    config._attn_implementation = "sdpa" if getattr(kind, "_supports_sdpa", False) and not capped else "eager"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > PARAMETERS:
        raise ValueError(f"a twin of {kind.__name__} would have {size:,} parameters")
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        try:
            torch.set_default_dtype(torch.float32)
            torch.default_generator.manual_seed(0)  # torch.manual_seed would reseed every device, too
            twin = kind(config).eval()
        finally:
            torch.set_default_dtype(default)
        for parameter in twin.parameters():
            _draw_weights(parameter)
        twin = (twin if config._attn_implementation == "eager" else twin.double()).requires_grad_(False)
        twin(torch.zeros(1, 4, dtype=torch.int64), use_cache=False)  # a twin that cannot run is none
    kinds = {kind_of(module) for module in twin.modules()}  # full, sliding, no attention, ...
    if not {kind_of(module) for module in attentions} <= kinds:
        raise ValueError(f"a twin of {kind.__name__} lacks some of its kinds of attention layers")
    return twin


def kind_of(attn: nn.Module) -> tuple[Any, ...]:
    """Return what tells kinds of attention layers apart, for `make_twin`: the class, and attributes that are flags or texts."""
    flags = ((name, value) for name, value in vars(attn).items() if value is None or isinstance(value, bool | str))
    return type(attn), *sorted((one for one in flags if one[0] != "training" and not one[0].startswith("_")), key=str)


def _draw_weights(parameter: nn.Parameter) -> None:
    """Fill a twin's parameter with random numbers, for `make_twin`, large enough for uneven attention, which shows mistakes."""
    if parameter.ndim >= 2 and not parameter.requires_grad:  # a table of sinusoidal positions, which is not learned
        return
    if parameter.ndim >= 2:
        parameter.normal_(0.0, 0.8 * parameter.shape[-1] ** -0.5)
    else:
        parameter.add_(torch.randn_like(parameter) * 0.2)


def shrink_config(config: Any) -> Any:
    """Return a model's configuration for its tiny twin (a random model to check): few layers, heads and experts, small widths.

    `make_twin` and `describe_twin` call it. Head sizes, scales, caps, sinks and rotary parameters stay, since they shape
    attention; sliding windows become so short that they matter. The twin has a layer of each kind, with layers that reuse the
    keys of another. `config` does not change.
    """
    fields = {key: value for key, value in config.to_dict().items() if key not in ("quantization_config", "dtype")}
    of_hybrid = _count_hybrid_layers(getattr(config, "layer_types", None) or ())  # layers of the twin; 0 if no hybrid
    if of_hybrid:  # drop the fields that its class computes from other fields
        fields = {key: value for key, value in fields.items() if key not in _list_derived(config)}
    # a field's name in the family's configuration, by its usual name
    names = {**{name: name for name in fields}, **getattr(config, "attribute_map", {})}
    layers, heads = config.num_hidden_layers, query_heads(config) or 1
    kv_heads = None if hasattr(config, _HEADS[0]) else getattr(config, "num_key_value_heads", None)
    # numbers of the layers that the twin copies
    chosen = _pick_sharing_layers(fields, layers) or range(max(_count_kinds(fields, layers), of_hybrid))
    few_layers = len(chosen)
    few_kv, few_heads = _few_heads(heads, kv_heads or heads, 2 if of_hybrid else 4)  # a hybrid's layers are many
    # cut every field: lists and dicts with a value per layer to the chosen layers, numbers to the limits
    for key, value in fields.items():
        if isinstance(value, list | tuple):  # one value for each layer, perhaps: then those of the chosen layers
            fields[key] = [_choose_size(key, one) for one in ([value[i] for i in chosen] if len(value) == layers else value)]
        elif isinstance(value, dict) and value and all(map(_is_layer, value)):  # values by number of the layer
            fields[key] = {chosen.index(int(layer)): one for layer, one in value.items() if int(layer) in chosen}
        elif isinstance(value, dict) and key.endswith("_config"):  # of its attention, or of its experts
            fields[key] = {name: few_kv if "kv_n_heads" in name else _choose_size(name, one) for name, one in value.items()}
        else:
            fields[key] = _choose_size(key, value)
    # numbers of layers and heads, under each of their names; a model without such a field has a list of that length
    for few, *aliases in ((few_layers, "num_hidden_layers", "decoder_layers"), (few_heads, "num_attention_heads", *_HEADS)):
        fields |= dict.fromkeys({names.get(name, name) for name in aliases} & fields.keys(), few)
    if kv_heads is not None:
        fields[names.get("num_key_value_heads", "num_key_value_heads")] = few_kv
    if (config.to_dict().get("sliding_window") or 0) >= getattr(config, "max_position_embeddings", sys.maxsize):
        fields["sliding_window"] = config.sliding_window  # no text is longer than this window: leave it without effect
    # num_kv_shared_layers (_READERS): how many of the chosen layers are among the last ones, which reuse keys
    fields |= {name: sum(i >= layers - count for i in chosen) for name, count in fields.items() if name == _READERS}
    # the width is free if the head size is a field; else it is the number of heads times their size
    is_free = isinstance(fields.get("head_dim"), int)
    fields[names["hidden_size"]] = _WIDTH if is_free else few_heads * (config.hidden_size // heads)
    if "attention_hidden_size" in fields:  # of embeddings next to the hidden states
        fields["attention_hidden_size"] = fields[names["hidden_size"]] * (config.attention_hidden_size // config.hidden_size)
    if "mamba_n_heads" in fields and "mamba_expand" in fields:
        fields["mamba_n_heads"] = fields["mamba_expand"] * fields[names["hidden_size"]] // fields["mamba_d_head"]
    new = type(config).from_dict(fields)
    if hasattr(new, "_experts_implementation"):
        new._experts_implementation = "eager"
    return new


def _is_layer(key: object) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.isdigit())


def _count_kinds(fields: dict[str, Any], layers: int) -> int:
    """Return how many of a model's first layers its tiny twin needs to have a layer of each kind; at least 2 if it has two.

    `shrink_config` asks. fields: the configuration as a dict. Kinds are told by lists with one value per layer, and dicts with
    layer numbers as keys.
    """
    count = min(_LAYERS, layers)
    for value in fields.values():
        # a list of values that all differ tells no kinds, unless the model has but two layers
        if isinstance(value, list | tuple) and len(value) == layers and len(set(map(str, value))) < max(layers, 3):
            count = max([count, *(value.index(one) + 1 for one in value)])
        elif isinstance(value, dict) and value and all(map(_is_layer, value)):
            count = max(count, min(map(int, value)) + 1)
    return count


def _pick_sharing_layers(fields: dict[str, Any], layers: int) -> list[int]:
    """Return the numbers of the layers that the tiny twin copies of a model whose last layers reuse keys of layers before them.

    `shrink_config` asks. They are the first and the last layer of each kind among those that compute keys (the last one's keys
    are reused), and the first of each kind among the others. [] if the model has no layers that reuse keys. fields: the
    configuration as a dict.
    """
    if _READERS not in fields:
        return []
    first = layers - fields[_READERS]  # the first layer that reuses keys
    chosen = set[int]()
    for start, stop in ((0, first), (first, layers)):  # the layers that compute keys, then those that reuse them
        for value in fields.values():
            if isinstance(value, list | tuple) and len(value) == layers and len(set(map(str, value))) < max(layers, 3):
                chosen |= {value.index(one, start, stop) for one in value[start:stop]}
                if not start:  # the last of each kind stores its keys for others, and may do so where there are none
                    chosen |= {max(i for i in range(stop) if value[i] == one) for one in value[:stop]}
    return sorted(chosen)


def _list_derived(config: Any) -> set[str]:
    """Return the names of attributes that a configuration computes from its fields, for `shrink_config` to drop."""
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else vars(config).keys()
    return vars(config).keys() - names - set(config.attribute_map.values())


def _count_hybrid_layers(kinds: Sequence[str]) -> int:
    """Return how many of a hybrid's first layers its tiny twin needs; 0 if the model is no hybrid (all layers only attend).

    `shrink_config` asks. These have a layer of each kind, and two with attention. kinds: the kind of each layer by the
    configuration.
    """
    if not set(kinds) & (OTHERS | STATES):
        return 0
    attention = [number for number, kind in enumerate(kinds) if kind not in STATES | {"moe", "mlp"}]
    return max([*(kinds.index(kind) for kind in kinds), *attention[:2]]) + 1


def _few_heads(heads: int, kv_heads: int, most: int) -> tuple[int, int]:
    """Return a tiny twin's numbers of KV heads and query heads, from those of the whole model, for `shrink_config`.

    At most `most` KV heads, or 2 if several query heads share one; at most `most` query heads for each of them.
    """
    group = max(heads // kv_heads, 1)
    few = min(kv_heads, most if group == 1 else 2)
    return few, few * min(group, most)


def _choose_size(key: str, value: Any) -> Any:
    """Return a tiny twin's value of a configuration's field, for `shrink_config`: integers are cut to limits in `_LIMITS`."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return min(value, next((limit for parts, limit in _LIMITS if any(part in key for part in parts)), value))
