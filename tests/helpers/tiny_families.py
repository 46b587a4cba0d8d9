"""Tiny random models of the families that route attention through transformers' attention interface."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, VoxtralConfig, VoxtralForConditionalGeneration
from transformers.models.roformer import modeling_roformer

from tests.helpers.tiny import IDS, VOCAB, spread_weights

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **IDS,
}
GQA = {**BASE, "num_key_value_heads": 2}
SLIDING = {"sliding_window": 7}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
FOUR = {**SLIDING, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 24, "experts_implementation": "eager"}
CHUNKS = {"attention_chunk_size": 7, "intermediate_size_mlp": 48, "head_dim": 8, "attn_temperature_tuning": False}
CHUNKS |= {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
PIECES = ["chunked_attention", "full_attention"]
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}

# name: (model_type, configuration); some families stand here twice, for what their configuration can turn on
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", GQA),
    "qwen2_mixed": ("qwen2", {**GQA, **MIXED, "use_sliding_window": True}),
    "qwen3": ("qwen3", {**GQA, "head_dim": 8}),
    "phi3": ("phi3", {**GQA, "sliding_window": None}),
    "phi3_sliding": ("phi3", {**GQA, **SLIDING}),
    "phi": ("phi", {**GQA, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "gemma": ("gemma", {**BASE, "num_key_value_heads": 1, "head_dim": 12}),
    "gemma2": ("gemma2", {**GQA, **FOUR, "head_dim": 8, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GQA, **MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gpt_neox": ("gpt_neox", {**BASE, "rotary_pct": 0.5}),
    "opt": ("opt", {**BASE, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "starcoder2": ("starcoder2", {**GQA, **SLIDING}),
    "olmo": ("olmo", {**GQA, "clip_qkv": 1.5}),
    "olmo2": ("olmo2", GQA),
    "olmo3": ("olmo3", {**GQA, **MIXED}),
    "mixtral": ("mixtral", {**GQA, **SLIDING, **EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        {**GQA, **MIXED, **EXPERTS, "use_sliding_window": True, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("qwen3_moe", {**GQA, **EXPERTS, "num_experts": 4, "head_dim": 8}),
    "granite": ("granite", {**GQA, "attention_multiplier": 0.5, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "granitemoe": ("granitemoe", {**GQA, **EXPERTS, "attention_multiplier": 0.5, "num_local_experts": 4}),
    "cohere": ("cohere", {**GQA, "use_qk_norm": True, "logit_scale": 1.0}),
    "cohere2": ("cohere2", {**GQA, **MIXED, "logit_scale": 1.0}),
    "gpt_oss": ("gpt_oss", {**GQA, **FOUR, **EXPERTS, **PLAIN, "head_dim": 8, "num_local_experts": 4}),
    "stablelm": ("stablelm", {**GQA, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "glm": ("glm", {**GQA, "head_dim": 8}),
    "glm4": ("glm4", {**GQA, "head_dim": 8}),
    "smollm3": ("smollm3", {**GQA, "no_rope_layers": [1, 0]}),
    "nemotron": ("nemotron", {**GQA, "head_dim": 8}),
    "arcee": ("arcee", GQA),
    "helium": ("helium", {**GQA, "head_dim": 8}),
    "gpt_bigcode": ("gpt_bigcode", {"vocab_size": VOCAB, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, **IDS}),
    "seed_oss": ("seed_oss", {**GQA, "head_dim": 12}),
    "ernie4_5": ("ernie4_5", {**GQA, "head_dim": 8}),
    "exaone4": ("exaone4", {**GQA, **MIXED}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**GQA, "head_dim": 8}),
    "apertus": ("apertus", {**GQA, **PLAIN}),
    "bitnet": ("bitnet", GQA),
    "ministral": ("ministral", {**GQA, **MIXED, "head_dim": 8}),
    "persimmon": ("persimmon", {**BASE, "partial_rotary_factor": 0.5}),
    "olmoe": ("olmoe", {**GQA, **EXPERTS, "num_experts": 4}),
    "deepseek_v2": ("deepseek_v2", {**BASE, **LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "deepseek_v3": (
        "deepseek_v3",
        {**BASE, **LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "deepseek_v3_deep": (  # steps of the layers between the first and the last are others
        "deepseek_v3",
        {**BASE, **LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 4}
        | {"num_hidden_layers": 4},
    ),
    "minicpm3": ("minicpm3", {**BASE, **LATENT, "scale_emb": 1, "dim_model_base": None, "scale_depth": None}),
    "youtu": ("youtu", {**BASE, **LATENT}),
    "llama4": ("llama4_text", {**GQA, **CHUNKS, "no_rope_layers": [1, 0], "layer_types": PIECES}),
    "llama4_chunks": ("llama4_text", {**GQA, **CHUNKS, "no_rope_layers": [1, 1], "use_qk_norm": False}),
    "llama4_tuned": (
        "llama4_text",
        {**GQA, **CHUNKS, "num_hidden_layers": 4, "no_rope_layers": [1, 0] * 2, "layer_types": PIECES * 2}
        | {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 1.5},
    ),
}
_BERT = {**BASE, "is_decoder": True}
_BART = {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 3, "encoder_layers": 4, "max_position_embeddings": 512}
_BART |= {"decoder_attention_heads": 4, "encoder_attention_heads": 2, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, **IDS}
_LOCAL = {"window_size": 7, "attention_types": [[["local", "global"], 1]]}
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # attention code of their own, tested by tests/arch/test_own_attention.py
    "codegen": (
        "codegen",
        {"vocab_size": VOCAB, "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 512, **IDS},
    ),
    "gpt_neo": ("gpt_neo", {**BASE, **_LOCAL, "num_layers": 2, "num_heads": 4}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {**BASE, "intermediate_multiple_size": 2, "rotary_pct": 0.5}),
    "xglm": ("xglm", {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, **IDS}),
    "mvp": ("mvp", _BART),
    "trocr": ("trocr", _BART),
    "rembert": ("rembert", {**_BERT, "input_embedding_size": 16, "output_embedding_size": 24}),
    "megatron-bert": ("megatron-bert", _BERT),
    "roformer": ("roformer", _BERT),
    "roformer_values": ("roformer", {**_BERT, "rotary_value": True}),
    "longcat_flash": (
        "longcat_flash",
        {**BASE, **LATENT, "num_layers": 2, "num_hidden_layers": 4, "head_dim": 4, "ffn_hidden_size": 48, "n_routed_experts": 4}
        | {"moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "experts_implementation": "eager"},
    ),
}
BY_COLUMNS = ("llama4_tuned",)  # padding counts, so that a padded row is not as it is alone
ONE_WINDOW = ("phi3_sliding", "starcoder2", "mixtral", "llama4_chunks")  # all layers slide alike: the policy acts on all


def make(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model with weights large enough that attention is far from uniform; norms, biases and sinks are random too."""
    torch.manual_seed(seed)
    kind, given = {**FAMILIES, **OWN}[name]
    if kind == "roformer" and not hasattr(modeling_roformer, "create_causal_mask"):
        pytest.skip("this RoFormer reads in both directions even as a decoder, and is refused")
    config = AutoConfig.for_model(kind, **given)
    for rate in [key for key in vars(config) if "dropout" in key or key.endswith("pdrop")]:
        setattr(config, rate, 0.0)
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # which some versions' sdpa leaves out
    model = AutoModelForCausalLM.from_config(config, **({"attn_implementation": "eager"} if capped else {})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not parameter.requires_grad:  # a table of sines
                continue
            if "norm" in key and "weight" in key:
                parameter.uniform_(1.0, 2.0) if ".q" in key or ".k" in key else parameter.uniform_(0.7, 1.3)
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 0.25)
            else:
                parameter.normal_(0.0, 0.2 if "sink" not in key else 1.0)
    return model.to(dtype)


SOUND = 96


def make_listener() -> Any:
    """A model that merges sounds into the embeddings of its decoder."""
    torch.manual_seed(0)
    sounds = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8}
    text = {"model_type": "llama", **GQA, "head_dim": 8}
    config = VoxtralConfig(audio_config={**sounds, "max_source_positions": 20}, text_config=text, audio_token_id=SOUND)
    return spread_weights(VoxtralForConditionalGeneration(config).eval())
