"""A request of continuous batching: its prompt, and the blocks that it claims when it is admitted."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.cache import EvictingCache
from ..cache.prefix import Prefix
from ..cache.settings import CacheSettings
from ..errors import KVPatchError


@dataclass
class Request:
    """A request that was admitted.

    prompt: tokens of its prompt. new: tokens to generate; None if there is no limit. blocks: claimed until it ends. cache: of
    its own while its prompt is read; None before, and once it is a row of a batch. prefix: that begins its
    prompt, and is not read again.
    """

    prompt: int
    new: int | None
    blocks: int
    cache: EvictingCache | None = None
    prefix: Prefix | None = None


def tokens_held(settings: CacheSettings, prompt: int, new: int | None, blockwise: bool, read: int = 0) -> int:
    """Return the most tokens that a KV head of a request holds between passes, the mean over the layers, rounded up.

    The slot that a head has for the token being written comes on top.

    blockwise: a prompt of several passes is compressed after each. read: tokens of a prefix, as a prompt of its own.

    Raises:
        KVPatchError: this grows with the text, which has no limit.
    """
    held = [_held_in(settings, layer, prompt, new, read) for layer in range(settings.n_layers)]
    if not blockwise:
        held = [max(one, prompt) for one in held]
    return -(-sum(held) // len(held))


def _held_in(settings: CacheSettings, layer: int, prompt: int, new: int | None, read: int) -> int:
    budget, schedule = settings.tokens(layer, prompt), settings.policy.schedule
    evicts, bounded = settings.evicts[layer], settings.bounds[layer] is not None
    if evicts and schedule == "decode" and not bounded:
        budget += prompt
    if evicts and (bounded or schedule != "prompt"):
        return budget if new is None else min(budget, prompt + new)
    if new is None:
        raise KVPatchError(
            f"This request has no limit of new tokens, and schedule={schedule!r} keeps all that are generated: give "
            "max_new_tokens, or schedule='both'."
        )
    return (_kept(settings, layer, prompt, read) if evicts else prompt) + new


def _kept(settings: CacheSettings, layer: int, prompt: int, read: int) -> int:
    """Return the tokens that a prompt's end keeps, its first `read` tokens having been a prompt of their own."""
    turns, own = settings.policy.scope.turns, prompt - read
    if turns == "all" or not read:
        return min(settings.tokens(layer, prompt), prompt)
    return min(settings.tokens(layer, read), read) + (own if turns == "first" else min(settings.tokens(layer, own), own))
