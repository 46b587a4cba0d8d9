"""Record of the passes over one cache: in which of them the budget acted, and the time of the last generate().

The budget acts in a pass if some of its tokens are computed after an eviction.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ..cache.cache import EvictingCache
from ..cache.forward_context import Forward
from ..cache.settings import CacheSettings
from ..policies.budgets import MAX_POSITION


@dataclass
class Timing:
    """Times of a generate() in seconds: its beginning, first decode step and end; and the tokens fed after the prompt.

    step: None if that was inside a graph of torch.compile. generate() reads on the host after every token whether to stop, so
    these are a GPU's times too, without waiting for it.
    """

    begin: float
    step: float | None = None
    end: float | None = None
    steps: int = 0

    def seconds(self) -> dict[str, float]:
        """Return, for the report, "total", "first_token" and "per_token" (of the further ones), as far as they are known."""
        if self.end is None:
            return {}
        found = {"total": self.end - self.begin}
        if self.step is not None:
            found["first_token"] = self.step - self.begin
            found["per_token"] = (self.end - self.step) / max(self.steps, 1)
        elif not self.steps:
            found["first_token"] = found["total"]
        return found


class TextRecord:
    """Record of the passes over one cache.

    log: the RunLog that is told when the cache is freed. cache: a weak reference. made_here: the cache was made for a call that
    brought none. acted: the budget acted in some pass. prompt_evicted: tokens were evicted at the end of a prompt, or later.
    columns: how many the cache had read after the last pass. base: how many up to the end of the last prompt.
    steps_to_eviction: decode steps after `base` until the first eviction. number: of the cache's last use, as the log counts
    them. timing: of the last generate().
    """

    def __init__(self, log: Any, cache: EvictingCache, made_here: bool) -> None:
        """Begin the record of a cache, for `RunLog.record`, at the cache's first pass under a patch. log: the patch's RunLog.

        made_here: the caller gave no cache.
        """
        self.log, self.cache, self.made_here = log, weakref.ref(cache), made_here
        self.acted = False  # in some pass, tokens attended after an eviction
        self.number = 0  # of the last use of this cache, as the log counts them
        self.columns = self.base = cache.columns_read  # columns read up to the last pass, and up to the last prompt's end
        # a cache that was loaded or joined has a history, which its layers show
        layers = [cache.layers[index] for index in evicting(cache.settings)]
        self.prompt_evicted = any(layer.columns_used < layer.columns_read for layer in layers)
        steps = (layer.mode.steps_until_full for layer in layers if layer.mode.evicts)
        self.steps_to_eviction = min(steps, default=MAX_POSITION)  # decode steps after `base`
        self.timing: Timing | None = None

    def acts_in_step(self, cache: EvictingCache, Q: int) -> bool:
        """Tell, for the log, if the budget acts in a pass of Q generated tokens: if some come after an eviction."""
        return self.prompt_evicted or cache.columns_read + Q - 1 - self.base > self.steps_to_eviction

    def note_prompt(self, cache: EvictingCache, now: Forward, Q: int) -> bool:
        """Tell if tokens of this pass of Q columns, which reads a prompt or its end, attend to what an eviction left.

        `RunLog.begin` calls it where such a pass begins. Changes `prompt_evicted`, and at the prompt's end `base` (columns up
        to there) and `steps_to_eviction`. now: facts about the pass. Under block= the prompt is attended block by block.
        """
        settings, seen = cache.settings, cache.columns_read
        acted = self.prompt_evicted = self.prompt_evicted or seen - self.base > self.steps_to_eviction
        if not now.n_B:  # the prompt does not end in this pass
            return acted
        # tokens that a row may hold after the prompt (keeps_all: nothing is evicted); n_B: tokens that it has read
        keep_B = [MAX_POSITION] * len(now.n_B) if now.keeps_all else _count_kept(settings, now)
        # with block= a row evicts at the end of each block: if tokens follow a block that exceeds the budget, it acts on them
        for block in now.blocks[:-1]:
            acted |= any(keep < held < n for held, keep, n in zip(block.n_B, keep_B, now.n_B, strict=True))
        room = min(keep - n for keep, n in zip(keep_B, now.n_B, strict=True))
        self.prompt_evicted |= room < 0  # the prompt's end evicts
        evicts_once = settings.policy.schedule == "prompt"
        self.base, self.steps_to_eviction = seen + now.prompt_columns, MAX_POSITION if evicts_once else room
        generated = Q - now.prompt_columns  # tokens that follow the prompt in the same pass
        return acted or (generated > 0 and (self.prompt_evicted or generated - 1 > self.steps_to_eviction))

    def seconds(self) -> dict[str, float]:
        """Return the times of the last generate(), by part; none before it has ended."""
        return {} if self.timing is None else self.timing.seconds()

    def release(self, cache: EvictingCache) -> None:
        """Tell the log that `cache` is about to be freed; the cache calls it."""
        self.log.release(cache, self)


def _count_kept(settings: CacheSettings, now: Forward) -> list[int]:
    """Return how many tokens each row may hold after its prompt in the layer with the smallest budget, for `note_prompt`.

    A row's number is its budget, which may be a share of `share_base_B` tokens, and the tokens kept outside the budget.
    """
    rules = [settings.rules[layer] for layer in evicting(settings)]
    budgets = {n: min((rule.least(n) for rule in rules), default=MAX_POSITION) for n in set(now.share_base_B)}
    # a policy that evicts generated tokens alone keeps the whole prompt
    fixed_B = now.n_B if settings.policy.schedule == "decode" else now.kept_below_B or [0] * len(now.n_B)
    return [budgets[n] + fixed for n, fixed in zip(now.share_base_B, fixed_B, strict=True)]


def evicting(settings: CacheSettings) -> list[int]:
    """Return the indices of the layers, of those in the cache, from which the policy may evict."""
    return [layer for layer in settings.budgeted if settings.evicts[layer]]
