"""The decoder's pre-hook: checks the inputs, and passes an EvictingCache where the decoder would make a DynamicCache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..arch.adapter import keys_dtype
from ..arch.upstream import cache_of, set_cache
from ..cache import compiled, passes
from ..cache.cache import EvictingCache
from ..cache.lossless import LosslessCache
from ..cache.prefix import Prefix
from ..errors import KVPatchError
from ..policies.context import at_hand
from ..serving.pool import RequestPool
from . import inputs, leftovers, lossless, offsets, ownership, positions, texts
from .attention import Courier, PassMask
from .attentions import refuse_attentions, wants_attentions
from .replay import begin_replay
from .second_reading import enter_prepared
from .state import Changed, NotCaptured, PatchState, has_overrides, mask_by_kind, pass_mask, switch_overrides

NO_CAPTURE = (
    "This step cannot be captured: the model is training, or its own code has run since the cache's last pass. Call "
    "model.eval(), and the model itself once before the next step of patch.graph()."
)


def before_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: PatchState) -> Changed:
    """Begin each forward pass of a patched decoder, as its pre-hook, over an EvictingCache; return the changed arguments.

    None leaves the arguments as they are: the model's own code runs. `_begin_step` begins steps that are traced or captured,
    `_begin_untraced` all others: it makes a cache where none is given, and takes over or refuses that of an unpatched model.
    """
    call = {**dict(zip(state.decoder_parameters, args, strict=False)), **kwargs}
    past = cache_of(call)
    if isinstance(past, Prefix):
        past = ownership.start_from_prefix(past, state)
        set_cache(call, past, state.cache_name)
    if isinstance(past, EvictingCache) and past is state.capturing.cache:  # a CUDA graph is being captured
        if not _begin_step(decoder, call, past, state):
            raise NotCaptured(NO_CAPTURE)
        return (), call
    if torch.compiler.is_compiling():
        foreign = past is not None and not isinstance(past, EvictingCache)  # a cache of transformers, or of another library
        if isinstance(past, EvictingCache) and _begin_step(decoder, call, past, state):
            return (), call
        # under policy "full", and while the decoder's attributes are the model's, the model's own code runs, in one graph
        if state.settings.transparent and foreign and has_overrides(decoder, state.overrides, ours=False):
            return None
    return _begin_untraced(decoder, call, state)


def _enter_decoder(decoder: nn.Module, call: dict[str, Any], state: PatchState) -> Changed:
    """Begin a forward pass of the decoder by its kind; return its changed arguments, or None to run the model's own code.

    `before_decoder` calls this for all but traced and captured steps. It changes `call` (the decoder's arguments), the cache,
    the patch's log, and the decoder's attributes that an adapter replaces (`switch_overrides`).
    """
    mask = call.get("attention_mask")
    # continuous batching: the engine's mask carries its pool of requests
    if isinstance(mask, Courier) and isinstance(mask.cache, RequestPool):
        return _begin_packed(decoder, call, mask.cache, state)
    past = cache_of(call)
    # a replay: queries see what they saw in a recorded run
    if state.replayed is not None and (past is None or state.settings.transparent):
        return begin_replay(decoder, call, state, state.replayed)
    if isinstance(past, EvictingCache) and past.now is not None and past.now.prepared:  # a prompt's second reading, or an edit
        return enter_prepared(call, past, call["input_ids"].device, state)
    lossless_cache = None  # under lossless=True a pass fills the budgeted cache from which tokens are drafted
    if isinstance(past, LosslessCache) or (state.lossless and past is None and not _is_scratch(decoder, call)):
        lossless_cache = lossless.require_lossless_cache(past, state)
        past = lossless.begin_pass(decoder, call, lossless_cache, state)
    made_here = past is None
    changed = _begin_pass(decoder, call, state)
    if lossless_cache is not None:
        lossless_cache.lend()  # layers attend to all earlier tokens, which the lossless cache keeps on the host
    switch_overrides(decoder, state.overrides, ours=changed is not None)  # attributes that the patch replaces
    if changed is None:
        state.log.count_own_code(call, decoder.training)
    else:
        mask, cache = call["attention_mask"], cache_of(call)
        courier = mask["full_attention"] if isinstance(mask, dict) else mask  # it has the cache that no argument names
        state.log.begin(courier.cache if cache is None else cache, decoder.training, made_here)
    return changed


def _begin_pass(decoder: nn.Module, call: dict[str, Any], state: PatchState) -> Changed:
    """Check and begin a pass, for `_enter_decoder`: change its arguments `call` and cache; None: the model's own code runs."""
    reader = state.outer_inputs.take_reader()  # the multimodal model around the decoder, or None
    if runs_own_code(decoder, call, state):
        return None
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise KVPatchError(
            "torch.export and torch.jit.trace record one pass, but what is kept under a budget is chosen anew in each: pass "
            "use_cache=False, or record the model outside of the block."
        )
    cache = _choose_cache(decoder, call, state)
    inputs.refuse_pass(call, decoder)
    refuse_attentions(call, decoder)
    tokens = inputs.find_tokens(call, decoder)
    if tokens is None:  # both ids and embeddings were given, or neither: the model's own code raises the error
        return None
    tokens = _drop_seen_tokens(call, cache, tokens)
    mask = _check_batch(decoder, call, cache, tokens, state)
    positions.check_positions(call, cache, tokens, mask, state)
    cache.count_in(keys_dtype(decoder, tokens.device.type))  # turns a budget in bytes into tokens
    (B, Q), n_seen = tokens.shape[:2], cache.get_seq_length()
    # note in `cache.now` what layers will read of this pass; tensors made here can be written in later passes
    with torch.inference_mode(False), torch.no_grad():
        repeatable = cache.for_one_pass and decoder.training  # gradient checkpointing may run the pass twice
        table = table_maker(decoder, state, tokens.device)  # makes rotary embeddings; or None
        ids = state.outer_inputs.take(B, Q)  # where the decoder gets embeddings
        passes.begin(cache, B, Q, mask, call.get("input_ids"), tokens.device, table, repeatable, ids)
        if reader is not None:
            offsets.note_offsets(reader, cache, B, tokens.device)
    positions.place_tokens(call, cache, tokens, n_seen, state)
    # the decoder gets a mask of one entry; it carries a cache that no argument may name, as the caller wants none
    one_entry = pass_mask(tokens.device)
    decoder_mask = Courier.carrying(cache, one_entry) if cache.for_one_pass else one_entry.as_subclass(PassMask)
    call["attention_mask"] = mask_by_kind(state.settings.layer_numbers, decoder_mask, mask, Q)
    set_cache(call, None if cache.for_one_pass else cache, state.cache_name)
    call["use_cache"] = not cache.for_one_pass
    return (), call


def _choose_cache(decoder: nn.Module, call: dict[str, Any], state: PatchState) -> EvictingCache:
    """Return the cache that a pass is to fill, for `_begin_pass`: the caller's or a new one; raise if it isn't this patch's."""
    past, config = cache_of(call), getattr(decoder, "config", None)
    cache = state.new_cache() if past is None else ownership.require_evicting_cache(past)
    cache.for_one_pass = _is_scratch(decoder, call)
    n_layers = state.settings.within(getattr(config, "num_hidden_layers", sys.maxsize))
    if len(cache.layers) != n_layers:
        raise KVPatchError(
            f"The cache was made for a model of {len(cache.layers)} layers, but this one has {n_layers}: make one with this "
            "model's own patch.new_cache()."
        )
    ownership.check(cache, state)
    return cache


def _drop_seen_tokens(call: dict[str, Any], cache: EvictingCache, tokens: Tensor) -> Tensor:
    """Return a pass's new tokens (ids [B,Q] or embeddings), for `_begin_pass`; drop from `call` those that its cache has read.

    generate() may give the whole text to its first pass; it has noted in `plans.resent_columns` how many columns are read.
    """
    n_read, cache.plans.resent_columns = cache.plans.resent_columns, 0
    if n_read and tokens.shape[1] >= (cache.plans.prompt_len or 0):
        tokens = inputs.drop_read(call, n_read, tokens.shape[1])
    if not tokens.shape[1]:
        raise KVPatchError(
            f"This pass brings no token: the cache has seen {cache.get_seq_length()} already. Give generate() the "
            "whole text as input_ids, or what is new together with an attention_mask [B, seen + new] over both."
        )
    return tokens


def _check_batch(
    decoder: nn.Module, call: dict[str, Any], cache: EvictingCache, tokens: Tensor, state: PatchState
) -> Tensor | None:
    """Check, for `_begin_pass`, that a cache, rows and padding mask go together; return the mask [B,seen+Q], or None.

    seen: columns that the cache has read. `copy_per_row`: it is a copy of a prefix (a text read before, which others begin
    with); its one row is then repeated here for each of the B rows. `prompt_len`: the prompt's columns, if generate() told it.
    """
    B, Q = tokens.shape[:2]
    cache.refuse_unfinished()
    if Q > 1 or cache.get_seq_length() < (cache.plans.prompt_len or 1):  # a prompt; a step has no time for it
        ownership.note_reader(cache, decoder, state)  # raises if another model has read what the cache holds
    is_prefix, cache.plans.copy_per_row = cache.plans.copy_per_row, False
    if is_prefix and B > 1:
        cache.batch_repeat_interleave(B)
    mask = inputs.check_padding_mask(call.get("attention_mask"), B)
    mask = inputs.unmask_empty_rows(mask) if cache.for_one_pass else mask
    passes.check_batch(cache, B, Q, mask)  # first, since a mask that is too short also makes too few position_ids
    # compare the mask with what the cache has read, but not in each step of generate(), whose mask just goes on
    if mask is not None and cache.get_seq_length() and (Q > 1 or _is_by_hand(cache, mask)):
        texts.check_seen_mask(mask, cache, Q)
    inputs.refuse_gaps(mask, cache, Q)
    return mask


def _is_by_hand(cache: EvictingCache, mask_BT: Tensor) -> bool:
    """Tell `_check_batch` if the user, not generate(), made this step's mask, so that it is checked; False for one on a GPU."""
    read = cache.plans.prompt_len
    return at_hand(mask_BT) and (read is None or cache.get_seq_length() < read)


def table_maker(decoder: nn.Module, state: PatchState, device: torch.device) -> Callable[[int], Any] | None:
    """Return a function (number of positions -> table of rotary embeddings), or None, for `_begin_pass` and `compress_past`.

    It is needed where keys are cached unrotated (`renumbered`), and where a policy undoes rotations, to score keys by queries
    at later positions (its `lookahead`). None: neither is so.
    """
    if state.settings.renumbered:
        return functools.partial(state.adapter.rotary_table, decoder, device)
    if not state.settings.acts or state.settings.policy.needs.lookahead is None:
        return None
    most = state.max_positions or sys.maxsize  # positions that the model has
    return lambda count: state.adapter.rotary_table(decoder, device, min(count, most))


def _begin_packed(decoder: nn.Module, call: dict[str, Any], pool: RequestPool, state: PatchState) -> Changed:
    """Begin a pass of continuous batching, for `_enter_decoder`: one row with tokens of several requests, each with its cache.

    pool: the running requests. Its next pass has parts: each is the tokens of some requests that share a cache. `call` (the
    decoder's arguments) gets a mask that carries the parts' caches to the attention layers.
    """
    tokens: Any = call.get("input_ids")
    if tokens is None:  # of a model that reads images, whose decoder gets embeddings
        tokens = state.outer_inputs.take(*call["inputs_embeds"].shape[:2])
    packed = pool.next_pass()
    for part in packed.parts:
        if part.cache.model_stamp is None:  # nothing was read into it yet
            ownership.note_reader(part.cache, decoder, state)
    with torch.inference_mode(False), torch.no_grad():
        packed.begin(tokens[0], table_maker(decoder, state, tokens.device))
    switch_overrides(decoder, state.overrides, ours=True)  # attributes that the patch replaces
    for part in packed.parts:
        state.log.begin(part.cache, decoder.training, made_here=False)
    if "position_ids" in state.decoder_parameters:
        call["position_ids"] = packed.positions_1Q
    set_cache(call, None, state.cache_name)
    call.update(use_cache=False, attention_mask=Courier.carrying(packed, pass_mask(tokens.device)))
    return (), call


def runs_own_code(decoder: nn.Module, call: dict[str, Any], state: PatchState) -> bool:
    """Tell `_begin_pass` if the model's own code runs a pass: in training or without a cache, unless patched() got `block=`.

    Under policy "full", which changes no result, it also runs passes that an EvictingCache cannot: with another cache, with a
    mask that is not causal, or asked for attention matrices.
    """
    past = cache_of(call)
    needs_own_code = past is not None or _own_attention(decoder, call)
    if state.settings.transparent and not isinstance(past, EvictingCache) and needs_own_code:
        return True
    return _is_scratch(decoder, call) and (state.settings.block is None or past is not None)


def _is_scratch(decoder: nn.Module, call: dict[str, Any]) -> bool:
    """Tell `_choose_cache` if a pass's cache is scratch (dropped at its end): the caller wants none, or the model trains."""
    past, use_cache = cache_of(call), call.get("use_cache")
    if use_cache is None:
        use_cache = getattr(getattr(decoder, "config", None), "use_cache", True) if past is None else True
    return not isinstance(past, EvictingCache) and (not use_cache or decoder.training)


def _own_attention(decoder: nn.Module, call: dict[str, Any]) -> bool:
    """Tell `runs_own_code` if a pass asks for attention matrices, shared keys and values, or a mask beyond padding (2-D)."""
    mask = call.get("attention_mask")
    unusual = inputs.reads_both_ways(call, decoder) or bool(call.get("return_shared_kv_states"))
    return unusual or wants_attentions(call, decoder) or (mask is not None and getattr(mask, "ndim", 0) != 2)


def _begin_step(decoder: nn.Module, call: dict[str, Any], cache: EvictingCache, state: PatchState) -> bool:
    """Begin a decode step that torch.compile traces or a CUDA graph captures: change `call` and `cache`; False if it cannot.

    `before_decoder` calls it. `concatenated`: the cache's rows are at different positions of their texts. `renumbered`: keys
    are cached unrotated, and rotated later by their rank among the keys held.
    """
    tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
    mask = call.get("attention_mask")
    custom = mask is not None and mask.ndim != 2
    if tokens is None or call.get("output_attentions") or custom or call.get("encoder_hidden_states") is not None:
        return False  # with nothing changed; the untraced hook, which runs then, raises the error
    if decoder.training:
        return False  # gradient checkpointing may take the cache away, which only the mask of an untraced pass shows
    if not has_overrides(decoder, state.overrides, ours=True):
        return False  # the model's own code has run since the last pass under the patch
    if not compiled.can_trace(cache, tokens.shape[0], tokens.shape[1]):
        return False  # no decode step of which all tensors keep their shape and memory
    if cache.rows.concatenated and not cache.settings.renumbered:
        inputs.give_position_ids(call, cache, 1, mask, state)
    # sets `cache.now`, and counts the tokens on the device
    compiled.begin_step(cache, None if cache.settings.renumbered else state.max_positions, mask, call.get("input_ids"))
    if cache.settings.renumbered and state.max_positions is not None:  # the model has a table of positions: stay within it
        positions.give_zeros(call, tokens)
    mask = pass_mask(tokens.device)
    set_cache(call, cache, state.cache_name)
    call.update(use_cache=True, attention_mask=mask)
    return True


# torch.compile must not trace these: prompts, and all that advances the cache's counters
_begin_untraced = torch.compiler.disable(leftovers.clean_up(_enter_decoder), reason=compiled.ONE_GRAPH)
