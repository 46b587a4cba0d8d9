"""Compression at the end of a prompt or block: protected sizes, each head's kept tokens, and buffers for what follows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.forward_context import Forward
from ..cache.growth import Layout, plan, slack
from ..cache.state import TextState
from ..policies.allocation import Adaptive
from ..policies.context import EvictionContext
from ..policies.merging import Kept
from ..policies.numbers import on_device
from ..policies.parallel import WHOLE, Parallel
from ..policies.quotas import count_quotas, find_quotas
from ..policies.selection import FIRST, select_top
from . import anomaly
from .decode import choose_step_backends
from .layer_call import Call


@dataclass(eq=False)
class PromptEnd:
    """The end of a prompt (or a block of it) in one layer, which has read it and is about to evict down to its budget.

    Lists of numbers have one list for each row, with a number for each head of all processes.

    tokens_before: slots in use before the prompt. protected_B: how many tokens the policy protects in each row. held: tokens of
    each head. fixed: those of them that are kept outside the budget. keep: the most that each head may hold. context: what the
    score reads; keys: the tokens' sort keys by score alone, lowest evicted first. Only layers that evict have these two.
    """

    call: Call
    tokens_before: int
    protected_B: list[int]
    held: list[list[int]] = field(init=False)
    fixed: list[list[int]] = field(init=False)
    keep: list[list[int]] = field(init=False)
    context: EvictionContext = field(init=False)
    keys: Tensor | None = None

    @property
    def share(self) -> Adaptive | None:
        """The heads' rule of sharing one budget; None if each has its own."""
        return self.call.policy.over_heads

    @property
    def above(self) -> int:
        """Tokens that a head may keep beyond its budget: none at a prompt's end."""
        return 0

    @property
    def weighs(self) -> bool:
        """True if the number of tokens that a head keeps follows from the scores."""
        return self.call.rule.weighs and not self.call.now.keeps_all

    def count(self, everyone: Parallel) -> None:
        """Set tokens per head: `held` now, `fixed` outside the budget, `keep` at most.

        `_compress_group` begins with it. It waits for the device if the host does not know how many tokens heads hold.
        everyone: the processes that hold the layer's heads. share_base_B: tokens of each row that a share `k` refers to.
        """
        self.held, self.fixed = _count_held(self.call, self.tokens_before, everyone)
        budget_BH = [self.call.rule.heads(n, len(row)) for n, row in zip(self.call.now.share_base_B, self.fixed, strict=True)]
        self.keep = [list(map(sum, zip(row, budgets, strict=True))) for row, budgets in zip(self.fixed, budget_BH, strict=True)]

    def least(self, share: Adaptive) -> list[list[int]]:
        """Return how many tokens each head keeps in any case, by row, before `_share_budget` divides the rest by scores.

        share: the rule of sharing, which grants each head a part of an equal budget, or its protected tokens if they are more.
        """
        least_B = map(share.least, _list_budgets(self.call), self.protected_B)
        return [[n + least for n in row] for row, least in zip(self.fixed, least_B, strict=True)]

    @property
    def empty(self) -> Tensor | None:
        """Empty slots [B,H,T], or None if there are none."""
        return self.call.positions_BHT < 0 if self.call.slots.may_have_empty else None

    def make_context(self) -> None:
        """Set `context`, which scores read, if tokens must go: `_compress_group` calls it before it asks for sort keys.

        Scores count ages from each row's newest token, also after an edit. -1 stands for a prompt's end instead of a decode
        step's column. `watch`: called with the scores, to check for NaN.
        """
        now = self.call.now
        newest_B11 = now.copy([n - 1 for n in now.n_B], self.call.slots.positions.device)[:, None, None]
        self.context = self.call.eviction_context(newest_B11, -1)
        self.context.watch = functools.partial(anomaly.check_value if self.call.settings.strict else _warn_of_scores, self.call)

    def key_by_score(self) -> Tensor:
        """Set and return `keys`: the tokens' sort keys [B,H,T] by score, lowest evicted first.

        `_share_budget` and `count_by_scores` call it: the number of tokens that a head keeps then depends on scores.
        """
        self.context.keep_BH1 = None  # a selection such as TwoStage then ranks by score alone, too
        self.keys = self.call.policy.eviction_keys(self.context, self.empty)
        return self.keys

    def count_by_scores(self) -> list[list[int]]:
        """Return how many tokens each head keeps, by row, under a budget that follows from scores (`weighs`).

        Mass keeps the fewest tokens that have a share of all scores, Threshold those that reach a number. `_compress_group`
        calls it. It also sets `keys`, `context.keep_BH1` and `slots.lost_BH1`, the sum of evicted tokens' scores. A batch row
        without tokens in this block keeps all it has.
        """
        keys, slots = self.key_by_score(), self.call.slots
        self.context.keep_BH1 = _fill_counts(self.call, self.keep)[..., None]
        if self.call.policy.schedule == "decode":  # all that is held stays outside the budget, and so does what was lost of it
            self.context.lost_BH1 = None
        count_BH1, slots.lost_BH1 = self.call.rule.kept(self.call.score, self.context, keys)
        rows = zip(count_BH1[..., 0].tolist(), self.held, self.call.now.rows_B, strict=True)
        return [count if n_queries else held for count, held, n_queries in rows]

    def key_for_eviction(self, count: list[list[int]], everyone: Parallel) -> Tensor:
        """Return the tokens' sort keys [B,H,T], lowest evicted first, once it is known how many (`count`) each head keeps.

        `_compress_group` calls it for each layer. `keys`, by score alone, serve if `key_by_score` has set them and the policy
        has no selection (such as TwoStage), which needs that number, `context.keep_BH1`.
        """
        policy = self.call.policy
        if self.keys is not None and policy.selection is None:
            return self.keys
        self.context.keep_BH1 = everyone.select_heads(_fill_counts(self.call, count))[..., None]
        return policy.eviction_keys(self.context, self.empty)


def end_prompt(call: Call, past: int, nominal_B: list[int]) -> None:
    """End a prompt in a layer that has attended to it: evict down to its budget, and move the kept tokens to new buffers.

    `read_prompt` calls it once per layer. Layers that share one budget (`together`) wait in `waiting_layers` until the last of
    them has come here. If the prompt is to be read a second time (`reread_ids_BN`), all layers wait, and `read_again` calls
    `finish`. nominal_B: tokens of each row that the policy protects. The host waits for the device only if heads share a budget
    by their scores, or if it cannot know how many tokens they hold (`_count_held`).
    """
    now, end, sharing = call.now, PromptEnd(call, past, nominal_B), call.settings.together
    together = call.layer in sharing
    if now.reread_ids_BN is not None or together:
        now.waiting_layers.append(end)
    if now.reread_ids_BN is not None or (together and call.layer != sharing[-1]):
        return
    if together:
        finish(call.cache, now)
    else:
        finish_group([end])


def finish(cache: TextState, now: Forward) -> None:
    """Evict in all `waiting_layers` of the pass: those that share one budget together, the others one by one.

    `end_prompt` calls it when the last layer of a shared budget has attended to the prompt, `read_again` when the prompt was
    read a second time. Empties `waiting_layers`.
    """
    together = [end for end in now.waiting_layers if end.call.layer in cache.settings.together]
    for group in (*([end] for end in now.waiting_layers if end not in together), *([together] if together else [])):
        finish_group(group)
    now.waiting_layers.clear()


def finish_group(group: list[PromptEnd]) -> None:
    """End a prompt, block or edit in one layer, or in all layers that share a budget: evict down to it, if they evict at all.

    `end_prompt`, `finish` and `end_edit` call it. Also records which tokens were evicted, for a replay (such texts read again
    in training), and chooses the backends of the decode steps that follow (`final`: no other block of the prompt does).
    _count_move: adds the bytes of old and new buffers to the report's peak.
    """
    if group[0].call.evicts:
        _compress_group(group)
    else:
        with _count_move(group[0].call):
            _keep_all(group[0].call)
    for end in group:
        end.call.note_evictions(find_newest(end.call))
        if end.call.now.final:
            choose_step_backends(end.call)


def _compress_group(group: list[PromptEnd]) -> None:
    """Evict down to the budget in a single layer, or in layers whose heads share one, and move kept tokens to new buffers.

    `finish_group` calls it as a prompt, block or edit ends. Numbers of tokens are lists by batch row and head: those that a
    head holds now (`held`), keeps (`count`), and may hold while decoding (`keep`). Each head has a budget, or heads share one
    (`share`), or keep what their scores require (`weighs`). over_B: rows that must evict. keeps_all: none does (later turns, if
    only the first is evicted). scored: sort keys are needed. order: the sort keys, or positions if tokens only move past empty
    slots.
    """
    call = group[-1].call
    now, share = call.now, group[-1].share
    # tensor parallelism: heads that share a budget count the heads of all processes, others (WHOLE) those of this one
    everyone = call.settings.parallel if share is not None else WHOLE
    for end in group:
        end.count(everyone)
    held, keep = _join_rows([end.held for end in group]), _join_rows([end.keep for end in group])
    over_B = [not now.keeps_all and _exceeds_budget(row, most, share) for row, most in zip(held, keep, strict=True)]
    weighs = group[-1].weighs
    # count the tokens to keep, from scores where necessary
    count, scored = held, weighs or any(over_B)
    if not (share or now.keeps_all):
        above = group[-1].above  # tokens over its budget that a head may hold between decode steps; 0 at a prompt's end
        count = [[min(n, k + above) for n, k in zip(row, most, strict=True)] for row, most in zip(held, keep, strict=True)]
    for end in group if scored else []:
        end.make_context()
    if scored and share is not None:
        divided = _share_budget(group, share, everyone)
        count = [granted if over else row for granted, row, over in zip(divided, held, over_B, strict=True)]
    if weighs:  # the group is one layer then: a budget that follows from scores is never shared
        count = group[0].count_by_scores()
    if share is not None:  # while decoding, each head keeps what it has; only the rest is divided
        keep = [list(map(sum, zip(row, _divide_rest(most, row), strict=True))) for row, most in zip(count, keep, strict=True)]
    # evict layer by layer
    first_head = 0  # the layer's first head among those of all layers
    for end in group:
        heads = slice(first_head, first_head := first_head + len(end.held[0]))
        counts, keeps = ([row[heads] for row in rows] for rows in (count, keep))
        slots, order = end.call.slots, end.key_for_eviction(counts, everyone) if scored else None
        if order is None and (now.keeps_all or slots.may_have_empty):
            order = end.call.positions_BHT
        uneven = everyone.size > 1 and not (_are_equal(counts) and _are_equal(keeps))
        with _count_move(end.call):
            _compress_layer(end.call, order, everyone.select_numbers(counts), everyone.select_numbers(keeps), uneven, scored)


def _share_budget(group: list[PromptEnd], share: Adaptive, everyone: Parallel) -> list[list[int]]:
    """Divide a shared budget by scores: return how many tokens each head of the layers keeps, by row. Waits for the device.

    `_compress_group` calls it once a group. It sets each PromptEnd's `keys`, and compares the sort keys of all heads, also of
    those on other processes (`everyone`). FIRST: the key of an empty slot. N: all heads of all layers.
    """
    device = group[0].call.slots.positions.device
    keys = [everyone.gather_heads(end.key_by_score(), empty=FIRST).to(device) for end in group]
    width = max(key.shape[-1] for key in keys)
    keys_BNT = torch.cat([F.pad(key, (0, width - key.shape[-1]), value=FIRST) for key in keys], 1)
    least_BN = on_device(_join_rows([end.least(share) for end in group]), device)  # what each head keeps in any case
    total_B = on_device([sum(row) for row in _join_rows([end.keep for end in group])], device)
    return share.counts(keys_BNT, least_BN, total_B[:, None]).tolist()


def _exceeds_budget(held: list[int], most: list[int], share: Adaptive | None) -> bool:
    """Tell if a head of a row holds more tokens than it may, or, where heads share a budget, all of them together."""
    return any(map(operator.gt, held, most)) if share is None else sum(held) > sum(most)


def _join_rows(layers: list[list[list[int]]]) -> list[list[int]]:
    """Join the numbers of several layers' heads, layer after layer, in a list for each row."""
    return [[n for row in rows for n in row] for rows in zip(*layers, strict=True)]


@contextmanager
def _count_move(call: Call) -> Iterator[None]:
    """Add the bytes of a layer's old and new buffers to the cache's meter, for the report's peak memory.

    `finish_group` and `_compress_group` wrap it around the code that moves a layer: old and new buffers then both exist.
    """
    old_nbytes = call.slots.kv.nbytes
    yield
    call.cache.meter.count(old_nbytes, old_nbytes, call.slots.kv.nbytes)


def _keep_all(call: Call) -> None:
    """End a prompt of a layer that never evicts: round its keys and values (`bits=`), and move them to buffers with spare room.

    `finish_group` calls it. Then the layer's mode is set, for tokens of decode steps.
    """
    slots = call.slots
    if not call.now.final:  # another block of the prompt follows
        slots.round()
        return
    B, H, _ = slots.positions.shape
    slots.allocate(None, None, Layout([slots.columns_used + _count_spare(call, slots.columns_used)]))
    _start_keeping(call, None, [slots.columns_used] * (B * H))


def _count_held(call: Call, past: int, everyone: Parallel) -> tuple[list[list[int]], list[list[int]]]:
    """Return how many tokens each head holds (`held`), and how many of them are outside the budget (`fixed`), by row.

    `PromptEnd.count` calls it. It waits for the device if heads may hold different numbers. If only generated tokens are
    evicted, the budget counts nothing that is held as a prompt ends. Nor does it count earlier turns of a chat if they are
    kept: then tokens before the position `kept_below_B` of a row are outside. past: slots in use before the prompt that ends.
    everyone: the processes whose heads are counted.
    """
    slots, now = call.slots, call.now
    B, H, _ = slots.positions.shape
    positions, keeps_prompt = call.positions_BHT, call.policy.schedule == "decode"
    held_B = None if slots.may_have_empty else [slots.columns_used] * B
    if not past:
        held_B = [now.prompt_columns] * B if now.padding is None else now.padding.real_B
    if held_B is not None and now.kept_below_B is None:  # all heads of a row hold equally many: the host knows the numbers
        all_heads = H * everyone.size
        return [[n] * all_heads for n in held_B], [[n * keeps_prompt] * all_heads for n in held_B]
    # earlier evictions have left heads with different tokens: count on the device
    held_BH = (positions >= 0).sum(-1) if held_B is None else now.copy(held_B, positions.device)[:, None].expand(B, H)
    if now.kept_below_B is None:
        fixed_BH = held_BH * keeps_prompt
    else:
        fixed_BH = ((positions >= 0) & (positions < now.copy(now.kept_below_B, positions.device)[:, None, None])).sum(-1)
    held, fixed = torch.stack([everyone.gather_heads(held_BH), everyone.gather_heads(fixed_BH)]).tolist()
    return held, fixed


def _fill_counts(call: Call, rows: list[list[int]]) -> Tensor:
    """Copy a number of each head, in a list for each row, to the layer's device as a tensor [B,H]."""
    return call.now.copy([n for row in rows for n in row], call.slots.positions.device).view(len(rows), -1)


def _divide_rest(most: list[int], count: list[int]) -> list[int]:
    """Return how many tokens each head of a row gets of the budget that its heads do not use, divided equally.

    most: the budget of each head. count: tokens that each keeps. A remainder goes to the first heads, one token each.
    """
    rest, H = max(sum(most) - sum(count), 0), len(count)
    return [rest // H + (h < rest % H) for h in range(H)]


def _are_equal(rows: list[list[int]]) -> bool:
    """Tell if the numbers of all heads, in all rows, are the same."""
    return len({n for row in rows for n in row}) == 1


def _compress_layer(
    call: Call, order: Tensor | None, count: list[list[int]], keep: list[list[int]], uneven: bool, scored: bool
) -> None:
    """End a prompt in one layer: move kept tokens to new buffers; set its mode (where next tokens go) and heads' budgets.

    `_compress_group` calls it for each layer of the group. If another block of the prompt follows (not `final`), it moves the
    tokens, and leaves mode and budgets as they are. count: tokens that each head keeps, those with the greatest `order`; if
    `order` is None, all. uneven: heads may hold different numbers, perhaps only because of heads on other processes. This
    process then runs the eviction at every step as they do, because a score may need all processes to take part. scored:
    `order` are sort keys by score, not positions. keep: the most tokens of each head while decoding.
    """
    slots, now = call.slots, call.now
    # plan: do decode steps evict (`evicts`), any number of tokens (`moves`), and do heads differ in when they begin to
    keep = [[call.rule.bound(n) for n in row] for row in keep]  # at most, while decoding
    counts, keeps = ([n for row in rows for n in row] for rows in (count, keep))
    room = [k - n for k, n in zip(keeps, counts, strict=True)]  # tokens that each head may still add
    evicts = now.final and call.policy.schedule != "prompt"
    moves = evicts and call.rule.moves
    unequal = evicts and (uneven or moves or min(room) != max(room))  # some heads evict while others are below budget
    if order is None and unequal:
        order = call.positions_BHT
    # choose the tokens to keep: their slots `index` [B,H,K], and `kept`, False where a head has fewer than K
    index, kept = (None, None) if order is None else select_top(order, _fill_counts(call, count), counts)
    if scored and index is not None:
        _note_mass(call, index, kept)
    if kept is None and unequal and index is not None:
        kept = torch.ones_like(index, dtype=torch.bool)
    values = _find_values(call, index, kept)
    slots.may_have_empty, longest = kept is not None, max(counts)
    evicting = evicts or not now.final
    # a need (what the policy gathers in the layer) drops its notes if nothing will read them
    for need in call.needs:
        need.end(call, slots.state, evicting)
    # move the kept tokens to new buffers
    every = call.policy.every
    goals = [k + every for k in keeps] if evicts else None  # slots of each head at which it evicts
    if now.final:
        exactly = call.cache.plans.static_room is not None or every > 1  # all spare slots at once
        layout = plan(counts, goals, lambda tokens: max(_count_spare(call, tokens), slots.waiting_slots), exactly)
    else:
        layout = Layout([longest + now.reserve])  # the next block is appended
    slots.allocate(index, kept, layout)
    if values is not None:
        slots.replace_values(values, kept)
    if not now.final:
        return
    # set the mode in which decode steps go on
    slots.keep_BH1 = _fill_counts(call, keep)[..., None].clone()  # a copy, since the layer may write to it
    if moves:
        slots.start_moving(counts, goals)
    elif evicts:
        _start_evicting(call, kept, counts, goals, max(room) + every - 1)
    else:
        _start_keeping(call, kept, counts)


def _start_evicting(call: Call, kept: Tensor | None, counts: list[int], goals: list[int] | None, filling: int) -> None:
    """Set, after a prompt, the mode of a layer that evicts while decoding: tokens take free slots, or those of evicted ones.

    `_compress_layer` calls it. Heads of equal size below their budget are first appended to (`start_filling`). kept: None if
    all heads keep equally many tokens. counts: tokens of each head. goals: number of tokens at which each head evicts. filling:
    decode steps until all heads evict.
    """
    slots, compiled = call.slots, call.cache.plans.static_room is not None
    if filling and not (slots.may_have_empty or compiled):
        slots.start_filling(filling)
        return
    slots.may_have_empty |= filling > 0
    next_BH = None
    if kept is None:  # all heads have as many tokens, in their first slots
        next_BH = slots.positions.new_full(slots.positions.shape[:2], max(counts))
    slots.start_evicting(filling, counts, goals, next_BH)


def _start_keeping(call: Call, kept: Tensor | None, counts: list[int]) -> None:
    """Set the mode of a layer that keeps all later tokens: they go into empty slots of each head, or after the used columns.

    `_keep_all` calls it, and `_compress_layer` for policies that evict at prompts alone. counts: tokens of each head. kept:
    True in slots [B,H,K] that hold one of these; None if all heads have equally many. `kv.appends`: the storage can append a
    column to all heads at once. `static_room`: torch.compile compiles the steps, and buffers keep their size.
    """
    slots, held = call.slots, max(counts)
    if kept is not None and not slots.kv.appends:
        slots.start_growing(kept.sum(-1), counts)
    elif call.cache.plans.static_room is not None:
        slots.may_have_empty = True
        slots.start_growing(slots.positions.new_full(slots.positions.shape[:2], held), [held] * len(counts))
    else:
        slots.start_appending()


def _find_values(call: Call, index: Tensor | None, real: Tensor | None) -> Tensor | None:
    """Return new values [B,H,K,D] for kept tokens. They make up for the tokens that a prompt's end is about to evict.

    `_compress_layer` calls it. None if the policy has no merging (such new values), or if nothing is evicted. A head whose new
    values are not all finite keeps its old ones and gets a 1 in slots.unfitted_BH. index: slots of the kept tokens; real: False
    where a head has fewer than others. slots.graph: keys and values with their autograd graph, if this pass computes gradients.
    """
    slots, merging = call.slots, call.policy.merging
    if merging is None or index is None:
        return None
    if real is None:
        real = torch.ones_like(index, dtype=torch.bool)
    with torch.set_grad_enabled(slots.graph is not None):
        k, v = call.held() if slots.graph is None else slots.graph
        kept = Kept(index, real, call.mask_visible(find_newest(call)))
        values = merging.values(k, v, kept, call)
        fits_BH11 = (values.isfinite() | ~real[..., None]).all(-1, keepdim=True).all(-2, keepdim=True)
        slots.unfitted_BH = 1 - fits_BH11[..., 0, 0].long()
        return torch.where(fits_BH11, values, kept.gather(v))


def _count_spare(call: Call, tokens: int) -> int:
    """Return how many free slots a head of so many tokens gets for coming ones, for `_keep_all` and `_compress_layer`.

    If torch.compile compiles the steps, `static_room`, which is enough for all of them; else `slack`, or only as many as the
    tokens that generate() has announced (`new_tokens`).
    """
    room, coming = call.cache.plans.static_room, call.cache.plans.new_tokens
    if room is not None:
        return room
    return slack(tokens) if coming is None else min(slack(tokens), coming)


def _note_mass(call: Call, index: Tensor, kept: Tensor | None) -> None:
    """Store in `slots.mass_BH` the share of all observed attention that the kept tokens have received (`Report` shows it).

    `_compress_layer` calls it once a layer; it does nothing if the policy keeps no such sums. index: slots of the kept tokens
    [B,H,K]; kept: False where a head has fewer, None: nowhere. The state "sum" is the attention that each token received from
    all queries (`n_B` in each row); "observed", from an observation window.
    """
    slots = call.slots
    name = "sum" if "sum" in slots.state else "observed"
    if name not in slots.state:
        return
    received = slots.state[name][:, :, : slots.columns_used]
    mass = received.gather(-1, index)
    mass = (mass if kept is None else mass.masked_fill(~kept, 0.0)).sum(-1)
    if name == "sum":  # each query gave one in all: the state lacks what evicted tokens got
        slots.mass_BH = mass / call.now.copy([n * call.group for n in call.now.n_B], mass.device)[:, None]
    else:
        if slots.may_have_empty:
            received = received.masked_fill(call.positions_BHT < 0, 0.0)
        slots.mass_BH = mass / received.sum(-1).clamp_min(torch.finfo(received.dtype).tiny)


def set_limits(call: Call) -> list[int]:
    """Set `slots.limits`, how many tokens (sinks, recent ones ...) each row protects in its budget; return their totals by row.

    `read_prompt` calls it in each layer that evicts, before attention. sizes: a tuple for each row; its last number is the
    total. `fixed_B`: tokens before this position are outside the budget, as a whole prompt (n_B) if only decoding evicts.
    `protect=` marks some tokens, `quota=` gives each "span" (part of the text) a number of tokens to keep. `rule.weighs`: the
    budget follows from scores, so that it may be as small as `rule.least`.
    """
    cache, slots, now = call.cache, call.slots, call.now
    B, device = len(now.n_B), slots.positions.device
    protected: list[list[int]] = [[] for _ in range(B)]  # positions that `protect=` marks
    if "protect" in slots.state:
        used = slice(slots.columns_used)
        marked = slots.positions[:, 0, used].masked_fill(~slots.state["protect"][:, 0, used], -1)
        protected = [sorted(p for p in row if p >= 0) for row in marked.tolist()]
    fixed_B = now.n_B if call.policy.schedule == "decode" else now.kept_below_B or [0] * B
    sizes = tuple(
        call.policy.scope.limits(b, n, marks, call.policy.needs, fixed, rows)
        for b, n, marks, fixed, rows in zip(_list_budgets(call), now.n_B, protected, fixed_B, now.rows_B, strict=True)
    )
    if call.rule.weighs:
        sizes = tuple((*size[:-1], call.rule.least(n)) for size, n in zip(sizes, now.share_base_B, strict=True))
    if "span" in slots.state:
        sizes = tuple(
            (*size[:-1], min(b, size[-1] + more))
            for size, b, more in zip(sizes, _list_budgets(call), _set_quotas(call), strict=True)
        )
    slots.limits = cache.limits(sizes, device)  # one object for all layers of equal sizes
    _warn_of_cut_sizes(call)
    return [size[-1] for size in sizes]


def _set_quotas(call: Call) -> list[int]:
    """Set the state "quota": at each token, how many tokens its span (part of the text that the user named) keeps (`quota=`).

    `set_limits` calls it. Returns for each row the number of tokens that all its spans keep. sizes_B: by row, the budget and
    the prompt's length.
    """
    slots, sizes_B = call.slots, (_list_budgets(call), call.now.share_base_B)
    span, held = slots.state["span"][:, :, : slots.columns_used], call.positions_BHT >= 0
    slots.statistic("quota", slots.state["span"])[:, :, : slots.columns_used] = find_quotas(span, *sizes_B)
    return count_quotas(span, held, *sizes_B)


def _warn_of_cut_sizes(call: Call) -> None:
    """Warn once of protected sizes (such as sinks=) that are cut to fit the smallest budget of a row, for `set_limits`."""
    settings, evicts_once = call.settings, call.policy.schedule == "prompt"
    # rows that evict: those whose n tokens exceed the budget b. Others do so later, unless the policy evicts at prompts alone.
    rows = [(b, n) for b, n in zip(_list_budgets(call), call.now.share_base_B, strict=True) if n > b or not evicts_once]
    if not rows:
        return
    budget, n = min(rows)
    for name, size, fits, needs in call.policy.scope.list_cut_sizes(budget, call.policy.needs):
        give = f"Give {name}={fits} or less, or k={needs} or more." if fits else f"Give k={needs} or more."
        settings.notices.say(
            name,
            f"{name}={size} is cut to {fits}: the budget is {budget} tokens per head "
            f"(k={settings.budget.per_layer[call.layer]}, a prompt of {n}). {give}",
        )


def _warn_of_scores(call: Call, value_BHT: Tensor) -> None:
    """Warn once of scores that are NaN; `say_if` does not wait for the GPU.

    `Policy.eviction_keys` calls it, as `context.watch`, with the scores of each layer as a prompt ends.
    """
    notices = call.settings.notices
    if "nan" in notices.said:
        return
    broken = value_BHT.isnan()
    if call.slots.may_have_empty:
        broken &= call.positions_BHT >= 0
    notices.say_if(
        broken.any(),
        "nan",
        f"policy {call.policy.name!r} gave NaN scores in layer {call.layer}, which count as the lowest: what is kept there "
        "is decided by protection and position. patched(..., strict=True) raises where the first NaN arises.",
    )


def _list_budgets(call: Call) -> list[int]:
    """Return each row's budget: how many tokens a head may hold beside those kept outside the budget.

    share_base_B: tokens of each row, of which a budget such as k=0.5 is a share.
    """
    return [call.settings.tokens(call.layer, n) for n in call.now.share_base_B]


def find_newest(call: Call) -> Tensor:
    """Return the position [B,1,1] from which tokens' ages count as a prompt ends: that of a row's newest token.

    If the pass is an edit (tokens read into the middle of a text), that of the edit's last token. n_B: tokens of each row so
    far.
    """
    edit = call.now.edit
    return call.now.copy([(n if edit is None else edit.stop) - 1 for n in call.now.n_B], call.slots.positions.device)[
        :, None, None
    ]
