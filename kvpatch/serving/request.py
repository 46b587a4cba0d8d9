"""A request of continuous batching: its prompt, and the blocks that it claims when it is admitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..backends.entry_sizes import FULL
from ..cache.cache import EvictingCache
from ..cache.holding import count_held, keeps_new
from ..cache.messages import Messages
from ..cache.prefix import Prefix
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from .conversations import Beginning


@dataclass
class Request:
    """A request that was admitted.

    prompt: tokens of its prompt. new: tokens to generate; None if there is no limit. blocks: claimed until it ends. cache:
    while its prompt is read; None before, and once it is a row of a batch. prefix: that begins its prompt, and is not read
    again. messages: of its prompt, if it came with them.
    """

    prompt: int
    new: int | None
    blocks: int
    cache: EvictingCache | None = None
    prefix: Prefix | Beginning | None = None
    messages: Messages | None = None


def count_claimed(settings: CacheSettings, prompt: int, new: int | None, whole: bool, read: int = 0) -> int:
    """Count the tokens for which a request claims blocks: the most that a KV head holds between passes, averaged over layers.

    `count_blocks` calls it when a request arrives. A head has one slot (place in the buffers) more, for the token being
    written. whole: the prompt takes several passes, and nothing is evicted before its end. read: tokens of a prefix of the
    text, which was read as a prompt before.

    Raises:
        KVPatchError: the number grows with the text, and the text has no limit.
    """
    layers = range(settings.n_layers)
    if new is None and any(keeps_new(settings, layer) for layer in layers):
        raise KVPatchError(
            f"This request has no limit of new tokens, and schedule={settings.policy.schedule!r} keeps all that are generated: "
            "give max_new_tokens, or schedule='both'."
        )
    # keys are rounded to `bits` only at the prompt's end: until then they take the memory of so many rounded tokens
    unrounded = _count_unrounded(settings, prompt) if whole else 0
    held = [max(*count_held(settings, layer, prompt, new, read=read).heads, unrounded) for layer in layers]
    return -(-sum(held) // len(held))


def _count_unrounded(settings: CacheSettings, tokens: int) -> int:
    """Return how many tokens of `bits` take the memory of `tokens` at full precision, as a prompt has them until it ends."""
    return tokens * FULL // settings.bits


def count_continued(settings: CacheSettings, held: Sequence[int], prompt: int, rest: int, new: int, whole: bool) -> int:
    """Count the tokens for which a request claims blocks, as `count_claimed`, if it goes on from a conversation (a kept cache).

    `count_blocks` calls it. held: tokens that the conversation's cache holds, by layer. prompt: tokens that the cache will have
    read at the prompt's end; rest: how many of them are new. new: tokens to generate. whole: nothing is evicted before the
    prompt's end.
    """
    most = list[int]()
    for layer, before in enumerate(held):
        turns = settings.policies[layer].scope.turns  # the part of a chat that the budget covers in its second turn and later
        if turns == "all":  # the whole text
            count = max(count_held(settings, layer, prompt, new).heads)
        elif turns == "each":  # this turn alone
            count = before + max(count_held(settings, layer, rest, new).heads)
        else:  # nothing more is evicted
            count = before + rest + new
        most.append(max(count, _count_unrounded(settings, before + rest) if whole else 0))
    return -(-sum(most) // len(most))


def refuse_placeholders(ids: Sequence[int], placeholders: Mapping[int, str]) -> None:
    """Raise KVPatchError if an arriving prompt has an id that stands for an image or sound: requests in batches bring none.

    `RequestPool.check` calls it.
    """
    marker = next((token for token in ids if token in placeholders), None)
    if marker is not None:
        raise KVPatchError(
            f"This request holds token {marker}, which stands for {placeholders[marker]}, but continuous batching reads token "
            "ids alone: use generate(), or send text."
        )


def check_system(settings: CacheSettings, messages: Messages | None, prompt: int, step: int) -> None:
    """Raise KVPatchError unless the budget holds an arriving request's system message, wherever its prompt is compressed.

    `RequestPool.check` calls it. step: tokens of the prompt after each of which it is compressed, as well as at its end.
    """
    if messages is None:
        raise KVPatchError("protect='system': this request came without messages. Add it with messages=, or give token ids.")
    marks = messages.mark_system(prompt)
    for end in (*range(step, prompt, step), prompt):
        system = int(marks[:end].sum())
        budget = min(min(count_held(settings, layer, end, 0).heads) for layer in range(settings.n_layers))
        if system > budget:
            raise KVPatchError(
                f"The system message has {system} tokens, which are never evicted, but the budget of this text is {budget}: "
                "shorten it, or give the server a larger k."
            )
