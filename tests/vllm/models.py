"""Small models with random weights, in folders as vLLM reads them.

Their weights are larger than those of a fresh model, and the prompts' tokens distinct, so that logits and scores have gaps far
beyond the rounding in which vLLM's layers differ from transformers': tokens are then equal or the algorithm differs.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 512
GROUPED = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {**GROUPED, "num_hidden_layers": 3},
    "Mistral": {**GROUPED, "num_hidden_layers": 2, "sliding_window": 48},
    "Qwen2": {**GROUPED, "num_hidden_layers": 2},
    "Qwen3": {**GROUPED, "num_hidden_layers": 2},
    "Gemma2": {**GROUPED, "num_hidden_layers": 4, "sliding_window": 48, "tie_word_embeddings": True},
    "GPT2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "DeepseekV2": {**LATENT, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True},
}

POLICIES: dict[str, dict[str, Any]] = {
    "h2o": {},
    "roco": {},
    "keyformer": {},
    "scissorhands": {},
    "snapkv": {"window": 8},
    "chunk_kv": {"window": 8},
    "lag_kv": {},
    "window": {},
    "streaming_llm": {},
    "dilated_window": {},
    "tova": {},
    "key_norm": {},
    "key_diff": {},
    "random": {"seed": 3},
    "critical_snapkv": {"window": 8},
    "critical(h2o)": {},
}
"""Policies that both engines serve, and options that suit short prompts."""


def save(family: str, folder: Path, **changed: Any) -> Any:
    """Make a model, save it, and return it. changed: its sizes that are not those of the family."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "tie_word_embeddings": False, **SIZES[family], **changed}
    config = getattr(transformers, f"{family}Config")(**sizes)
    found = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, found)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # tied embeddings echo the last token unless the layers add far more
                parameter.mul_(40 if family == "Bloom" and "dense" in name else 4)
    model.save_pretrained(folder)
    return model


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rnd = random.Random(seed)
    return [rnd.sample(range(2, VOCAB), n) for n in lengths]
