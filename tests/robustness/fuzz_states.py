"""Saved caches in the states that decoding leaves, and what must come of loading a file: an error of ours, or a cache that
decodes and is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.policies import adaptive, critical, pyramid
from tests.helpers.tiny import force, left_pad, make, prompt


@dataclass
class Seed:
    """A valid file, the patch that loads it, and the model."""

    name: str
    patch: Any
    model: Any
    file: bytes
    rows: int


def _plain(model: Any, patch: Any) -> EvictingCache:
    return force(model, prompt(2, 24), prompt(2, 3, seed=2))[1]


def _padded(model: Any, patch: Any) -> EvictingCache:
    ids = prompt(2, 24)
    return force(model, ids, prompt(2, 3, seed=2), left_pad(ids, [24, 15]))[1]


def _roomy(model: Any, patch: Any) -> EvictingCache:
    return force(model, prompt(2, 24), prompt(2, 3, seed=2), cache=patch.new_cache(room=12))[1]


def _joined(model: Any, patch: Any) -> EvictingCache:
    parts = [force(model, prompt(1, n), prompt(1, m, seed=n))[1] for n, m in ((24, 2), (17, 5))]
    return EvictingCache.concatenate(parts)


def _two_turns(model: Any, patch: Any) -> EvictingCache:
    _, cache = force(model, prompt(2, 20), prompt(2, 4, seed=2))
    return force(model, prompt(2, 9, seed=3), prompt(2, 2, seed=4), cache=cache)[1]


def _rows(model: Any, patch: Any) -> EvictingCache:
    cache = _padded(model, patch)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 2]))
    return cache


def _cropped(model: Any, patch: Any) -> EvictingCache:
    cache = patch.new_cache()
    cache.activate_past_recording()
    _, cache = force(model, prompt(2, 24), prompt(2, 6, seed=2), cache=cache)
    cache.crop(-4)
    return cache


_ragged = critical(adaptive("roco"))
STATES: dict[str, tuple[str, Any, dict[str, Any], Callable[[Any, Any], EvictingCache]]] = {
    "h2o": ("llama_gqa", "h2o", {}, _plain),
    "roco, padded": ("llama_gqa", "roco", {"recent": 2}, _padded),
    "h2o, rows selected": ("llama_gqa", "h2o", {}, _rows),
    "keyformer": ("llama_gqa", "keyformer", {}, _joined),
    "keyformer, shared": ("llama_gqa", "keyformer", {"shared": True}, _plain),
    "snapkv": ("llama_gqa", "snapkv", {"window": 4}, _plain),
    "snapkv, two turns": ("llama_gqa", "snapkv", {"window": 4, "turns": "each"}, _two_turns),
    "adakv": ("llama_gqa", "adakv", {"window": 4}, _padded),
    "ragged, evicting": ("llama_gqa", _ragged, {"recent": 2, "protected": 0.2}, _plain),
    "pyramid": ("llama_gqa", pyramid("tova"), {}, _plain),
    "full": ("llama_gqa", "full", {}, _padded),
    "full, with room": ("llama_gqa", "full", {}, _roomy),
    "filling": ("llama_gqa", "window", {"k": 40}, _plain),
    "filling, joined": ("llama_gqa", "h2o", {"k": 26}, _joined),
    "decode alone": ("llama_gqa", "h2o", {"k": 3, "schedule": "decode"}, _plain),
    "rolled back": ("llama_gqa", "h2o", {}, _cropped),
    "key_norm, renumbered": ("llama_gqa", "key_norm", {"positions": "renumbered"}, _two_turns),
    "sliding": ("mistral_sliding", "h2o", {}, _plain),
    "gpt2": ("gpt2", "streaming_llm", {}, _plain),
    "mpt": ("mpt", "scissorhands", {}, _padded),
    "h2o, 8 bits": ("llama_gqa", "h2o", {"bits": 8}, _two_turns),
    "ragged, 4 bits": ("llama_gqa", _ragged, {"recent": 2, "protected": 0.2, "bits": 4}, _plain),
}


def seed(name: str, folder: Path) -> Seed:
    kind, policy, options, fill = STATES[name]
    model = make(kind)
    patch = kvpatch.patch(model, policy, **{"k": 0.4, **options})
    cache = fill(model, patch)
    patch.save_cache(cache, folder / "seed")
    assert cache.seen_B is not None
    return Seed(name, patch, model, (folder / "seed").read_bytes(), len(cache.seen_B))


def attempt(one: Seed, path: Path) -> str | None:
    """Load and decode three tokens: the words of the refusal, or None. Anything but our own error comes through."""
    try:
        cache = one.patch.load_cache(path)
    except KVPatchError as error:
        return str(error)
    try:
        with torch.no_grad():
            B = len(cache.seen_B)
            for t in range(3):
                one.model(prompt(B, 1, seed=t), past_key_values=cache)  # of keys of 1e30 no logits are finite
                assert sound(cache), "the cache is no longer sound"
    except KVPatchError as error:
        return f"while decoding: {error}"
    return None


def sound(cache: EvictingCache) -> bool:
    """Invariant 3 of the house: budgets hold, positions are unique and real."""
    seen_B = cache.seen_B
    assert seen_B is not None
    for index, layer in enumerate(cache.layers):
        positions = cache.positions(index)
        for b, row in enumerate(positions.tolist()):
            for h, head in enumerate(row):
                held = [p for p in head if p >= 0]
                if len(set(held)) < len(held) or not held or max(held) >= int(seen_B[b]):
                    return False
                if layer.mode.evicts and len(held) > int(layer.keep_BH1[b, h, 0]):  # type: ignore[index]
                    return False
        if layer.mode.evicts and cache.settings.policy.over_heads is None:
            n = int(seen_B.max())
            allowed = cache.settings.tokens(index, n) * 2 + (n if cache.settings.policy.schedule == "decode" else 0)
            if int(cache.held(index).max()) > allowed:
                return False
    return True
