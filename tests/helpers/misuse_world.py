"""What a misuse of misuse.py and misuse_arguments.py is done to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

import kvpatch
from kvpatch import KVPatchError
from tests.helpers.tiny import force, make, prompt


@dataclass
class World:
    """What a misuse is done to: a tiny Llama of 2 layers and 2 KV heads and, where the row asks, its patch (h2o, k=0.5) and
    a cache of 2 rows that have seen 22 tokens."""

    model: Any
    folder: Path
    patch: Any = None
    cache: Any = None

    def step(self, **call: Any) -> Any:
        """One more token of both rows through the model, with `call` in place of its arguments."""
        with torch.no_grad():
            return self.model(**{"input_ids": prompt(2, 1), "past_key_values": self.cache, **call})

    def read(self, **call: Any) -> Any:
        """A prompt of both rows."""
        return self.step(**{"input_ids": prompt(2, 20), "past_key_values": None, **call})

    def generate(self, **call: Any) -> Any:
        return self.model.generate(**{"input_ids": prompt(2, 20), "max_new_tokens": 2, "pad_token_id": 0, **call})

    def patched(self, *args: Any, **kwargs: Any) -> None:
        with kvpatch.patched(self.model, *args, **kwargs):
            pass

    def reads(self, policy: str, call: dict[str, Any], **options: Any) -> None:
        """A prompt under a patch of its own."""
        with kvpatch.patched(self.model, policy, 0.5, **options):
            self.read(**call)

    def file(self, cache: Any = None) -> Path:
        """A saved cache."""
        self.patch.save_cache(cache or self.read().past_key_values, self.folder / "cache")
        return self.folder / "cache"


@dataclass(frozen=True)
class Misuse:
    """on: "model" (not patched), "patch" (in a block), "cache" (in a block, with a cache)."""

    on: str
    name: str
    do: Callable[[World], Any]
    words: str
    kind: type[BaseException] = KVPatchError


def enter(model: Any, folder: Path, on: str) -> tuple[World, contextlib.ExitStack]:
    """The world of a row, and what undoes it."""
    world, stack = World(model, folder), contextlib.ExitStack()
    if on != "model":
        world.patch = stack.enter_context(kvpatch.patched(model, "h2o", 0.5))
    if on == "cache":
        _, world.cache = force(model, prompt(2, 20), prompt(2, 2, seed=2))
    return world, stack


def filled(name: str = "llama_gqa", policy: str = "h2o", k: Any = 0.5, **options: Any) -> Any:
    """A cache of another model or of other settings."""
    model = make(name)
    with kvpatch.patched(model, policy, k, **options), torch.no_grad():
        return model(prompt(2, 20)).past_key_values


def full(rows: int = 2, layers: int = 2) -> DynamicCache:
    """What an unpatched model leaves."""
    model = make("llama_gqa", layers=layers)
    with torch.no_grad():
        return model(prompt(rows, 20)).past_key_values


def static(w: World) -> StaticCache:
    return StaticCache(config=w.model.config, max_cache_len=64)


def weights(w: World) -> Path:
    """Safetensors of another kind, with a type that no cache holds."""
    save_file({"linear.weight": torch.ones(2, 2, dtype=torch.uint8)}, w.folder / "model.safetensors")
    return w.folder / "model.safetensors"


def removed(w: World) -> Any:
    """The cache's model, no longer patched."""
    w.patch.remove()
    return w.step()


def elsewhere(w: World, name: str = "llama_gqa", policy: str = "h2o", **options: Any) -> Any:
    """The cache in a block of another model or of other settings."""
    other = make(name)
    with kvpatch.patched(other, policy, **{"k": 0.5, **options}), torch.no_grad():
        return other(prompt(2, 1), past_key_values=w.cache)


def half(w: World) -> Any:
    """A cache in the middle of a prompt."""
    cache = w.patch.new_cache()
    cache.plans.prompt_len = 30
    w.read(past_key_values=cache)
    return cache


def report_of_none(w: World) -> Any:
    return kvpatch.patch(make("llama_gqa"), "h2o").report()


def row(on: str) -> Callable[..., Misuse]:
    return lambda name, do, words, kind=KVPatchError: Misuse(on, name, do, words, kind)
