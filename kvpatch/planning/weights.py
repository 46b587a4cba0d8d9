"""Bytes of a model's weights: as its safetensors files say, or counted from its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from .configuration import ITEMSIZES, Configuration, refusing_values

INDEX, FILE = "model.safetensors.index.json", "model.safetensors"
_PLAIN = frozenset(
    (
        "gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_bigcode", "codegen", "mpt", "bloom", "falcon", "opt",
        "phi", "starcoder2", "nemotron", "persimmon", "apertus", "xglm", "arcee", "mvp", "trocr", "rembert", "megatron-bert",
        "roformer",
    )
)  # fmt: skip
"""Kinds whose feed-forward layers have no gate."""
_LEARNED = frozenset(("gpt2", "gpt_neo", "gpt_bigcode", "opt"))  # kinds with a table of positions


class Weights(NamedTuple):
    """Bytes of the weights, and where the number comes from."""

    nbytes: int
    source: str


def read_weights(folder: Path) -> Weights | None:
    """Read the bytes from the index or the header of a folder's safetensors; None if it has neither."""
    try:
        if (folder / INDEX).is_file():
            return Weights(int(json.loads((folder / INDEX).read_text())["metadata"]["total_size"]), f"the index {INDEX}")
        if (folder / FILE).is_file():
            return Weights(_read_header(folder / FILE), f"the header of {FILE}")
    except (KeyError, TypeError, ValueError, OSError):
        return None
    return None


def _read_header(path: Path) -> int:
    """Return the bytes of the tensors that a file's header lists."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(one["data_offsets"][1] - one["data_offsets"][0] for name, one in header.items() if name != "__metadata__")


@refusing_values
def count_weights(config: Configuration, dtype: str) -> Weights:
    """Count the bytes of matrices that a configuration describes; norms and biases are left out."""
    E, V, n = config.width, config.need("vocab_size", "n_vocab"), config.n_layers
    tied = config.values.get("tie_word_embeddings", True)
    tables = V * E * (1 if tied else 2)
    if config.kind in _LEARNED:
        tables += E * (config.get("max_position_embeddings", "n_positions") or 0)
    tables += n * (config.get("vocab_size_per_layer_input") or 0) * (config.get("hidden_size_per_layer_input") or 0)
    dense = _count_dense_layers(config)
    layers = n * _count_attention(config) + dense * _count_dense(config) + (n - dense) * _count_experts(config)
    return Weights((tables + layers) * ITEMSIZES[dtype], "config.json, without norms and biases")


def _count_dense_layers(config: Configuration) -> int:
    """Count the layers without experts."""
    n, step = config.n_layers, config.get("interleave_moe_layer_step")
    if not config.experts:
        return n
    return n - n // step if step else min(config.get("first_k_dense_replace") or 0, n)


def _count_attention(config: Configuration) -> int:
    """Count the numbers of a layer's attention."""
    E, N, D = config.width, config.heads, config.head_size
    rank, rotary = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if not (rank and rotary):
        return 2 * E * N * D + 2 * E * config.kv_heads * D
    plain, value = config.need("qk_nope_head_dim"), config.need("v_head_dim")
    own, asked = config.get("q_lora_rank"), N * (plain + rotary)
    queries = own * (E + asked) if own else E * asked
    return queries + E * (rank + rotary) + rank * N * (plain + value) + N * value * E


def _count_dense(config: Configuration) -> int:
    """Count the numbers of a feed-forward layer."""
    inner = (
        config.get("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * config.width
    )
    if isinstance(inner, list):  # one of each layer
        inner = sum(inner) // len(inner)
    return (2 if config.kind in _PLAIN else 3) * config.width * inner


def _count_experts(config: Configuration) -> int:
    """Count the numbers of a layer of experts and its router."""
    if not config.experts:
        return 0
    inner = config.get("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size") or 4 * config.width
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * inner
    shared = inner if config.kind.startswith("llama4") else shared
    return config.width * (3 * (config.experts * inner + shared) + config.experts)
