"""output_attentions=True: no pass under a budget, and no replay, has the matrices that it asks for."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import KVPatchError


def wants_attentions(call: dict[str, Any], decoder: nn.Module) -> bool:
    """Tell if a pass of `decoder` is to return attention matrices, by its arguments (`call`) or its configuration."""
    asked = call.get("output_attentions")
    return bool(getattr(getattr(decoder, "config", None), "output_attentions", False) if asked is None else asked)


def refuse_attentions(call: dict[str, Any], decoder: nn.Module) -> None:
    """Raise KVPatchError, for `_begin_pass` and `begin_replay`, if a pass is to return attention matrices."""
    if wants_attentions(call, decoder):
        raise KVPatchError(
            "output_attentions=True: under a budget no full attention matrix is computed, so there is none to return. "
            "Leave it out, or look at cache.positions(layer) for what is attended to."
        )
