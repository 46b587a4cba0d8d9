"""Rotary positions as Llama has them: one table of the decoder, whose halves of a head turn together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import source_module

BY_LENGTH = {"longrope": "original_max_position_embeddings", "dynamic": ""}
"""Scalings of rotary positions that change with the length of the text, and the parameter that says after which length; where
none does, it is the model's number of positions."""


def switch_length(model: nn.Module) -> int | None:
    """Return the length of text beyond which a model rotates all its tokens by other frequencies; None if it never does."""
    return min((limit for module in model.modules() for limit in _list_switches(module)), default=None)


def _list_switches(rotary: Any) -> list[int]:
    """Return the text lengths beyond which a rotary embedding rotates all tokens by other frequencies; [] if there are none.

    `switch_length` asks every module of a model: one that is no rotary embedding has none. A rotary embedding has one scaling
    (rope_type), or one for each kind of layer; BY_LENGTH names those that depend on the text's length.
    """
    rope_types, config = vars(rotary).get("rope_type"), vars(rotary).get("config")
    parameters = getattr(config, "rope_parameters", None) or {}
    one_kind = not isinstance(rope_types, dict)
    scalings = (
        [(rope_types, parameters)] if one_kind else [(kind, parameters.get(layer) or {}) for layer, kind in rope_types.items()]
    )
    n_positions = getattr(config, "max_position_embeddings", None)
    lengths = [values.get(BY_LENGTH[kind]) or n_positions for kind, values in scalings if kind in BY_LENGTH]
    return [int(length) for length in lengths if length is not None]


class Rotary:
    """Part of an adapter: every layer rotates queries and keys, all channels or the first ones, by `decoder.rotary_emb`."""

    renumbers = turns_back = True

    def without_rotation(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a forward's arguments with cosines of 1 and sines of 0, so that nothing is rotated, as `make_forward` asks."""
        cos, sin = call["position_embeddings"]
        return {**call, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    def obstacle(self, decoder: Any, renumbered: bool) -> str | None:
        """Return the reason why the rotation of cached keys cannot be undone: a scaling that changes as text grows; or None.

        `Target.check_rotations` asks at patched(), if the policy scores unrotated queries or keys. renumbered: keys are cached
        unrotated.
        """
        kind = getattr(decoder.rotary_emb, "rope_type", None)
        changes = not renumbered and kind in BY_LENGTH
        return f"rope_type={kind!r} rotates tokens otherwise once a text is longer" if changes else None

    def rotary_table(self, decoder: Any, device: torch.device, count: int) -> Any:
        """Return cosines and sines of the positions below `count`, for `rotate` and `rotate_back`.

        `table_maker` asks at the beginning of a pass that rotates cached keys, or undoes rotations. A copy of the decoder's
        rotary module computes them as for a new text, so that the decoder's state does not change.
        """
        rotary = copy.deepcopy(decoder.rotary_emb)
        if hasattr(rotary, "original_inv_freq"):  # dynamic scaling remembers the longest text: start anew
            rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
        like = torch.empty(0, dtype=next(decoder.parameters()).dtype, device=device)
        return [table[0] for table in rotary(like, torch.arange(count, device=device)[None])]

    def rotate(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Rotate keys that were cached unrotated (positions="renumbered"), or queries in a score, by positions `places_BHT`.

        Layers call it through BoundAdapter. table: from `rotary_table`; channels beyond its width are returned as they are.
        """
        cos, sin = (one.to(x_BHTD.device)[places_BHT] for one in table)
        size = cos.shape[-1]
        if size < x_BHTD.shape[-1]:
            return torch.cat([self.rotate(attn, x_BHTD[..., :size], places_BHT, table), x_BHTD[..., size:]], -1)
        turned = x_BHTD * cos + source_module(attn).rotate_half(x_BHTD) * sin  # by the model's own function
        return turned.to(x_BHTD.dtype)  # some families have tables in float32

    def rotate_back(self, attn: Any, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Undo the rotation of queries or keys, and any scaling in the table. Layers call it through BoundAdapter.

        `Call.rotated_back` does, for policies whose scores leave positions out.
        """
        cos, sin = (one.to(x_BHTD.device, x_BHTD.dtype) for one in table)  # divided in the precision of x
        size = cos.square() + sin.square()
        return self.rotate(attn, x_BHTD, places_BHT, [cos / size, -sin / size])
