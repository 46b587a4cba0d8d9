"""Llama 4: some layers attend in chunks, the others have no positions and scale their queries with the text's length."""

from __future__ import annotations

from typing import Any

from .interface import InterfaceAdapter


class Llama4Adapter(InterfaceAdapter):
    """Llama 4's text decoder."""

    def __init__(self) -> None:
        """Store the names of Llama 4's attention. Called once, at import, for the table of families."""
        super().__init__(
            "llama4",
            "transformers.models.llama4.modeling_llama4.Llama4TextAttention",
            "Llama 4: three of four layers attend in chunks, the others have no positions",
        )

    def counts_columns(self, attn: Any) -> bool:
        """Tell if the module scales queries by how many columns, padding included, its cache has seen."""
        return bool(attn.attn_temperature_tuning and not attn.use_rope)
