"""One forward pass over a cache: read what it brings, begin it, end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..policies.context import at_hand
from ..policies.served import refuse
from . import compiled
from .counters import DeviceCounters
from .forward_context import Edit, Forward, Padding, Repeat, find_places, split_blocks
from .marks import mark_protected, mark_spans
from .modes import Evicting, Growing
from .snapshot import LayerPart
from .state import TextState


def begin(
    cache: TextState,
    B: int,
    Q: int,
    mask_BT: Tensor | None,
    input_ids: Tensor | None,
    device: torch.device,
    table: Callable[[int], Any] | None = None,
    repeatable: bool = False,
    merged_ids: Tensor | None = None,
) -> None:
    """Begin a pass of Q columns, before the decoder runs: set `cache.now` to its Forward, and count its tokens.

    `_begin_pass` of hooks/decoder.py calls this. `end_pass` ends the pass. The Forward tells positions of the new tokens, how
    many are of the prompt, and what the budget counts. mask_BT: the attention mask, of all columns or of the new ones; None:
    no padding. table: makes the rotary table for so many positions, if keys are cached without rotation or the score undoes
    rotations. repeatable: computed alike with and without gradients, for gradient checkpointing. merged_ids: ids of tokens that
    are given as embeddings, with images merged into them.

    Raises:
        KVPatchError: the mask has a wrong length or other numbers than 0 and 1, a row is all padding, a generated token is
            marked as padding, the batch size is not the cache's, an earlier pass did not finish, or the settings exclude such a
            pass (see `refuse`).
    """
    cache.begin_change("forward pass")
    cache.catch_up()
    cache.settings.notices.look()  # logs warnings whose flags have come from the GPU
    try:
        now, before_B, after_B = _read_pass(cache, B, Q, mask_BT, input_ids, device, repeatable, merged_ids)
    except BaseException:
        cache.end_change()
        raise
    # all checks have passed: from here on the cache changes, until end_pass()
    seen, prompt = cache.get_seq_length(), now.prompt_columns
    cache.now, cache.seen_B, cache.rows.padded = now, after_B, cache.rows.padded or now.padding is not None
    if cache.settings.by_columns and now.rows_BQ is not None and now.padding is not None and now.padding.attends:
        _count_gaps(cache, now, now.rows_BQ)  # padding between tokens, which positions count
    if cache.lifetimes is not None and input_ids is not None:  # evictions are recorded for replays
        cache.lifetimes.note_ids(input_ids, now.positions_BQ, seen + Q)
    _note_ids(cache, now, merged_ids if input_ids is None else input_ids, seen)
    # the prompt's beginning, undo logs, and what the budget counts
    if prompt:
        _begin_prompt(cache, now, before_B)
    elif not any(layer.record_past for layer in cache.layers):  # steps are not logged for crop()
        _clear_undo_logs(cache)
    if now.n_B:  # with the tokens of the prompt that later passes bring
        _count_budget(cache, now, [n + max((cache.plans.prompt_len or 0) - seen - prompt, 0) for n in now.n_B])
    _set_rotary_table(cache, now, table, seen + Q)
    if prompt and cache.settings.block is not None:
        now.blocks = split_blocks(now, cache.settings.block, before_B)
    if now.ends_prompt:
        cache.turns.prompts_read, cache.turns.unfinished = cache.turns.prompts_read + 1, False
    if now.ends_prompt and cache.settings.rereads and not now.keeps_all:  # a second reading of the prompt follows
        now.reread_ids_BN = cache.ids.prompt_BN
    cache.counters.steps += Q - prompt


def begin_compression(cache: TextState, ids_BT: Tensor | None, table: Callable[[int], Any] | None = None) -> Forward:
    """For `compress_past`: begin a pass of no columns that ends the prompt of a cache that `absorb` filled; return it.

    That is one turn (`cache.turns`), at whose end layers evict down to the budget. ids_BT: the prompt's tokens, -1 for padding,
    if they are known. table: makes the rotary table for so many positions; a score may look ahead by some more (`lookahead`).
    """
    cache.begin_change("compress()")
    lengths_B, seen = cache.lengths_B, cache.get_seq_length()
    no_columns_BQ = lengths_B.new_zeros(len(lengths_B), 0)
    cache.now = now = Forward(no_columns_BQ, prompt_columns=0, ends_prompt=True, n_B=lengths_B.tolist())
    if ids_BT is not None:
        cache.ids.crop(0)  # `absorb` noted unknown ones
        cache.ids.write(ids_BT, len(lengths_B), seen, lengths_B.device)
    _begin_prompt(cache, now, [0] * len(lengths_B))
    _count_budget(cache, now, now.n_B)  # which tokens the budget counts
    if table is not None:
        now.rotary_table = table(seen + (cache.settings.policy.needs.lookahead or 0))
    cache.turns.prompts_read, cache.turns.unfinished = 1, False
    now.reread_ids_BN = ids_BT if cache.settings.rereads else None
    return now


def begin_repeat(
    cache: TextState, whole: Forward, pieces: list[tuple[int, int, list[int]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Begin a pass that reads a chunk of the prompt again, to score by it; return its ids and positions [B,Q].

    `read_again` calls it. Sets `cache.now`. whole: the pass that ends the prompt, which the positions follow.
    pieces: for each row the chunk's bounds [start, stop) in tokens of the prompt, and the ids to feed: an instruction, then the
    chunk's.
    """
    Q, begin_B = max(len(tokens) for _, _, tokens in pieces), cache.turns.begin_B
    ids_BQ = torch.tensor([[*tokens, *[-1] * (Q - len(tokens))] for _, _, tokens in pieces], device="cpu")
    column = torch.arange(Q, device="cpu")
    positions = (torch.tensor(whole.n_B, device="cpu")[:, None] + column).masked_fill(ids_BQ < 0, -1).to(device)
    now = Forward(positions, Q, False)  # rows differ in length only where the prompt is padded, so that its slots have holes
    # the chunk as positions of the text, in which each row's prompt begins at begin_B
    starts = [first + start for first, (start, _, _) in zip(begin_B, pieces, strict=True)]
    stops = [first + stop for first, (_, stop, _) in zip(begin_B, pieces, strict=True)]
    tokens = [n - first for n, first in zip(whole.n_B, begin_B, strict=True)]
    now.repeat, cache.now = Repeat(starts, stops, tokens), now
    return ids_BQ.clamp(min=0).to(device), positions


def begin_edit(
    cache: TextState, edit: Edit, ids_BQ: Tensor, places_Q: Tensor, table: Callable[[int], Any] | None = None
) -> Forward:
    """Begin a pass of patch.replace(), which reads tokens into a gap in the middle of the text; set `cache.now`, and return it.

    `_read_edit` calls it. edit: where in the text the gap is. ids_BQ, places_Q: the tokens, and their positions, which no token
    has now. table: makes the rotary table for so many positions, or None.
    """
    cache.begin_change("edit")
    (B, Q), lengths_B = ids_BQ.shape, cache.lengths_B
    # as a prompt of Q columns. share_base_B: the budget counts the whole text; keeps_all: layers evict nothing after the edit
    now = Forward(places_Q.expand(B, -1).contiguous(), Q, True, lengths_B.tolist(), edit=edit)
    now.share_base_B, now.rows_B, now.keeps_all = now.n_B, [Q] * B, cache.settings.policy.schedule == "prompt"
    now.protect_BQ = mark_protected(cache, now.positions_BQ, ids_BQ, cache.columns_read, within=edit.start)
    now.quota_span_BQ = mark_spans(cache, now.positions_BQ, cache.columns_read)
    cache.ids.skip_columns(B, cache.columns_read, lengths_B.device)  # columns whose ids were not noted
    cache.ids.replace(ids_BQ, places_Q)
    if cache.shared_score is not None:  # a score that all layers share, by position + 1
        cache.shared_score = cache.shared_score.index_fill(2, places_Q.to(cache.shared_score.device) + 1, 0)
    cache.now, cache.counters.tensors_or_none = now, None
    cache.unstack_layers(due=True)
    cache.meter.now = sum(layer.kv.nbytes for layer in cache.layers)  # bytes allocated
    _clear_undo_logs(cache)
    _set_rotary_table(cache, now, table, cache.columns_read)
    return now


def _note_ids(cache: TextState, now: Forward, input_ids: Tensor | None, seen: int) -> None:
    """Keep the ids of a pass's tokens: by them generate() notices later that it is given another text (hooks/texts.py).

    `begin` calls it. Padding gets the id PADDING in `cache.ids`. seen: columns read before this pass.
    """
    if cache.for_one_pass:  # nothing goes on from such a cache
        return
    if now.prompt_columns and not cache.turns.unfinished:  # a prompt begins
        cache.ids.prompt = seen  # columns before the newest prompt
    real = None if now.padding is None else now.positions_BQ[:, : now.prompt_columns] >= 0
    cache.note_ids(input_ids, now.positions_BQ.shape[1], real)  # None: unknown ids


def _begin_prompt(cache: TextState, now: Forward, before_B: list[int]) -> None:
    """Begin a prompt, or a further piece of one that comes in several passes: note in `cache.turns` that it is unfinished.

    `begin` and `begin_compression` call it. Layers that were stacked (to take decode steps as one) are separated, and undo logs
    cleared. Where the prompt ends, decode steps count anew.
    """
    turns, counters = cache.turns, cache.counters
    cache.meter.now = sum(layer.kv.nbytes for layer in cache.layers)  # bytes allocated
    cache.unstack_layers(due=cache.plans.static_room is None if now.ends_prompt else cache.stack_due)
    _clear_undo_logs(cache)  # they do not lead back over a prompt
    if not turns.unfinished:
        turns.begin_B, turns.unfinished = before_B, True
    if now.ends_prompt:
        counters.steps, counters.steps_behind_B, counters.temperature_steps_B = 0, None, None
        cache.shared_limits.clear()  # protected sizes, which layers share and compute where the prompt ends


def _clear_undo_logs(cache: TextState) -> None:
    """Empty the undo log of each layer: crop() can then no longer restore what earlier decode steps evicted."""
    for layer in cache.layers:
        layer.undo_log.clear()


def end_layer(cache: TextState, layer: int) -> None:
    """Count a layer's part of a pass as done, after its attention has run; after the last layer end the pass.

    `_attend_layer` calls it. A cache for one pass, without use_cache, is emptied layer by layer, but for what reports need.
    """
    if cache.for_one_pass:
        cache.layer_parts[layer] = LayerPart.of(cache.layers[layer], cache.settings.bounds[layer])
        cache.layers[layer].reset()
        cache.meter.now = 0  # bytes allocated
    now = cache.current_pass
    if layer == len(cache.layers) - 1 and not outlasts(cache, now):  # else a hook after the decoder ends it
        end_pass(cache)


def outlasts(cache: TextState, now: Forward) -> bool:
    """Tell if a pass lasts until a hook after the decoder ends it: the prompt is read again, or other layers may follow.

    These are a hybrid's layers with a state (`states`), and layers that use the keys of others (`read`). A cache `for_one_pass`
    is dropped afterwards, so that it need not wait for them.
    """
    follow = bool(cache.states) or bool(cache.settings.read)
    return now.reread_ids_BN is not None or now.repeat is not None or (follow and not cache.for_one_pass)


def end_pass(cache: TextState) -> None:
    """End a pass, or the second reading after it: update counters of compiled steps, which are tensors, and allow the next use.

    `end_layer` calls it after the last layer, `after_decoder` if a hook has to run first.
    """
    now, counters = cache.current_pass, cache.counters
    cache.states.end_pass()  # detaches a hybrid's states from autograd
    now.shared_keys.clear()  # read by layers without keys of their own; the Forward stays until the next pass
    if now.traced:  # a step of compiled code
        compiled.end_step(cache)
        return
    # counters that are tensors: made after the first pass
    begun = counters.tensors_or_none is None or now.ends_prompt  # decode steps count anew
    if counters.tensors_or_none is None:
        counters.tensors_or_none = DeviceCounters(cache.lengths_B.device, len(cache.lengths_B), cache.plans.static_room or 0)
    counters.tensors_or_none.columns.fill_(cache.columns_read)
    counters.tensors_or_none.steps.fill_(counters.steps)
    if begun or cache.plans.static_room is not None or any(isinstance(layer.mode, Growing) for layer in cache.layers):
        # columns up to which compiled steps have room: they cannot move buffers, so the layer with the fewest writes_left
        # decides. Set as a prompt ends, after each pass if static_room was asked for, and if a Growing layer's may have moved
        limits = (layer.columns_read + layer.mode.writes_left for layer in cache.layers if layer.mode.has_short_heads)
        counters.tensors_or_none.limit.fill_(min(limits, default=0))
    if begun:
        counters.tensors_or_none.temperature_steps.fill_(cache.count_temperature_steps())
        if cache.make_rotary_table is not None:
            _rotary_table(cache, 1, prompt=False)  # for a compiled step
        if cache.plans.static_room is not None:
            compiled.mark_static(cache)
    cache.end_change()


# ---- reading a pass ----


def _read_pass(
    cache: TextState,
    B: int,
    Q: int,
    mask_BT: Tensor | None,
    input_ids: Tensor | None,
    device: torch.device,
    repeatable: bool,
    merged_ids: Tensor | None,
) -> tuple[Forward, list[int], Tensor]:
    """For `begin`: check its arguments, and describe the pass; the cache does not change.

    Returns its Forward, and the tokens of each row before it (if it has columns of a prompt) and after it [B].
    """
    check_batch(cache, B, Q, mask_BT)
    settings, seen, recorded = cache.settings, cache.get_seq_length(), any(layer.record_past for layer in cache.layers)
    before = torch.zeros(B, dtype=torch.long, device=device) if cache.seen_B is None else cache.seen_B.to(device)
    prompt = _count_prompt_columns(cache, seen, Q)
    # refuse(): raises if these settings exclude what is named
    # several generated tokens in one pass are drafts, which a policy that evicts (acts) may not support
    if settings.acts and 0 < prompt < Q:
        refuse("drafts with the prompt", settings.list_features(drafts=Q - prompt))
    if settings.acts and Q - prompt > 1:
        refuse("drafts", settings.list_features(drafts=Q - prompt))
    if input_ids is None:
        asked = {"acts": settings.acts and prompt > 0, "record": cache.lifetimes is not None, "unknown": merged_ids is None}
        refuse("inputs_embeds", settings.list_features(**asked))
    if prompt and cache.rows.concatenated:
        refuse("prompt of joined rows", settings.list_features())
    mask_BQ = None if mask_BT is None else mask_BT[:, -Q:].to(device)
    real = None if mask_BQ is None else mask_BQ.bool()
    if real is not None and prompt < Q:
        _refuse_padding(real[:, prompt:])
    # padding and lengths of the rows, read from the device
    read, rows = _Prompt([], [], None, []), None  # rows: positions of all columns, padding too
    if prompt:
        read = _read_prompt(cache, before, prompt, mask_BQ)
    if real is not None and read.padding is not None:
        rows = find_places(real, before, settings.by_columns)
        positions, after = rows.masked_fill(~real, -1), rows[:, -1] + 1
    else:
        positions, after = before[:, None] + torch.arange(Q, device=device), before + Q
    # where the prompt ends the budget counts each row's tokens, and a row of padding alone is refused
    ends = prompt > 0 and seen + prompt >= (cache.plans.prompt_len or 0)
    n_B = read.whole_B if ends or settings.block else []
    if ends and read.padding is not None:
        _check_rows(cache, n_B, read.last_B)
    # marks of the options protect= and quota=
    protect = mark_protected(cache, positions, merged_ids if input_ids is None else input_ids, seen) if prompt else None
    spans = mark_spans(cache, positions, seen) if prompt else None
    n_steps = 0 if ends else cache.counters.steps
    recording = Q - prompt > 1 or recorded
    now = Forward(positions, prompt, ends, n_B, read.padding, protect, recording, n_steps, repeatable=repeatable)
    now.rows_BQ, now.quota_span_BQ = rows if settings.transparent else None, spans
    return now, read.before_B, after


class _Prompt(NamedTuple):
    """Numbers of a pass's prompt columns, as `_read_prompt` returns them.

    before_B, whole_B: tokens of each row before these columns, and with them. padding: None if there is none. last_B: 1 for a
    row whose last column is a token; empty if the pass has no mask.
    """

    before_B: list[int]
    whole_B: list[int]
    padding: Padding | None
    last_B: list[int]


def _read_prompt(cache: TextState, before: Tensor, prompt: int, mask_BQ: Tensor | None) -> _Prompt:
    """Read from the device, in one copy, where a prompt's padding lies and how many tokens each row has before and with it.

    `_read_pass` calls it. Without a mask, rows of equal length cost no copy, and others have no padding in this prompt. A row's
    last column may be padding, which the caller checks. Refuses a mask of other numbers than 0 and 1. by_columns: positions
    count padding. transparent: padding after a token attends to the tokens before it, as in the unpatched model.
    """
    B, rows = len(before), cache.rows
    even = cache.seen_B is None or not (rows.padded or rows.concatenated or cache.turns.unfinished)
    if mask_BQ is None and even:
        seen = 0 if cache.seen_B is None else cache.get_seq_length()
        return _Prompt([seen] * B, [seen + prompt] * B, None, [])
    if mask_BQ is None:
        read = before.tolist()
        return _Prompt(read, [n + prompt for n in read], None, [])
    mask_BP = mask_BQ[:, :prompt].expand(B, -1)
    real = mask_BP.bool()
    rows_BP = find_places(real, before, cache.settings.by_columns)  # positions; -1 before a row's first token
    column = torch.arange(1, prompt + 1, device=real.device)  # from 1: the greatest at padding counts columns up to it
    later = (real[:, :-1] & ~real[:, 1:]).any()  # padding follows a token
    wrong = ((mask_BP != 0) & (mask_BP != 1)).any() if mask_BP.dtype != torch.bool else later.new_zeros(())
    after_tokens = (~real & (rows_BP >= 0)).any()  # or a token of an earlier pass
    # four numbers, then four for each row: one tensor, so that the host waits for a single copy
    answers = [wrong, later, after_tokens, (~real * column).amax(), before, rows_BP[:, -1] + 1, real.sum(1), real[:, -1]]
    read = torch.cat([answer.long().reshape(-1) for answer in answers]).tolist()
    (wrong_mask, gapped, attends, reach), per_row = read[:4], [read[4 + B * i : 4 + B * (i + 1)] for i in range(4)]
    if wrong_mask:
        refuse_mask(mask_BP)
    before_B, whole_B, real_B, last_B = per_row
    padding = Padding(reach, bool(gapped), cache.settings.transparent and bool(attends), real_B) if reach else None
    return _Prompt(before_B, whole_B, padding, last_B)


def refuse_mask(mask: Tensor) -> None:
    """Raise KVPatchError if a prompt's padding mask holds other numbers than 1 and 0, such as what is added to logits."""
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise KVPatchError(
            f"attention_mask holds {wrong[0].item():g}; give 1 for tokens and 0 for padding, not what is added to logits."
        )


def _count_gaps(cache: TextState, now: Forward, rows_BQ: Tensor) -> None:
    """For `begin`: count the padding columns after tokens, which the positions of these rows include from now on."""
    gaps_B, rows = ((rows_BQ >= 0) & (now.positions_BQ < 0)).sum(-1), cache.rows
    rows.gaps_B = gaps_B if rows.gaps_B is None else rows.gaps_B.to(gaps_B.device) + gaps_B
    rows.by_columns = True  # positions count padding


def check_batch(cache: TextState, B: int, Q: int, mask_BT: Tensor | None) -> None:
    """For `_read_pass`: raise KVPatchError for a batch size other than the cache's, or a mask of the wrong length."""
    if cache.seen_B is not None and len(cache.seen_B) != B:
        raise KVPatchError(
            f"The cache holds {len(cache.seen_B)} rows, but the input has {B}: give as many, or make them so with "
            "batch_select_indices() or batch_repeat_interleave()."
        )
    if mask_BT is not None and mask_BT.shape[-1] not in (cache.get_seq_length() + Q, Q):
        raise KVPatchError(
            f"attention_mask has {mask_BT.shape[-1]} columns, but {cache.get_seq_length()} tokens were seen and {Q} "
            f"are new: it needs {cache.get_seq_length() + Q}."
        )


def _count_prompt_columns(cache: TextState, seen: int, Q: int) -> int:
    """For `_read_pass`: return how many of a pass's Q columns belong to a prompt (docs/policies/definitions.md, Budgets).

    seen: columns before them. The others are generated tokens.
    """
    if cache.plans.prompt_len is not None:
        return min(max(cache.plans.prompt_len - seen, 0), Q)
    # a prompt taken over from an unpatched cache, or left open by an interrupted generate(), ends with the first tokens that
    # follow, even a single one
    return Q if seen == 0 or Q > 1 or cache.turns.unfinished or not cache.turns.prompts_read else 0


def _refuse_padding(real_BQ: Tensor) -> None:
    """For `_read_pass`: raise KVPatchError if a mask marks a generated token as padding."""
    message = "attention_mask marks a generated token as padding; pad prompts on the left, before their first token."
    if at_hand(real_BQ):
        if not bool(real_BQ.all()):
            raise KVPatchError(message)
    else:  # asserted on the device, without a wait
        torch._assert_async(real_BQ.all(), message)


def _check_rows(cache: TextState, n_B: list[int], last_B: list[int]) -> None:
    """Raise KVPatchError if a prompt ends with a row that has no token, or in generate() with one padded on the right.

    `_read_pass` calls it where padding came. n_B: tokens of each row. last_B: 1 for a row whose last column is a token.
    """
    if min(n_B) == 0:
        later = " If its text comes in later pieces: generate(prefill_chunk_size=n), or a first piece with tokens of all rows."
        raise KVPatchError(
            f"Row {n_B.index(0)} of the batch is all padding (its attention_mask is zero): drop it from the batch, in "
            "the collator or the dataset (an empty text), or pass use_cache=False with block=."
            f"{later * (cache.plans.prompt_len is None)}"
        )
    if cache.plans.prompt_len is not None and not cache.settings.transparent and not all(last_B):
        raise KVPatchError(
            f"Row {last_B.index(0)} is padded on the right: generate() continues after the last column, "
            "so pad on the left (tokenizer.padding_side = 'left')."
        )


def _count_budget(cache: TextState, now: Forward, n_B: list[int]) -> None:
    """Set in `now` which tokens the budget counts and which are kept outside it, by option `turns`.

    `begin` and `begin_compression` call it. A chat has several prompts (turns). In later ones "first" evicts nothing, "each"
    gives the prompt a budget of its own, and "all" budgets the whole text. n_B: tokens of each row where the prompt ends.
    `share_base_B`: the tokens of which a budget such as k=0.5 is a share.
    """
    later, turns, begin_B = cache.turns.prompts_read > 0, cache.settings.policy.scope.turns, cache.turns.begin_B
    now.keeps_all = later and turns == "first"
    now.kept_below_B = begin_B if later and turns == "each" else None
    now.rows_B = [n - start for n, start in zip(n_B, begin_B, strict=True)]  # of the newest prompt alone
    now.share_base_B = n_B if now.kept_below_B is None else now.rows_B


# ---- rotary tables ----


def _set_rotary_table(cache: TextState, now: Forward, table: Callable[[int], Any] | None, positions: int) -> None:
    """Set a pass's rotary table, made by `table`, for `begin` and `begin_edit`. positions: of the text; a score may look ahead.

    If keys are renumbered, `cache` keeps `table`, and every pass gets a table; else only a prompt or an edit does.
    """
    if table is not None and cache.settings.renumbered:  # a key's position is its rank among those held
        cache.make_rotary_table = table
        now.rotary_table = _rotary_table(cache, now.positions_BQ.shape[1], now.prompt_columns > 0)
    elif table is not None and now.prompt_columns:
        now.rotary_table = table(positions + (cache.settings.policy.needs.lookahead or 0))


def _rotary_table(cache: TextState, Q: int, prompt: bool) -> Any:
    """Return the rotary table where a key's position is its rank among the keys held (positions="renumbered").

    `_set_rotary_table` and `end_pass` call it. It goes up to the highest rank that the pass can need; `cache.rotary` keeps it
    until that number changes. prompt: some of the pass's Q columns are a prompt's.
    """
    ranks = _count_most_held(cache, Q, prompt)
    if cache.rotary is None or cache.rotary[0] != ranks:
        assert cache.make_rotary_table is not None
        cache.rotary = (ranks, cache.make_rotary_table(ranks))
    return cache.rotary[1]


def _count_most_held(cache: TextState, Q: int, prompt: bool) -> int:
    """Return an upper bound of the tokens that one head holds in a pass of Q columns, for `_rotary_table`.

    Each column adds a token to a head, unless it is a decode step in which the head evicts one. If the text's first prompt is
    read in `block`s, heads evict after each: a head then holds its budget and one block. prompt: some columns are a prompt's.
    """
    most, now, settings = 1, cache.current_pass, cache.settings
    # later prompts are counted with the generated tokens
    first_prompt = cache.turns.prompts_read == 0 and not settings.policy.over_heads
    for index, layer in enumerate(cache.layers):
        # a decode step at the budget puts each new token in an evicted one's place
        replaced = isinstance(layer.mode, Evicting) and not layer.mode.has_short_heads and not prompt
        held = layer.taken if replaced else layer.taken + Q  # taken: slots with tokens
        if settings.block and now.share_base_B and settings.evicts[index] and first_prompt:
            # most(): tokens that a head may hold after each block
            held = min(held, max(settings.rules[index].most(n) for n in now.share_base_B) + settings.block)
        most = max(most, held)
    return most
