"""The invariants of a cache between passes: contents of slots, every counter, and how much is allocated.

The loader of saved caches, the state machine of the tests and strict=True all call `EvictingCache.check_invariants()`. The
message of an InvalidError names the layer; the caller adds what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..backends.entries import codecs
from ..errors import InvalidError
from .growth import slack
from .holding import count_held
from .layer import SlotLayer
from .modes import Evicting, Filling, Growing, Moving, Reading, Slotted
from .state import TextState


def check_cache(cache: TextState) -> None:
    """Raise InvalidError if an invariant is broken, for `EvictingCache.check_invariants`, or after a pass if strict=True."""
    cache.catch_up()
    check_state(cache)
    check_bytes(cache)


def check_state(cache: TextState) -> None:
    """For `check_cache`, or a loaded cache: raise InvalidError if the cache contradicts itself, its policy or its budget."""
    seen_B, seen, unfinished = cache.seen_B, cache.layers[0].columns_read, cache.turns.unfinished
    if seen_B is None:
        must(all(layer.columns_read == 0 for layer in cache.layers), "an empty cache has seen tokens")
        return
    must(all(layer.columns_read == seen for layer in cache.layers), "its layers have seen different numbers of tokens")
    most, fewest = int(seen_B.max()), int(seen_B.min())
    # without padding a row has as many tokens as columns, or fewer if caches were concatenated
    agree = cache.rows.padded or unfinished or (most == seen and (cache.rows.concatenated or fewest == seen))
    agree = agree and most <= seen and (fewest > 0 or cache.rows.padded or unfinished)
    must(agree, f"{seen} columns were seen, and {fewest} to {most} tokens of its rows")
    counters, gaps_B = cache.counters, cache.rows.gaps_B
    must(counters.steps <= seen, f"{counters.steps} steps of {seen} tokens")
    must(gaps_B is None or (gaps_B >= 0) & (gaps_B <= seen_B), "gaps_B is no number of columns")
    behind_B, span_B = counters.steps_behind_B, counters.temperature_steps_B
    must(behind_B is None or (behind_B >= 0) & (behind_B <= counters.steps), "shortfall_B is no number of steps")
    must(span_B is None or (span_B >= 1) & (span_B < 2**53), "span_B is no number of steps")
    if cache.shared_score is not None:
        grows, room = cache.settings.policy.schedule != "prompt", cache.shared_score.shape[-1]  # grows: in decode steps
        must(room > seen or not grows, f"shared has room for {room} of {seen + 1} tokens")
    _check_common_budget(cache, seen_B)
    for index, layer in enumerate(cache.layers):
        layer_seen_B = seen_B.to(layer.device)
        # with an adaptive budget a head may get no token, and what a head held may have been forgotten
        empty = cache.settings.policies[index].over_heads is not None or unfinished or cache.rows.columns_at_edit > 0
        with _name_layer(index):
            if layer.mode.evicts and not unfinished:
                _check_budget(cache, index, layer, layer_seen_B)
            if layer.is_initialized:
                _LayerState(layer, layer_seen_B).check(least=0 if empty else 1, reading=unfinished)


def check_bytes(cache: TextState) -> None:
    """Raise InvalidError if a cache, between passes or just loaded, has more allocated than held, plus the slack of growth.py.

    `check_cache` calls it. Room that was asked for may be more, with a sixteenth of all slots on top (hooks/capacity.py). So
    may the room of the next block while a prompt is read in blocks.
    """
    ahead = max(cache.plans.static_room or 0, cache.settings.block or 0 if cache.turns.unfinished else 0)
    for index, layer in enumerate(cache.layers):
        with _name_layer(index):
            if layer.is_initialized:
                rounded = 0 if cache.plans.static_room is None else slack(layer.kv.width)
                _check_layer_bytes(layer, max(ahead, layer.waiting_slots) + rounded)  # waiting: for option every > 1


@contextmanager
def _name_layer(index: int) -> Iterator[None]:
    """Run checks of a layer in a block, for `check_state`, `check_bytes`; put its number in front of an InvalidError."""
    try:
        yield
    except InvalidError as error:
        raise InvalidError(f"layer {index}: {error}") from None


def _check_common_budget(cache: TextState, seen_B: Tensor) -> None:
    """Raise InvalidError if layers that divide one budget (`together`) got more than the settings allow.

    `check_state` calls it. It checks nothing before a prompt has ended, nor where one of these layers does not evict.
    """
    together = cache.settings.together
    if cache.turns.unfinished or not all(cache.layers[index].mode.evicts for index in together):
        return
    divided_B, allowed_B = torch.zeros_like(seen_B), torch.zeros_like(seen_B)
    for index in together:
        layer = cache.layers[index]
        between_steps_BH = layer.own_budget_BH1[..., 0] + layer.evict_interval - 1  # several may be evicted at once
        divided_B += between_steps_BH.sum(-1).to(seen_B.device)
        allowed_B += _bound_held(cache, index, layer, seen_B, ever=True).sum(-1).to(seen_B.device)
    # all processes share the budget, and the heads of a single one may have most of it
    must(divided_B <= allowed_B * cache.settings.parallel.size, "keep_BH1 of all layers is over their budget")


def _bound_held(cache: TextState, index: int, layer: SlotLayer, seen_B: Tensor, ever: bool) -> Tensor:
    """Return the most tokens [B,H] that each head may hold now; if `ever`, at any step of the text.

    `_check_budget` and `_check_common_budget` call it. Where heads share a budget, each gets their mean.
    """
    settings, H = cache.settings, layer.positions.shape[1]
    prompt_known = settings.policies[index].schedule == "decode"  # a layer keeps the prompt's length only then
    prompt_B = layer.own_limits.prompt.flatten() if prompt_known else seen_B
    new_B = [None] * len(seen_B) if ever else (seen_B - prompt_B).tolist()
    rows = zip(prompt_B.tolist(), new_B, strict=True)
    held = [count_held(settings, index, n, new, heads=H, longest=not prompt_known).heads for n, new in rows]
    return torch.tensor(held, device=layer.device)


def _check_budget(cache: TextState, index: int, layer: SlotLayer, seen_B: Tensor) -> None:
    """Raise InvalidError if the policy cannot have given a head its budget, or if a head holds more than its budget.

    `check_state` calls it for each layer that evicts in decode steps, and so has `keep_BH1` (`own_budget_BH1`), what a head may
    hold: that must be within what the settings ever allow (`ever`), and what it holds within what they allow now. If heads
    share the layer's budget, their sum counts.
    """
    keep_BH, policy = layer.own_budget_BH1[..., 0], cache.settings.policies[index]
    must(layer.own_limits.prompt <= seen_B[:, None, None], "limits are of a longer text")
    shared = policy.over_heads is not None
    must(keep_BH >= (0 if shared else 1), "keep_BH1 is below one token")
    if index in cache.settings.together:  # layers that share one budget: _check_common_budget checks them
        return
    held_BH, between_BH = (layer.positions >= 0).sum(-1), keep_BH + layer.evict_interval - 1  # between: two evictions
    for ever, count_BH, name in ((True, between_BH, "keep_BH1 is"), (False, held_BH, "the tokens of a head are")):
        most_BH = _bound_held(cache, index, layer, seen_B, ever)
        if shared:
            count_BH, most_BH = count_BH.sum(-1), most_BH.sum(-1) * cache.settings.parallel.size
        must(count_BH <= most_BH, f"{name} over the budget")


class _LayerState:
    """One layer's slots during the checks. limit_BH: slots of each head that may hold a token, not its budget."""

    def __init__(self, layer: SlotLayer, seen_B: Tensor) -> None:
        """Derive, for `check_state`, the tensors that several checks of `check` compare. seen_B: tokens of each row so far."""
        self.layer, self.seen_B11 = layer, seen_B[:, None, None]
        self.occupied = layer.positions >= 0
        self.held_BH = self.occupied.sum(-1)
        self.column = torch.arange(layer.positions.shape[2], device=layer.device)
        offsets, all_used = layer.kv.head_offsets, [layer.columns_used] * self.held_BH.numel()  # offsets: of a ragged layer
        limits = all_used if offsets is None else offsets.filled if layer.mode.evicts else offsets.capacities
        self.limit_BH = torch.tensor(limits, device=self.held_BH.device).view_as(self.held_BH)  # slots in use

    def check(self, least: int, reading: bool) -> None:
        """For `check_state`, between passes: raise InvalidError if the layer contradicts itself.

        least: tokens that each head must hold. reading: a prompt is not yet read to its end. Further checks depend on the
        layer's mode, which says where decode steps put tokens and if they evict.
        """
        layer, p = self.layer, self.layer.positions
        must((p >= -1) & (p < self.seen_B11), "positions name tokens that were not seen")
        ordered = p.sort(-1).values
        must((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0), "a head holds a token twice")
        must(~self.occupied | (self.column < self.limit_BH[..., None]), "tokens lie beyond the slots in use")
        must(self.held_BH >= self.seen_B11[..., 0].clamp(max=least), f"a head holds fewer than {least} tokens")
        first, used = layer.first_croppable, layer.columns_used
        must(first <= used, f"{first} columns cannot be cropped, but only {used} are in use")
        if layer.in_text_order:  # and without gaps between tokens
            oldest = p.masked_fill(~self.occupied, torch.iinfo(p.dtype).max).amin(-1, keepdim=True)
            rank = self.occupied.long().cumsum(-1) + oldest - 1
            must((layer.positions == rank) | ~self.occupied, "positions are not consecutive")
            must(not layer.mode.fills_free_slots, "a layer in text order may not write into freed slots")
        for name, note in layer.need_notes.items():  # what the policy remembers of the layer
            if (wrong := note.find_contradiction(self.seen_B11)) is not None:
                must(~wrong, f"its note {name!r} contradicts the number of tokens seen")
        mode = layer.mode
        must(not reading or isinstance(mode, Reading), f"a layer is {mode.name} while a prompt is read")
        as_asked = layer.kv.codecs == codecs(layer.bits, *layer.kv.sizes, layer.dtype, layer.latent)
        must(as_asked or isinstance(mode, Reading), "keys and values are not of the bits that were asked for")
        if isinstance(mode, Evicting):
            self._check_evicting(mode)
        elif isinstance(mode, Growing):
            self._check_growing(mode)
        elif isinstance(mode, Moving):
            self._check_moving(mode)
        else:
            self._check_appended()
        if isinstance(mode, Filling):
            self._check_filling(mode)

    def _check_appended(self) -> None:
        """For `check`: raise InvalidError if a layer whose tokens are appended has empty slots, or old tokens at the end."""
        layer, real = self.layer, self.occupied
        must(layer.may_have_empty or (self.held_BH == layer.columns_used), "slots are empty that should not be")
        newer = real.long().flip(-1).cumsum(-1).flip(-1)  # tokens from this column on, to roll them back
        newest = (layer.positions == self.seen_B11 - newer) | ~real | (self.column < layer.first_croppable)
        must(newest, "what was appended is not the newest")

    def _check_filling(self, mode: Filling) -> None:
        """For `check`: raise InvalidError unless no slot is empty, and each head is full in `steps_until_full` steps."""
        layer = self.layer
        budget = layer.columns_used + mode.steps_until_full - (layer.evict_interval - 1)
        reaches_budget = layer.keep_BH1 is not None and bool((layer.keep_BH1 == budget).all())
        must(not layer.may_have_empty and reaches_budget, "filling does not lead to the budget")

    def _check_evicting(self, mode: Evicting) -> None:
        """For `check`: raise InvalidError unless each head has one slot free for the next token, or is below its budget.

        `free_BH`: each head's next slot. `steps_until_full`: until all are full. `has_short_heads`: some head has fewer slots
        than its budget needs, and `slack` - `grown` tokens fit before its buffers must grow.
        """
        layer, free_BH = self.layer, mode.free_BH
        keep_BH = layer.own_budget_BH1[..., 0] + layer.evict_interval - 1  # between steps
        must(self.held_BH <= keep_BH, "a head holds more than its budget")
        below_BH = self.limit_BH <= keep_BH
        self._check_free(mode, below_BH, below_BH & (self.held_BH == self.limit_BH))
        # buffers of fewer slots than the budget needs: only then `slack` and `grown` count
        must(mode.has_short_heads or mode.slack == mode.grown == 0, "slack where tokens are evicted")
        packed_BH = (free_BH == self.held_BH) & (self.occupied == (self.column < self.held_BH[..., None])).all(-1)
        must(~below_BH | packed_BH, "a head below its budget has gaps")
        must(not mode.all_heads_short or below_BH, "a head may reach its budget where it says that none does")
        if layer.may_have_empty:
            self._check_all_used()
            missing = int((keep_BH - self.held_BH).max())
            below = missing >= layer.evict_interval  # else all may have evicted, some more lately than others
            must((missing if below else 0) <= mode.steps_until_full <= int(keep_BH.max()), "filling is not the steps to go")
        else:
            full = mode.steps_until_full == 0 and not mode.has_short_heads
            must(full and (self.held_BH == layer.columns_used - 1), "slots are empty that should not be")

    def _check_moving(self, mode: Moving) -> None:
        """For `check`: raise InvalidError if a head whose budget changes with the text holds more than it ever may.

        Every column is a slot. Each head has an empty one for the next token, or larger buffers are allocated before it.
        """
        layer = self.layer
        must(layer.may_have_empty, "it says that no slot may be empty, but heads evict as their budget moves")
        self._check_all_used()
        must(self.held_BH <= layer.own_budget_BH1[..., 0], "a head holds more than it ever may")
        self._check_free(mode, self.limit_BH <= layer.own_budget_BH1[..., 0], self.held_BH == self.limit_BH)
        # slack: tokens that fit before buffers must grow; grown: how many of them have come
        must(mode.has_short_heads or mode.slack == mode.grown == 0, "slack where no head may need more slots")

    def _check_free(self, mode: Slotted, short_BH: Tensor, full_BH: Tensor) -> None:
        """For `_check_evicting`, `_check_moving`: raise InvalidError if a free slot is taken, or fewer are free than counted.

        short_BH: heads that may need more slots than they have. full_BH: heads that may have no free slot. `mode.slack` -
        `mode.grown`: tokens that still fit.
        """
        free_BH = mode.free_BH
        must(mode.has_short_heads == bool(short_BH.any()), "growing is not what the slots say")
        must((free_BH >= 0) & (free_BH < self.limit_BH + full_BH), "free_BH names no slot")
        slot = free_BH.clamp(max=len(self.column) - 1)[..., None]
        must(full_BH | (self.layer.positions.gather(-1, slot)[..., 0] < 0), "a free slot is taken")
        must(~short_BH | (self.limit_BH - self.held_BH >= mode.slack - mode.grown), "fewer slots are free than it says")

    def _check_growing(self, mode: Growing) -> None:
        """For `check`: raise InvalidError if slots after each head's tokens are not free, in a layer that evicts nothing.

        `mode.slack`: tokens that fit after the prompt before buffers must grow. `mode.grown`: how many of them have come.
        """
        layer, free_BH, offsets = self.layer, mode.free_BH, self.layer.kv.head_offsets
        must(layer.may_have_empty, "it says that no slot may be empty, but tokens go into free slots")
        self._check_all_used()
        must(mode.grown <= mode.slack, f"{mode.grown} of {mode.slack} free slots are taken")
        must(self.limit_BH - free_BH >= mode.slack - mode.grown, "fewer slots are free than it says")
        filled = [] if offsets is None else offsets.filled
        next_BH = torch.tensor(filled, device=free_BH.device).view_as(free_BH) + mode.grown if filled else layer.taken
        must(free_BH == next_BH, "free_BH is not the slot after those taken")
        age = free_BH[..., None] - self.column  # 1 at the newest
        must(~self.occupied | (age > 0), "a free slot is taken")
        recent = (age > 0) & (age <= mode.grown)
        must(~recent | (layer.positions == self.seen_B11 - age), "what was appended is not the newest")

    def _check_all_used(self) -> None:
        """Raise InvalidError unless each column is a slot in use, as in every layer that names free slots."""
        used, columns = self.layer.columns_used, len(self.column)
        must(used == columns, f"{used} of {columns} columns are in use as slots")


def _check_layer_bytes(layer: SlotLayer, ahead: int) -> None:
    """Raise InvalidError if a layer has more slots than its tokens plus 1/16, or plus 8 per head if that is more.

    `check_bytes` calls it. A ragged layer's slots are compared in total with the tokens of all its heads. In dense slots every
    head counts as the longest one: dense slots are used if heads differ from it by at most 1/50 on average or, below budget, by
    8 slots. Where tokens are appended, a column counts as held also in rows whose padding lies there.

    ahead: slots that each head may have free in any case, if room was asked for.
    """
    columns = None if layer.mode.fills_free_slots else layer.columns_used  # of appended tokens
    counts = layer.counts()  # tokens of each head
    if isinstance(layer.mode, Moving) and layer.mode.packed_BH is not None:  # heads that shrank since keep their slots
        counts = list(map(max, counts, layer.mode.packed_BH.flatten().tolist()))
    slots, (held, allowed) = sum(layer.kv.capacities()), layer.kv.bound(counts, columns, ahead)
    must(slots <= allowed, f"{slots} slots are allocated where {held} are taken: a sixteenth, or 8 a head, may stand empty")


def must(condition: object, message: str) -> None:
    """Raise InvalidError with this message, which says what is wrong, unless the condition holds (everywhere, for a tensor)."""
    if not (bool(condition.all()) if isinstance(condition, Tensor) else condition):
        raise InvalidError(message)
