"""Checks of `Patch.chat()` before a conversation begins: options of generate(), and the budget of a system prompt."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from ..arch.upstream import CACHE_NAMES
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from .generate import find_option

OWN = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "streamer", "return_dict_in_generate", *CACHE_NAMES)
"""Options of generate() that a chat gives itself."""
ROWS = ("num_beams", "num_return_sequences")


def check_kept(settings: CacheSettings, tokens: int) -> None:
    """Raise KVPatchError unless the first `tokens` tokens are never evicted, for `begin_chat` with keep_system=True."""
    ks = [k for k, evicts in zip(settings.budget.per_layer, settings.evicts, strict=True) if evicts]
    sinks = getattr(settings.policy.scope, "sinks", 0)
    if ks and (sinks < tokens or not all(isinstance(k, int) and k > tokens for k in ks)):
        raise KVPatchError(
            f"keep_system=True: the system prompt has {tokens} tokens. Write patched(model, ..., k=..., sinks={tokens}) with "
            f"more than {tokens} tokens as k, a whole number, or protect='system'; this patch has sinks={sinks}, k={ks[0]!r}."
        )


def check_options(options: dict[str, Any], config: GenerationConfig) -> None:
    """Raise KVPatchError, for `Chat.__init__`, for options of generate() that chats set or that make several texts."""
    for name in OWN:
        if name in options:
            raise KVPatchError(f"patch.chat() gives generate() its own {name}: leave it out.")
    for name in ROWS:
        if (rows := find_option(name, options, options.get("generation_config"), config)) not in (None, 1):
            raise KVPatchError(f"A chat is one text, and {name}={rows!r} makes several: leave {name} out, or give {name}=1.")
