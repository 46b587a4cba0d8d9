"""Llama 4: some layers attend in chunks, the others have no positions and scale their queries with the text's length."""

from __future__ import annotations

from typing import Any

from .interface import InterfaceAdapter


class Llama4Adapter(InterfaceAdapter):
    """Llama 4's text decoder."""

    def counts_columns(self, attn: Any) -> bool:
        """Tell if the module scales queries by how many columns, padding included, its cache has seen, as some layers do."""
        return bool(attn.attn_temperature_tuning and not attn.use_rope)
