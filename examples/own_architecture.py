"""A decoder of your own, which transformers does not know: an adapter of a dozen lines, and all policies work on it.

python -m examples.own_architecture
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

import kvpatch
from kvpatch.evaluation.check import CheckTable


class ToyConfig(PretrainedConfig):
    model_type = "toy"

    def __init__(self, vocab_size: int = 97, width: int = 32, heads: int = 4, layers: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.heads, self.num_hidden_layers = vocab_size, width, heads, layers
        self.positions, self.use_cache, self.initializer_range = 256, True, 0.3


class ToyAttention(nn.Module):
    """One key and one value for all query heads, and logits that are cosines times a learned number."""

    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.D = layer_idx, config.heads, config.width // config.heads
        self.qkv = nn.Linear(config.width, config.width + 2 * self.D)
        self.sharpness = nn.Parameter(torch.tensor(8.0))
        self.out = nn.Linear(config.width, config.width)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(hidden).unflatten(-1, (-1, self.D)).transpose(1, 2).split([self.heads, 1, 1], dim=1)
        return nn.functional.normalize(q, dim=-1) * self.sharpness, nn.functional.normalize(k, dim=-1), v

    def forward(self, hidden: Tensor, mask: Tensor | None, past: DynamicCache | None) -> tuple[Tensor, None]:
        q, k, v = self.project(hidden)
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        logits = q @ k.transpose(-1, -2)
        a = torch.softmax(logits if mask is None else logits + mask, -1)
        return self.out((a @ v).transpose(1, 2).flatten(2)), None


class ToyModel(PreTrainedModel, GenerationMixin):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Embedding(config.positions, config.width)
        self.layers = nn.ModuleList(ToyAttention(config, layer) for layer in range(config.num_hidden_layers))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, cache: Any = None,
        use_cache: bool | None = None, past_key_values: Any = None, **_: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        seen = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(seen, seen + input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.tokens(input_ids) + self.places(position_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, cache)
        for layer in self.layers:
            hidden = hidden + layer(hidden, mask, cache)[0]
        return CausalLMOutputWithPast(None, self.head(hidden), cache)


class ToyAdapter(kvpatch.Adapter):
    """All that kvpatch has to know."""

    name, summary, projection = "toy", "a decoder of our own", "out"
    classes = (f"{ToyAttention.__module__}.{ToyAttention.__qualname__}",)
    why_not = "its positions are learned"

    def project(self, attn: Any, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return attn.project(hidden)

    def scale(self, attn: Any) -> float:
        return 1.0

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return 1, attn.D

    def max_positions(self, config: Any) -> int | None:
        return config.positions


def toy(seed: int = 0) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(ToyConfig()).eval()


def main(policy: str = "keyformer", k: float = 0.25, new: int = 8) -> tuple[kvpatch.Report, CheckTable]:
    if "toy" not in kvpatch.list_architectures():
        kvpatch.register_arch(ToyAdapter())
    model, ids = toy(), torch.arange(64)[None] % 13 + 1
    with kvpatch.patched(model, policy, k) as patch:
        model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
        report = patch.report()
    print(report)
    checks = kvpatch.check_model(model, policy, k)
    print(checks)
    return report, checks


if __name__ == "__main__":
    main()
