"""GPT-J and CodeGen: rotary positions on the first `rotary_dim` elements of a head, interleaved in pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from .adapter import Adapter, heads_first, project_heads, source_module


class GPTJAdapter(Adapter):
    """GPT-J."""

    name = "gptj"
    summary = "GPT-J: partial rotary positions"
    classes: tuple[str, ...] = (
        "transformers.models.gptj.modeling_gptj.GPTJAttention",
        "transformers.models.gptj.modeling_gptj.GPTJFlashAttention2",
    )

    projection = "out_proj"
    renumbers = turns_back = True

    def project(
        self,
        attn: Any,
        hidden_BQE: Tensor,
        position_ids: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values [B,heads,Q,D], for `run`, and rotate queries and keys."""
        q, k, v = self.project_unrotated(attn, hidden_BQE)
        if position_embeddings is None:  # before transformers 5.24 each module has the table
            table, places = attn.embed_positions.to(hidden_BQE.device), position_ids.to(hidden_BQE.device)
            position_embeddings = table[places].to(hidden_BQE.dtype).chunk(2, -1)
        sin, cos = (one.to(hidden_BQE.device)[:, None] for one in position_embeddings)
        return _rotate_pairs(attn, q, sin, cos), _rotate_pairs(attn, k, sin, cos), v

    def project_unrotated(self, attn: Any, hidden_BQE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values [B,heads,Q,D]; `project` then rotates the first two."""
        return project_heads(hidden_BQE, attn.head_dim, attn.q_proj, attn.k_proj, attn.v_proj)

    def without_rotation(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a forward's arguments with which it rotates nothing: sines are 0 and cosines 1. `call` does not change.

        The patched forward (`make_forward`) calls it in each pass under positions="renumbered": the cache then holds unrotated
        keys, which are rotated when read.
        """
        if call.get("position_embeddings") is None:
            return {**call, "position_ids": torch.zeros_like(call["position_ids"])}  # at position 0 sines are 0, cosines 1
        sin, cos = call["position_embeddings"]
        return {**call, "position_embeddings": (torch.zeros_like(sin), torch.ones_like(cos))}

    def rotary_table(self, decoder: Any, device: torch.device, count: int) -> Any:
        """Return the model's table of sines and cosines on `device`, by which `rotate` turns cached keys.

        `table_maker` asks under positions="renumbered" when a head may hold more tokens than before. Raises KVPatchError if
        `count`, the number of positions needed, is beyond the table's end.
        """
        if count > decoder.config.max_position_embeddings:
            raise KVPatchError(
                f"A head would hold {count} tokens, but this model has {decoder.config.max_position_embeddings} positions: "
                "lower k, or read the prompt with a smaller block=."
            )
        holder = getattr(decoder, "rotary_emb", decoder.h[0].attn)
        return holder.embed_positions.to(device)

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        sin, cos = table.to(x_BHTD.device)[places_BHT].to(x_BHTD.dtype).chunk(2, -1)
        return _rotate_pairs(attn, x_BHTD, sin, cos)

    def rotate_back(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        sin, cos = table.to(x_BHTD.device, x_BHTD.dtype).chunk(2, -1)  # divided in the precision of x
        size = sin.square() + cos.square()
        return self.rotate(attn, x_BHTD, places_BHT, torch.cat([-sin / size, cos / size], -1))

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        return attn.resid_dropout(attn.out_proj(y_BQE))

    def scale(self, attn: Any) -> float:
        return attn.head_dim**-0.5

    def dropout(self, attn: Any) -> float:
        return attn.attention_dropout if hasattr(attn, "attention_dropout") else attn.attn_dropout.p

    def kv_shape(self, attn: Any) -> tuple[int, int]:
        return attn.num_attention_heads, attn.head_dim

    def max_positions(self, config: Any) -> int | None:
        return config.max_position_embeddings


def _rotate_pairs(attn: Any, x_BHTD: Tensor, sin_BHTP: Tensor, cos_BHTP: Tensor) -> Tensor:
    """Return queries or keys with their first 2P elements rotated, pair by pair, as the model does.

    `project` calls it before attention, and `rotate` for cached keys.
    """
    sin, cos = sin_BHTP.repeat_interleave(2, -1), cos_BHTP.repeat_interleave(2, -1)
    turned = x_BHTD[..., : sin.shape[-1]]  # only these channels turn
    return torch.cat([turned * cos + source_module(attn).rotate_every_two(turned) * sin, x_BHTD[..., sin.shape[-1] :]], -1)


class CodeGenAdapter(GPTJAdapter):
    """CodeGen: one fused projection in four parts, of each its queries, its values, its keys."""

    name = "codegen"
    summary = "CodeGen: partial rotary positions"
    classes = ("transformers.models.codegen.modeling_codegen.CodeGenAttention",)

    def project_unrotated(self, attn: Any, hidden_BQE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = attn.qkv_proj(hidden_BQE).unflatten(-1, (4, 3, -1))
        q, v, k = (heads_first(part.flatten(2), attn.head_dim) for part in parts.unbind(3))
        return q, k, v
