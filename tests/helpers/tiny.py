"""Tiny random models of every architecture, and what the tests do with them again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from kvpatch import EvictingCache

VOCAB = 97
IDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_ROPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512, **IDS}


def _llama(layers: int, heads: int = 4, kv: int = 4) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**_ROPE, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv))


def _mistral(layers: int, window: int | None) -> MistralForCausalLM:
    return MistralForCausalLM(
        MistralConfig(**_ROPE, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
    )


def _mpt(layers: int) -> MptForCausalLM:
    return MptForCausalLM(
        MptConfig(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=layers, max_seq_len=512, use_cache=True, **IDS)
    )


def _gptj(layers: int) -> GPTJForCausalLM:
    return GPTJForCausalLM(
        GPTJConfig(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=layers, rotary_dim=4, n_positions=512, **IDS)
    )


def _gpt2(layers: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_head=4,
            n_layer=layers,
            n_positions=512,
            scale_attn_by_inverse_layer_idx=True,
            **IDS,
        )
    )


def _falcon(layers: int, **kind: Any) -> FalconForCausalLM:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": layers}
    return FalconForCausalLM(FalconConfig(**sizes, ffn_hidden_size=48, max_position_embeddings=512, **kind, **IDS))


def _bloom(layers: int) -> BloomForCausalLM:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_head=4, n_layer=layers, **IDS))


MODELS: dict[str, Callable[[int], Any]] = {
    "llama": _llama,
    "llama_gqa": lambda layers: _llama(layers, 4, 2),
    "llama_mqa": lambda layers: _llama(layers, 4, 1),
    "mistral": lambda layers: _mistral(layers, None),
    "mistral_sliding": lambda layers: _mistral(layers, 12),
    "mpt": _mpt,
    "gptj": _gptj,
    "gpt2": _gpt2,
}
# tested like those above, by tests/arch/test_falcon_bloom.py
MORE: dict[str, Callable[[int], Any]] = {
    "falcon": lambda layers: _falcon(layers, multi_query=True, parallel_attn=True),
    "falcon_gqa": lambda layers: _falcon(layers, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_alibi": lambda layers: _falcon(layers, multi_query=False, parallel_attn=False, alibi=True, bias=True),
    "bloom": _bloom,
}
FIVE = ("llama_gqa", "mistral_sliding", "mpt", "gptj", "gpt2")


def spread_weights(model: Any) -> Any:
    """The model, with weights large enough that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.25)
    return model


def make(name: str, *, layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers."""
    torch.manual_seed(seed)
    return spread_weights({**MODELS, **MORE}[name](layers).eval()).to(dtype)


def prompt(B: int, n: int, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCAB, (B, n), generator=torch.Generator().manual_seed(seed), device="cpu")


def left_pad(ids: Tensor, lengths: list[int]) -> Tensor:
    """The attention mask [B,n] of rows of these lengths, padded on the left."""
    n = ids.shape[1]
    return (torch.arange(n)[None] >= n - torch.tensor(lengths)[:, None]).long()


def force(model: Any, ids: Tensor, fed: Tensor, mask: Tensor | None = None, cache: Any = None) -> tuple[Tensor, Any]:
    """Prompt `ids` [B,n], then `fed` [B,m] token by token: logits [B,1+m,V] after the prompt and each step, the cache."""
    with torch.no_grad():
        kwargs = _positions(model, None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :])
        out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **kwargs)
        logits, past = [out.logits[:, -1:]], out.past_key_values
        sound(past)
        for t in range(fed.shape[1]):
            step = fed[:, t : t + 1]
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(step)], 1)
            kwargs = _positions(model, None if mask is None else mask.sum(1, keepdim=True) - 1)
            out = model(step, attention_mask=mask, past_key_values=past, use_cache=True, **kwargs)
            logits.append(out.logits[:, -1:])
            sound(past)
    return torch.cat(logits, 1), past


def _positions(model: Any, position_ids: Tensor | None) -> dict[str, Tensor]:
    """position_ids where a padded batch needs them; MPT has none."""
    return {} if position_ids is None or model.config.model_type == "mpt" else {"position_ids": position_ids}


def snapshot(model: Any) -> dict[tuple[str, str], Any]:
    """Every attribute and hook of every module, by identity."""
    seen: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith(("_forward_pre_hooks", "_forward_hooks")):
                value = tuple(value.items())
                seen[name, key] = value
            else:
                seen[name, key] = id(value) if not isinstance(value, bool | int | str | float) else value
    return seen


def sound(cache: Any) -> None:
    """Check that a cache of ours is in a state that it may be in, after whatever was done to it."""
    if isinstance(cache, EvictingCache):
        cache.check_invariants()
