"""Kinds of attention modules: an encoder's, cross-attention, layers that use others' keys; what each says of itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import KVPatchError

CROSS = frozenset(("encoder_attn", "crossattention", "cross_attn"))
"""Names of modules that attend to what an encoder read."""
NO_DECODER = "is_decoder=False of its configuration"


def source_of(attn: nn.Module, attentions: list[nn.Module]) -> nn.Module | None:
    """Return the module whose keys and values `attn` uses; None if it computes its own. `with_readers` asks at patched().

    attentions: all attention modules of the model. Those that share their keys say so by `store_full_length_kv`.

    Raises:
        KVPatchError: `attn` uses the keys of another layer, but no module of its kind says that it shares them.
    """
    if not getattr(attn, "is_kv_shared_layer", False):
        return None
    kind = getattr(attn, "layer_type", None)
    storing = (one for one in attentions if getattr(one, "store_full_length_kv", False))
    source = next((one for one in storing if getattr(one, "layer_type", None) == kind), None)
    if source is None or kind is None:
        raise KVPatchError(
            f"A {type(attn).__name__} uses the keys and values of a layer before it, but no module says that it stores them "
            f"for layers of type {kind!r} (store_full_length_kv): kvpatch does not serve it."
        )
    return source


def attends_both_ways(module: nn.Module) -> bool:
    """Tell whether an attention module declares itself bidirectional, as in an encoder."""
    return getattr(module, "is_causal", None) is False


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Tell if a module is attention to what an encoder read, by its name in the model or by its class's name."""
    last = name.rpartition(".")[2]
    return last in CROSS or "crossattention" in type(module).__name__.lower()


def make_encoder_error(model: nn.Module, sign: str) -> KVPatchError:
    """Return the error of patched() for a model that sees later tokens too; `refuse_other_kinds` and `check` raise it.

    sign: what shows it, as "is_causal=False of X".
    """
    return KVPatchError(
        f"{type(model).__name__} attends in both directions ({sign}): an encoder reads its text at once and keeps no cache "
        "that could be put on a budget. Give a causal decoder, or set is_decoder=True if it was trained as one."
    )


def position_limit(config: Any) -> int | None:
    """Return the number of positions that a configuration of transformers names, or None."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)


def query_heads(config: Any) -> int | None:
    """Return the number of a decoder's query heads, or None; in BART's configuration num_attention_heads is the encoder's."""
    names = ("decoder_attention_heads", "num_attention_heads")
    return next((found for found in (getattr(config, name, None) for name in names) if isinstance(found, int)), None)


def count_query_heads(attn: Any, config: Any) -> int | None:
    """Return the query heads of an attention module, or None: its own, where it has them, since layers may differ in them."""
    own = getattr(attn, "num_heads", None)
    return own if isinstance(own, int) else query_heads(config)


def knows_number(attn: Any) -> bool:
    """Tell whether an attention module knows the number of its layer; in a block that several layers share it does not."""
    number = getattr(attn, "layer_idx", None)
    return isinstance(number, int) and number >= 0
