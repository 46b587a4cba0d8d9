"""A decoder as its code lies beside its weights: attention written by hand, two KV heads, half of a head's channels turned."""

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=97, width=32, heads=4, num_hidden_layers=2, **kwargs):
        self.vocab_size, self.width, self.heads, self.num_hidden_layers = vocab_size, width, heads, num_hidden_layers
        self.use_cache, self.initializer_range = True, 0.25
        super().__init__(**kwargs)


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.heads, self.head_dim = layer_idx, config.heads, config.width // config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.kv = nn.Linear(config.width, 4 * self.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width)

    def project(self, hidden, cos, sin):
        q, kv = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q(hidden), self.kv(hidden)))
        k, v = kv.split(2, 1)
        return self.turn(q, cos, sin), self.turn(k, cos, sin), v

    def turn(self, x, cos, sin):
        one, other, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)

    def forward(self, hidden, tables, mask=None, past=None):
        q, k, v = self.project(hidden, *tables)
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        k, v = (one.repeat_interleave(self.heads // 2, 1) for one in (k, v))
        logits = q @ k.transpose(-1, -2) / 3.0
        logits = logits if mask is None else logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        return self.out((torch.softmax(logits, -1) @ v).transpose(1, 2).flatten(2)), None


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(OwnAttention(config, number) for number in range(config.num_hidden_layers))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def mask(self, attention_mask, seen, new, device):
        if attention_mask is not None and attention_mask.ndim == 4:
            return attention_mask
        at = torch.arange(seen + new, device=device)
        causal = (at <= at[seen:, None])[None, None]
        return causal if attention_mask is None else causal & attention_mask[:, None, None, :].bool()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None, past_key_values=None, **kwargs
    ):  # fmt: skip
        past_key_values = past_key_values if cache is None else cache  # whose name it is since transformers 5.24
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        seen, new = 0 if past_key_values is None else past_key_values.get_seq_length(), input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(seen, seen + new, device=input_ids.device)[None]
        hidden = self.tokens(input_ids)
        angles = position_ids[:, None, :, None].to(hidden.dtype) * torch.tensor([1.0, 0.1], device=hidden.device)
        mask = self.mask(attention_mask, seen, new, hidden.device)
        for layer in self.layers:
            hidden = hidden + layer(hidden, (angles.cos(), angles.sin()), mask, past_key_values)[0]
        return CausalLMOutputWithPast(None, self.head(hidden), past_key_values)
