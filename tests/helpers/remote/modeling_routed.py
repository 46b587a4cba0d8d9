"""A decoder as its code lies beside its weights: attention through transformers' attention interface."""

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class RoutedConfig(PreTrainedConfig):
    model_type = "routed"

    def __init__(self, vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, 2
        self.use_cache, self.initializer_range = True, 0.25
        super().__init__(**kwargs)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
    logits = query @ key.transpose(2, 3) * scaling
    weights = torch.softmax(logits if attention_mask is None else logits + attention_mask, -1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def rotated(states, position_ids):
    """Each pair of neighbouring channels, turned by the token's position."""
    size = states.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(size, device=states.device, dtype=states.dtype) / size)
    angles = position_ids[:, None, :, None].to(states.dtype) * rates
    even, odd, cos, sin = states[..., ::2], states[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class RoutedAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.attention_dropout, self.is_causal = 0.5, 0.0, True
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv_proj = nn.Linear(config.hidden_size, heads * self.head_dim)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, position_ids, attention_mask=None, past_key_values=None, **kwargs):
        heads, few = self.config.num_attention_heads, self.config.num_key_value_heads
        states = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = states.split([heads, few, few], 1)
        query, key = rotated(query, position_ids), rotated(key, position_ids)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class RoutedModel(PreTrainedModel):
    config_class = RoutedConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RoutedAttention(config, number) for number in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None,
        **kwargs,
    ):  # fmt: skip
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + hidden_states.shape[1], device=hidden_states.device)[None]
        mask = create_causal_mask(self.config, hidden_states, attention_mask, past_key_values)
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states, position_ids, mask, past_key_values, **kwargs)[0]
        return BaseModelOutputWithPast(hidden_states, past_key_values)


class RoutedForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RoutedConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.model = RoutedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, past_key_values=None, **kwargs
    ):  # fmt: skip
        past_key_values = past_key_values if cache is None else cache  # whose name it is since transformers 5.24
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache, **kwargs)
        return CausalLMOutputWithPast(None, self.lm_head(out.last_hidden_state), out[1] if len(out) > 1 else None)
