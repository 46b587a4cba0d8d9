"""Nine architectures as the oracle needs them: everything but attention, in float64, from the model's own modules.

Two kinds of these modules round to float32 inside a float64 model: RMSNorm, and the rotary tables of Llama, Mistral and
GPT-J. That is accepted: whoever runs the same float64 model computes with the same roundings of the same numbers, so
that the oracle and a correct float64 run agree to about 1e-12, which recomputing these modules would spoil. Attention
itself (scores, softmax, ALiBi) is float64 here, where transformers' eager code, MPT's and GPT-J's use float32.

Shapes: T tokens of one row, E model width, H query heads, K KV heads, D head size. There is no batch axis.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn


def split(y_TE: Tensor, D: int) -> Tensor:
    """[T, heads * D] -> [heads, T, D]."""
    return rearrange(y_TE, "T (H D) -> H T D", D=D)


class Decoder:
    """One architecture. `model` is a float64 copy in eval mode; positions are original positions, int64 [T]."""

    layers: int
    query_heads: int
    kv_heads: int
    D: int
    window: int | None = None  # row t sees key i only where t - i < window, in every layer
    renumbers = True  # False where the position is inside the hidden state, so that a key cannot be given another one
    latent = False  # True where a value is the first numbers of its key, which are held once
    positions: int | None = None  # how many positions the model's own table has

    def __init__(self, model: Any) -> None:
        self.model = model

    def slope(self, h: int) -> float:
        """ALiBi's slope of query head h: x[t, i] gets slope * (i - t)."""
        return 0.0

    def scale(self, l: int) -> float:
        raise NotImplementedError

    def softcap(self, l: int) -> float | None:
        """c, where logits become c * tanh(logit / c)."""
        return None

    def sink(self, l: int, h: int) -> Tensor | None:
        """A logit of query head h that is in every row's softmax and belongs to no key."""
        return None

    def reach(self, l: int) -> int | None:
        """The window of layer l: how many tokens a row sees at most, itself included."""
        return self.window

    def chunked(self, l: int) -> bool:
        """Layer l cuts the text into pieces of `reach` tokens, and a row sees its own piece; else its window goes along."""
        return False

    def oldest(self, l: int, t: int) -> int:
        """The first token that row t of layer l could see."""
        size = self.reach(l)
        if size is None:
            return 0
        return t - t % size if self.chunked(l) else max(t - size + 1, 0)

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        raise NotImplementedError

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> q [H, T, D], k [K, T, D], v [K, T, D], without positions."""
        raise NotImplementedError

    def tables(self, l: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE's cosines and sines at these positions, each [T, ...]; without RoPE they are empty."""
        return torch.zeros(len(positions_T), 0), torch.zeros(len(positions_T), 0)

    def rotate(self, x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Queries or keys, turned by the tables of their positions."""
        return x_HTD

    def project(self, l: int, h_TE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> q [H, T, D], k [K, T, D], v [K, T, D], with the positions applied to q and k."""
        q, k, v = self.unplaced(l, h_TE)
        cos_TD, sin_TD = self.tables(l, positions_T)
        return self.rotate(q, cos_TD, sin_TD), self.rotate(k, cos_TD, sin_TD), v

    def rotations(self, l: int, count: int) -> Tensor:
        """RoPE's matrices at the first `count` positions [count, D, D]: row d is what the d-th unit vector becomes; beyond the
        model's own table its last one."""
        at = torch.arange(count).clamp(max=count if self.positions is None else self.positions - 1)
        cos, sin = self.tables(l, at)
        unit = torch.eye(self.D, dtype=torch.float64)[:, None].expand(-1, count, -1)
        return self.rotate(unit, cos, sin).transpose(0, 1)

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        """The output projection of layer l's attention."""
        raise NotImplementedError

    def output_rows(self, l: int, h: int) -> Tensor:
        """W_O of query head h, [D, E]: what `output` multiplies that head's D numbers of y by. No bias."""
        raise NotImplementedError

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """Layer l, `attention` being its attention from the normed input to behind the output projection."""
        raise NotImplementedError

    def logits(self, x_TE: Tensor) -> Tensor:
        raise NotImplementedError


class Llama(Decoder):
    """Llama, and Mistral but for the window. The rotary tables are the model's own, with any rope scaling in them; they
    are asked for the positions of one forward at a time, because some scalings depend on the length so far."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = model.config
        self.layers = config.num_hidden_layers
        self.query_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.D = model.model.layers[0].self_attn.head_dim

    def scale(self, l: int) -> float:
        return 1.0 / math.sqrt(self.D)

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.model.model.embed_tokens(ids_T)

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.model.model.layers[l].self_attn
        q, k, v = (split(p(h_TE), self.D) for p in (m.q_proj, m.k_proj, m.v_proj))
        return q, k, v

    def tables(self, l: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        # of its first argument the module reads only dtype and device
        cos, sin = self.model.model.rotary_emb(self.model.model.embed_tokens.weight, positions_T[None])
        return cos[0], sin[0]

    def rotate(self, x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        first, second = x_HTD.chunk(2, -1)
        return x_HTD * cos_TD + torch.cat([-second, first], -1) * sin_TD

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.model.model.layers[l].self_attn.o_proj(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:
        return self.model.model.layers[l].self_attn.o_proj.weight[:, h * self.D : (h + 1) * self.D].T

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        layer = self.model.model.layers[l]
        x_TE = x_TE + attention(layer.input_layernorm(x_TE))
        return x_TE + layer.mlp(layer.post_attention_layernorm(x_TE))

    def logits(self, x_TE: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(x_TE))


class Mistral(Llama):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.window = model.config.sliding_window


class Mpt(Decoder):
    """MPT: no positions but ALiBi, whose slopes are recomputed in float64 (the model's builder rounds to float32)."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.layers, self.query_heads = model.config.n_layers, model.config.n_heads
        self.kv_heads = self.query_heads
        self.D = model.config.hidden_size // self.query_heads

    def slope(self, h: int) -> float:
        power = 2 ** math.ceil(math.log2(self.query_heads))
        slopes = [2.0 ** (-8.0 * j / power) for j in range(1, power + 1)]
        if power != self.query_heads:  # every second one first, then the ones between
            slopes = slopes[1::2] + slopes[0::2]
        return slopes[h]

    def scale(self, l: int) -> float:
        given = self.model.config.attn_config.softmax_scale
        return 1.0 / math.sqrt(self.D) if given is None else given

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.model.transformer.wte(ids_T)

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, clip = self.model.transformer.blocks[l].attn.Wqkv(h_TE), self.model.config.attn_config.clip_qkv
        if clip:
            qkv = qkv.clamp(-clip, clip)
        q, k, v = (split(part, self.D) for part in qkv.chunk(3, -1))
        return q, k, v

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.model.transformer.blocks[l].attn.out_proj(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:
        return self.model.transformer.blocks[l].attn.out_proj.weight[:, h * self.D : (h + 1) * self.D].T

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        layer = self.model.transformer.blocks[l]
        x_TE = x_TE + attention(layer.norm_1(x_TE))
        return layer.ffn(layer.norm_2(x_TE), x_TE)  # the module adds its second argument, the residual

    def logits(self, x_TE: Tensor) -> Tensor:
        return self.model.lm_head(self.model.transformer.norm_f(x_TE))


def alibi_slope(h: int, heads: int) -> float:
    """Falcon's and BLOOM's: for a power of two 2^-8/heads, 2^-16/heads, ...; the heads beyond one lie between these."""
    power = 2 ** math.floor(math.log2(heads))
    return 2.0 ** (-8.0 * (h + 1) / power) if h < power else 2.0 ** (-4.0 * (2 * (h - power) + 1) / power)


class Falcon(Llama):
    """Falcon: rotary positions or ALiBi, whose slopes the model rounds to bfloat16 and scales like the logits; each KV
    head's part of the fused projection is its queries, its key, its value."""

    def __init__(self, model: Any) -> None:
        Decoder.__init__(self, model)
        config = model.config
        self.layers, self.query_heads = config.num_hidden_layers, config.num_attention_heads
        grouped = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else self.query_heads
        self.kv_heads, self.D = grouped, config.hidden_size // self.query_heads

    def slope(self, h: int) -> float:
        if not self.model.config.alibi:
            return 0.0
        return torch.tensor(alibi_slope(h, self.query_heads)).bfloat16().item() / math.sqrt(self.D)

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.model.transformer.word_embeddings(ids_T)

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused = self.model.transformer.h[l].self_attention.query_key_value(h_TE)
        parts = rearrange(fused, "T (K P D) -> K P T D", K=self.kv_heads, D=self.D)
        return parts[:, :-2].flatten(0, 1), parts[:, -2], parts[:, -1]

    def tables(self, l: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        if self.model.config.alibi:
            return Decoder.tables(self, l, positions_T)
        cos, sin = self.model.transformer.rotary_emb(self.model.transformer.word_embeddings.weight, positions_T[None])
        return cos[0], sin[0]

    def rotate(self, x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        return x_HTD if self.model.config.alibi else super().rotate(x_HTD, cos_TD, sin_TD)

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.model.transformer.h[l].self_attention.dense(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:
        return self.model.transformer.h[l].self_attention.dense.weight[:, h * self.D : (h + 1) * self.D].T

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        layer, config = self.model.transformer.h[l], self.model.config
        two = config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2
        h_TE = (layer.ln_attn if two else layer.input_layernorm)(x_TE)
        change = attention(h_TE)
        if config.new_decoder_architecture or config.parallel_attn:
            return x_TE + change + layer.mlp(layer.ln_mlp(x_TE) if two else h_TE)
        return x_TE + change + layer.mlp(layer.post_attention_layernorm(x_TE + change))

    def logits(self, x_TE: Tensor) -> Tensor:
        return self.model.lm_head(self.model.transformer.ln_f(x_TE))


class Bloom(Decoder):
    """BLOOM: ALiBi; head by head the fused projection is its query, its key, its value."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.layers, self.query_heads = model.config.n_layer, model.config.n_head
        self.kv_heads = self.query_heads
        self.D = model.config.hidden_size // self.query_heads

    def slope(self, h: int) -> float:
        return alibi_slope(h, self.query_heads)

    def scale(self, l: int) -> float:
        return 1.0 / math.sqrt(self.D)

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.model.transformer.word_embeddings_layernorm(self.model.transformer.word_embeddings(ids_T))

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused = self.model.transformer.h[l].self_attention.query_key_value(h_TE)
        q, k, v = rearrange(fused, "T (H P D) -> P H T D", P=3, D=self.D)
        return q, k, v

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.model.transformer.h[l].self_attention.dense(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:
        return self.model.transformer.h[l].self_attention.dense.weight[:, h * self.D : (h + 1) * self.D].T

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        layer, normed = self.model.transformer.h[l], self.model.config.apply_residual_connection_post_layernorm
        h_TE = layer.input_layernorm(x_TE)
        x_TE = (h_TE if normed else x_TE) + attention(h_TE)
        h_TE = layer.post_attention_layernorm(x_TE)
        return layer.mlp(h_TE, h_TE if normed else x_TE)  # the module adds its second argument, the residual

    def logits(self, x_TE: Tensor) -> Tensor:
        return self.model.lm_head(self.model.transformer.ln_f(x_TE))


class Gptj(Decoder):
    """GPT-J: rotary over the first rotary_dim numbers of a head, in pairs of neighbours, from the model's own
    table; attention and MLP both read the same normed input."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.layers, self.query_heads = model.config.n_layer, model.config.n_head
        self.kv_heads = self.query_heads
        self.D = model.config.n_embd // self.query_heads
        self.positions = model.config.n_positions

    def scale(self, l: int) -> float:
        return 1.0 / math.sqrt(self.D)

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.model.transformer.wte(ids_T)

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.model.transformer.h[l].attn
        q, k, v = (split(p(h_TE), self.D) for p in (m.q_proj, m.k_proj, m.v_proj))
        return q, k, v

    def tables(self, l: int, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        decoder = self.model.transformer  # which has the table since transformers 5.24; before, each module has one
        table = decoder.rotary_emb.embed_positions if hasattr(decoder, "rotary_emb") else decoder.h[l].attn.embed_positions
        sin, cos = table[positions_T].chunk(2, -1)
        return cos, sin

    def rotate(self, x_HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        size = 2 * cos_TD.shape[-1]  # a cosine for each pair
        turned, rest = x_HTD[..., :size], x_HTD[..., size:]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([even * cos_TD - odd * sin_TD, odd * cos_TD + even * sin_TD], -1)
        return torch.cat([pairs.flatten(-2), rest], -1)

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.model.transformer.h[l].attn.out_proj(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:
        return self.model.transformer.h[l].attn.out_proj.weight[:, h * self.D : (h + 1) * self.D].T

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        layer = self.model.transformer.h[l]
        h_TE = layer.ln_1(x_TE)
        return x_TE + attention(h_TE) + layer.mlp(h_TE)

    def logits(self, x_TE: Tensor) -> Tensor:
        return self.model.lm_head(self.model.transformer.ln_f(x_TE))


class Gpt2(Decoder):
    """GPT-2: learned positions; the scale may depend on the layer, or be left out."""

    renumbers = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if model.config.add_cross_attention:
            raise ValueError("the oracle has no cross-attention")
        self.layers, self.query_heads = model.config.n_layer, model.config.n_head
        self.kv_heads = self.query_heads
        self.D = model.config.n_embd // self.query_heads

    def scale(self, l: int) -> float:
        scale = 1.0 / math.sqrt(self.D) if self.model.config.scale_attn_weights else 1.0
        return scale / (l + 1) if self.model.config.scale_attn_by_inverse_layer_idx else scale

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.model.transformer.wte(ids_T) + self.model.transformer.wpe(positions_T)

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (split(part, self.D) for part in self.model.transformer.h[l].attn.c_attn(h_TE).chunk(3, -1))
        return q, k, v

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.model.transformer.h[l].attn.c_proj(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:  # a Conv1D, whose weight is [in, out]
        return self.model.transformer.h[l].attn.c_proj.weight[h * self.D : (h + 1) * self.D]

    def block(self, l: int, x_TE: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        layer = self.model.transformer.h[l]
        x_TE = x_TE + attention(layer.ln_1(x_TE))
        return x_TE + layer.mlp(layer.ln_2(x_TE))

    def logits(self, x_TE: Tensor) -> Tensor:
        return self.model.lm_head(self.model.transformer.ln_f(x_TE))


class CodeGen(Gptj):
    """CodeGen: four parts of the fused projection, of each its queries, its values, its keys."""

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused = self.model.transformer.h[l].attn.qkv_proj(h_TE)
        q, v, k = (split(part, self.D) for part in rearrange(fused, "T (M P E) -> P T (M E)", M=4, P=3))
        return q, k, v


class GptNeo(Gpt2):
    """GPT-Neo: learned positions, logits without a scale, layers with a window."""

    def __init__(self, model: Any) -> None:
        Decoder.__init__(self, model)
        config = model.config
        self.layers, self.query_heads = config.num_layers, config.num_heads
        self.kv_heads, self.D = self.query_heads, config.hidden_size // self.query_heads
        self.attentions = [layer.attn.attention for layer in model.transformer.h]

    def scale(self, l: int) -> float:
        return 1.0

    def reach(self, l: int) -> int | None:
        return self.model.config.window_size if self.model.config.attention_layers[l] == "local" else None

    def unplaced(self, l: int, h_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.attentions[l]
        q, k, v = (split(p(h_TE), self.D) for p in (m.q_proj, m.k_proj, m.v_proj))
        return q, k, v

    def output(self, l: int, y_TE: Tensor) -> Tensor:
        return self.attentions[l].out_proj(y_TE)

    def output_rows(self, l: int, h: int) -> Tensor:
        return self.attentions[l].out_proj.weight[:, h * self.D : (h + 1) * self.D].T


FAMILIES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MptForCausalLM": Mpt,
    "GPTJForCausalLM": Gptj,
    "GPT2LMHeadModel": Gpt2,
    "CodeGenForCausalLM": CodeGen,
    "GPTNeoForCausalLM": GptNeo,
    "FalconForCausalLM": Falcon,
    "BloomForCausalLM": Bloom,
}


def decoder_of(model: nn.Module | Decoder, grad: bool = False) -> Decoder:
    """A float64 copy of the model, in eval mode; the model itself is not touched. A Decoder is passed through.

    With grad the model itself, so that gradients reach its parameters; it must be in float64 and eval mode already.
    """
    if isinstance(model, Decoder):
        return model
    if type(model).__name__ not in FAMILIES:
        raise ValueError(f"the oracle knows {sorted(FAMILIES)}, not {type(model).__name__}")
    family = FAMILIES[type(model).__name__]
    if not grad:
        return family(copy.deepcopy(model).to("cpu", torch.float64).eval())
    if model.training or any(p.dtype != torch.float64 or p.device.type != "cpu" for p in model.parameters()):
        raise ValueError("grad=True needs a model in float64, on the CPU and in eval mode")
    return family(model)
