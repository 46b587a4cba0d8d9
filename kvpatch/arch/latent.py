"""Multi-head latent attention in absorbed form: one entry per token, a latent and a rotary key that all heads share.

A head's key is (W_UK latent, rotary key) and its value W_UV latent, where W_UK and W_UV are the head's rows of
`kv_b_proj`. So its logit is (W_UK^T q, q's rotary part) . (latent, rotary key), and its output W_UV times a mixture of
latents: the layer has one KV head, whose key is the entry and whose value is the entry's first numbers. Logits,
probabilities and outputs are those of expanded keys and values, to rounding.

transformers' own modules hand the latent and the rotary key to their cache, and call `expand_kv` with what it returns. While
such a module is patched, its `expand_kv` returns the entry in place of expanded keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Core


def read_sizes(attn: Any) -> tuple[int, int]:
    """Return how many numbers an entry (latent and rotary key) has, and how many the latent at its beginning."""
    return attn.kv_lora_rank + attn.qk_rope_head_dim, attn.kv_lora_rank


def is_latent(attn: Any) -> bool:
    """Tell whether the cache of a module with multi-head latent attention can hold latents instead of keys and values.

    `InterfaceAdapter.latent` asks when a model is patched, and in each pass. It needs the weight of `kv_b_proj`, which expands
    latents to keys and values. If that cannot be read (it is quantized, wrapped by LoRA, offloaded or sharded over processes),
    the cache holds the expanded keys and values. False for modules without latents.
    """
    expands = getattr(attn, "kv_b_proj", None)
    if type(expands) is not nn.Linear or not hasattr(attn, "expand_kv"):
        return False
    weight = expands.weight
    offloaded = weight.is_meta and hasattr(expands, "_hf_hook")
    if offloaded or type(weight) not in (Tensor, nn.Parameter) or expands.bias is not None:
        return False
    return weight.shape == (attn.num_heads * (attn.qk_nope_head_dim + attn.v_head_dim), attn.kv_lora_rank)


def _find_weights(attn: Any) -> tuple[Tensor, Tensor]:
    """Return W_UK [N,D,R] and W_UV [N,E,R] of N heads: from R numbers of a latent to D of a key, or E of a value."""
    weight = attn.kv_b_proj.weight.unflatten(0, (attn.num_heads, -1))
    return weight.split([attn.qk_nope_head_dim, attn.v_head_dim], 1)  # type: ignore[return-value]


def expand_kv(attn: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents as keys and values. A patched module's forward calls this in place of its own method that expands them.

    `latent` is an entry here (a latent with the token's rotary key behind it): it is returned as the key, and its latent as the
    value. If it has the width of a latent alone, the module's own method expands it.
    """
    rank = attn.kv_lora_rank
    if latent.shape[-1] == rank:
        return type(attn).expand_kv(attn, latent, rotary)
    return latent, latent[..., :rank]


def attend(attn: Any, core: Core, q_BNQD: Tensor, entry_B1QD: Tensor, latent_B1QR: Tensor) -> Tensor:
    """Attend to the cache's latents by `core`, which writes them; return the outputs of the N heads [B,Q,N,E].

    `InterfaceAdapter.run` calls it once per layer and pass. A logit is the same if the query is multiplied by W_UK instead of
    the latent, and an output if the mixture of latents is multiplied by W_UV afterwards (the absorbed form of multi-head latent
    attention). entry: a latent and a rotary key. R: the width of a latent.
    """
    # up_NDR: W_UK, from latents to the unrotated part of keys; value_NER: W_UV, from latents to values
    (up_NDR, value_NER), split = _find_weights(attn), [attn.qk_nope_head_dim, attn.qk_rope_head_dim]
    unrotated, rotary = q_BNQD.split(split, -1)
    q = torch.cat([unrotated @ up_NDR, rotary], -1)
    mixed_BQNR = core(q, entry_B1QD, latent_B1QR).unflatten(-1, (attn.num_heads, -1))
    return (mixed_BQNR.transpose(1, 2) @ value_NER.transpose(1, 2)).transpose(1, 2)


def project_values(attn: Any, latent_B1TR: Tensor) -> Tensor:
    """Return each query head's values [B,N,T,E], W_UV times the cached latents, for `InterfaceAdapter.head_values`."""
    value_NER = _find_weights(attn)[1].detach()
    return latent_B1TR @ value_NER.transpose(1, 2).to(latent_B1TR.device, latent_B1TR.dtype)
