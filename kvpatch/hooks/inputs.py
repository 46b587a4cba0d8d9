"""Checks of arguments to a patched model, before anything changes; each error says what to type instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from ..arch.rotary import switch_length
from ..arch.upstream import CACHE, cache_of
from ..cache import passes
from ..cache.cache import EvictingCache
from ..cache.checks import check_real
from ..errors import KVPatchError, suggest
from ..policies.budgets import is_number
from ..policies.context import at_hand
from ..policies.served import refuse
from ..storage import file
from .state import PatchState

BUDGETS = ("budget", "ratio", "compression_ratio", "cache_size", "max_capacity_prompt")  # names for k in other libraries
OTHERS = {
    "num_sink_tokens": "the first tokens, which are never evicted, are sinks=, such as sinks=4",
    "heavy_ratio": "k is the whole budget, and recent= the part of it for the newest tokens: heavy_ratio=0.1 and "
    "recent_ratio=0.1 are k=0.2, recent=0.5",
}
"""Options of other libraries, and what to write for them."""
MISPLACED = (
    "position_ids do not go on from what each row of this concatenated cache has seen: leave them out, or pass "
    "cache.next_positions()."
)


def refuse_misspelt_arguments(known: Sequence[str], options: dict[str, Any], arguments: Sequence[str]) -> None:
    """Raise KVPatchError for an option of patched() that is another library's name of an argument, or looks misspelt.

    `policy_of` calls it before the model is patched. Other unknown options are left to the policy. known: names of its options;
    arguments: those of patched() itself.
    """
    for name in [name for name in options if name not in known]:
        if name in BUDGETS:
            raise KVPatchError(
                f"patched() has no option {name!r}: the budget is k, the share or the number of tokens that are kept, such as "
                f"k=0.5 or k=1024{_as_k(name, options[name])}."
            )
        if name in OTHERS:
            raise KVPatchError(f"patched() has no option {name!r}: {OTHERS[name]}.")
        meant = suggest(name, (*known, *arguments))
        if any(repr(argument) in meant for argument in arguments):
            raise KVPatchError(f"patched() has no option {name!r}.{meant}")


def _as_k(name: str, value: object) -> str:
    """Return advice for `refuse_misspelt_arguments`: to write k= for another library's option; "" if `value` is no budget."""
    if not is_number(value):
        return ""
    if name == "compression_ratio":
        return f": write k={1 - value:.3g} for {name}={value!r}, which is the share that is dropped" if 0 <= value < 1 else ""
    return f": write k={value!r} for {name}={value!r}" if value > 0 else ""


def find_tokens(call: dict[str, Any], decoder: Any) -> Tensor | None:
    """Return the input_ids [B,Q] or inputs_embeds [B,Q,E] of a pass to begin; raise KVPatchError if they cannot be read.

    `_begin_pass` and `begin_replay` call it before a pass. call: the decoder's arguments. None if there are both or neither:
    the model itself raises the right error.
    """
    ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return None
    name, value, shape = ("input_ids", ids, "[B, tokens]") if embeds is None else ("inputs_embeds", embeds, "[B, tokens, E]")
    if not isinstance(value, Tensor):
        raise KVPatchError(f"{name} is a {type(value).__name__}: give a tensor {shape}, as torch.tensor(...) makes.")
    table = getattr(decoder, "get_input_embeddings", lambda: None)()
    width = getattr(table, "embedding_dim", None)
    if embeds is not None:
        wrong = value.ndim != 3 or (width is not None and value.shape[-1] != width) or not value.is_floating_point()
        sizes, kind = f" with E = {width}" * (width is not None), "floating-point numbers"
    else:
        wrong = value.ndim != 2 or value.dtype not in (torch.int64, torch.int32)
        sizes, kind = "", "token ids (int64)"
    if wrong:
        raise KVPatchError(f"{name} is {value.dtype} of shape {list(value.shape)}: give {kind} {shape}{sizes}.")
    if not value.shape[0]:
        raise KVPatchError(f"{name} has shape {list(value.shape)}, which is no row: give at least one.")
    check_real(name, value)
    known = getattr(table, "num_embeddings", None)
    if embeds is None and known is not None and at_hand(value) and value.numel():  # at_hand: on the CPU, read without a wait
        low, high = (int(one) for one in value.aminmax())
        if low < 0 or high >= known:
            raise KVPatchError(
                f"input_ids hold token {low if low < 0 else high}, but the model knows {known}: give ids of 0 to {known - 1}, "
                "from the model's own tokenizer."
            )
    return value


def refuse_pass(call: dict[str, Any], decoder: Any) -> None:
    """Raise KVPatchError, for `_begin_pass` and `begin_replay`, if a pass asks for what no budget allows.

    A pass must not attend to later tokens or to an encoder, nor return the keys and values of all tokens.
    """
    if call.get("return_shared_kv_states"):
        raise KVPatchError(
            "return_shared_kv_states=True: under a budget no pass has the keys and values of all tokens, so there are none to "
            "return. Leave it out, or the assistant_model that reads them."
        )
    if reads_both_ways(call, decoder):
        raise KVPatchError(
            "is_causal=False, of this pass or of the model's configuration: the text is read in both directions, and kvpatch "
            "serves causal decoders. Pass use_cache=False, or run such passes outside of the block."
        )
    if call.get("encoder_hidden_states") is not None:
        raise KVPatchError(
            "encoder_hidden_states: under a budget this model is a decoder that attends to its own text alone, and what an "
            "encoder read is not put on a budget. Leave them out, or run such passes outside of the block."
        )


def reads_both_ways(call: dict[str, Any], decoder: Any) -> bool:
    """Tell if a pass attends to later tokens too: is_causal=False as its argument or in the configuration."""
    return not (call.get("is_causal", True) and getattr(getattr(decoder, "config", None), "is_causal", True))


def check_padding_mask(mask: object, B: int) -> Tensor | None:
    """Return the caller's attention_mask [B,T] of a pass, or None; raise KVPatchError if it is no padding mask.

    `_check_batch` and `begin_replay` call it before the pass begins. Numbers are checked here only for a mask on the CPU
    (`at_hand`), since reading one from a GPU waits for it; there the host reads a prompt's mask later.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise KVPatchError(
            f"attention_mask must be a padding mask [B, tokens], not {shape}: a custom attention pattern cannot be kept "
            "under a budget. Give 1 for tokens and 0 for padding."
        )
    check_real("attention_mask", mask)
    if mask.shape[0] not in (1, B):
        raise KVPatchError(f"attention_mask has {mask.shape[0]} rows, but the input has {B}: give one for each.")
    if mask.dtype != torch.bool and at_hand(mask):
        passes.refuse_mask(mask)
    return mask


def refuse_gaps(mask_BT: Tensor | None, cache: EvictingCache, Q: int) -> None:
    """Raise KVPatchError, for `_check_batch`, if there is padding between a row's tokens, which recurrent layers would read.

    Decode steps (Q == 1) on a GPU are not checked: to read the mask would wait for the device.
    """
    stack = None if cache.settings.transparent else cache.settings.layer_numbers  # "full" refuses nothing that the model takes
    if mask_BT is None or stack is None or not stack.states or not (Q > 1 or at_hand(mask_BT)):
        return
    real_BT = mask_BT.bool()
    # true where a token stands at this column or before it, and at this column or after it
    begun_BT, goes_on_BT = real_BT.cumsum(-1) > 0, real_BT.flip(-1).cumsum(-1).flip(-1) > 0
    if bool((~real_BT & begun_BT & goes_on_BT).any()):
        raise KVPatchError(
            "attention_mask has padding between tokens of a row, which the layers of this hybrid that keep a state would read: "
            "pad whole texts on the left, or read what follows row by row."
        )


def unmask_empty_rows(mask_BT: Tensor | None) -> Tensor | None:
    """Mark rows of padding alone as tokens, in the mask of a pass that keeps no cache; a cache refuses rows without a token.

    `_check_batch` calls it. Returns a new mask. The unpatched model computes such rows too, and nobody reads their outputs.
    """
    return None if mask_BT is None else mask_BT.masked_fill(~mask_BT.bool().any(-1, keepdim=True), 1)


def drop_read(call: dict[str, Any], again: int, Q: int) -> Tensor:
    """Leave out of a pass that begins the first `again` of its Q columns, which its cache has read; return the tokens left.

    `_drop_seen_tokens` and `begin_pass` call it, as assisted decoding gives its first pass the whole text, whatever the cache
    holds. call: the decoder's arguments, of which token ids, embeddings and position_ids are cut.

    Raises:
        KVPatchError: an argument of the model's own has as many columns, or drafts are made from hidden states of all of them.
    """
    if not isinstance(call.get("output_hidden_states") or False, bool):  # of chosen layers, as multi-token prediction asks
        raise KVPatchError(
            f"Drafts (use_mtp) are made from the hidden states of the whole text, of which the cache has read {again} tokens: "
            f"leave {CACHE} out, or use_mtp."
        )
    for name, value in call.items():
        if not isinstance(value, Tensor) or name == "attention_mask" or Q not in value.shape[1:]:
            continue
        if name in ("input_ids", "inputs_embeds"):
            call[name] = value[:, again:]
        elif name.endswith(("position_ids", "token_type_ids")) and value.shape[-1] == Q:
            call[name] = value[..., again:]
        else:
            raise KVPatchError(
                f"Assisted decoding reads the whole text again, of which the cache has read {again} tokens, and {name} of this "
                f"model cannot be cut to what is new: leave {CACHE} out, or the assistant (prompt_lookup_num_tokens)."
            )
    tokens: Tensor = call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
    return tokens


def check_position_ids(given: object, B: int, Q: int, learned: bool) -> None:
    """Raise KVPatchError before a pass for position_ids of another shape or dtype, for `check_positions` and `begin_replay`.

    given: position_ids of any kind, or None. learned: they index the model's table of positions, so none may be negative.
    """
    if given is None:
        return
    wanted = f"give int64 positions of shape {[B, Q]} or {[1, Q]}, such as attention_mask.cumsum(-1) - 1, or leave them out."
    if not isinstance(given, Tensor):
        raise KVPatchError(f"position_ids is a {type(given).__name__}: {wanted}")
    check_real("position_ids", given)
    if given.ndim < 2 or given.shape[-1] != Q or given.shape[-2] not in (1, B):
        raise KVPatchError(f"position_ids has shape {list(given.shape)}, but the input has {[B, Q]}: {wanted}")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise KVPatchError(f"position_ids has dtype {given.dtype}: {wanted}")
    if learned and at_hand(given) and int(given.min()) < 0:
        raise KVPatchError(f"position_ids hold {int(given.min())}: give 0 or more, with clamp(min=0) where there is padding.")


def refuse_packed_rows(call: dict[str, Any]) -> None:
    """Raise KVPatchError before a pass with several texts in a row: its position_ids begin anew, or fall, within the row.

    `check_positions` calls it. transformers takes texts for packed only in passes without cache and mask. cu_seq_lens_q, if
    given, has the borders of the texts: more than two numbers are more than one text.
    """
    given, lengths = call.get("position_ids"), call.get("cu_seq_lens_q")
    if cache_of(call) is not None or call.get("attention_mask") is not None:
        return
    packed = isinstance(lengths, Tensor) and lengths.numel() > 2
    if packed or (isinstance(given, Tensor) and given.ndim == 2 and bool((given.diff(dim=-1) < 1).any())):
        raise KVPatchError(
            "position_ids begin anew within a row: several texts are packed into one, and a budget is of one text. Give each a "
            "row of its own, with attention_mask=0 for padding (TRL: packing=False and padding_free=False), or texts that "
            "may attend to each other, with position_ids that go on (TRL: packing_strategy='wrapped')."
        )


def refuse_switch(model: Any, prompt: int, new: int) -> None:
    """Raise KVPatchError before assisted decoding if the model would drop its cache on the way, to read the text anew.

    `_run_with_cache` calls it. Phi 3 drops it at the length where it takes other rotary frequencies (longrope): such models
    define how they prepare inputs. prompt, new: numbers of tokens in the prompt, and to be generated.
    """
    prepares_itself = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    limit = switch_length(model) if prepares_itself else None
    if limit is not None and limit < prompt + new:
        less = f"give max_new_tokens={limit - prompt} or less, or " if prompt < limit else ""
        raise KVPatchError(
            f"This model reads a text anew once it is longer than {limit} tokens, for it rotates them otherwise then; under "
            f"a budget drafts of assisted decoding cannot be taken back there: {less}leave the assistant "
            "(prompt_lookup_num_tokens) out."
        )


def check_path(path: object) -> Path:
    """Return the path of a file for `save_cache` and `load_cache`; raise KVPatchError if it cannot name a file."""
    goal = Path(file.check_path(path, "give one such as 'cache.safetensors'"))
    if goal.is_dir():
        raise KVPatchError(f"path={str(path)!r} is a folder: give the name of a file in it, such as 'cache.safetensors'.")
    if goal.exists() and not goal.is_file():
        raise KVPatchError(f"path={str(path)!r} is a device or a pipe: give the name of a file, such as 'cache.safetensors'.")
    return goal


def give_position_ids(call: dict[str, Any], cache: EvictingCache, Q: int, mask_BT: Tensor | None, state: PatchState) -> None:
    """Give a decoder the position_ids of Q new tokens per row, because its own would be equal for all rows.

    `check_positions` and `_begin_step` call it before a pass over joined caches, whose texts have different lengths. call: the
    decoder's arguments, which get "position_ids", also in place of 3-dimensional ones. Nothing changes if it takes none.

    Raises:
        KVPatchError: the caller gave other position_ids, or the decoder ignores them.
    """
    refuse("joined rows", state.list_features())
    if "position_ids" not in state.decoder_parameters:
        return
    given, next_BQ = call.get("position_ids"), cache.next_positions(Q)  # each row's own next positions
    real = None if mask_BT is None else mask_BT[:, -Q:].to(next_BQ.device).bool()
    if real is not None and real.shape == next_BQ.shape and Q > 1:  # a padded prompt
        next_BQ = (next_BQ[:, :1] + real.long().cumsum(-1) - 1).clamp(min=0)
    if given is None:
        call["position_ids"] = next_BQ
    elif given.ndim == 3:  # of several dimensions, as a model that reads images made them, wrongly: alike for all rows
        shifted = next_BQ if cache.ids.offsets_B1 is None else next_BQ + cache.ids.offsets_B1.to(next_BQ.device)
        counted = [next_BQ] * (len(given) - 3)  # those of the text alone may stand in front
        call["position_ids"] = torch.stack([*counted, *[shifted] * 3])
    elif given.shape[-1] == Q and given.shape[0] in (1, len(next_BQ)):  # the caller's: they must agree, but for padding
        wrong = given.to(next_BQ.device) != next_BQ
        wrong = wrong if real is None or real.shape != wrong.shape else wrong & real
        if not at_hand(next_BQ) or torch.compiler.is_compiling():  # asserted on the device, without a wait
            torch._assert_async(~wrong.any(), MISPLACED)
        elif bool(wrong.any()):
            row = int(wrong.any(-1).nonzero()[0])
            raise KVPatchError(f"{MISPLACED} Row {row} has seen {int(cache.next_positions()[row])} tokens.")
