"""Reading a prefix: one pass of the decoder under the patch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..arch.upstream import CACHE
from ..cache.prefix import Prefix
from ..errors import KVPatchError
from ..policies.served import refuse
from .identity import is_read_alike, stamp_model
from .offsets import clear_offsets
from .state import PatchState
from .target import Target


def read_prefix(target: Target, state: PatchState, ids: Tensor | Sequence[int]) -> Prefix:
    """Return the prefix of these tokens, whose cache other texts start from, for `Patch.prefix`; read it if new or stale.

    Raises:
        KVPatchError: these are no tokens of one text, or the patch is not in force.
    """
    refuse("prefix", state.list_features())
    tokens = _read_ids(ids)
    _refuse_images(target, tokens)
    _refuse_invoked(target, tokens)
    known = state.prefixes.get(tokens)  # read anew there if it is stale
    return state.prefixes.add(_read_prefix(target, state, tokens)) if known is None else known


def renew_prefix(target: Target, owner: weakref.ref[PatchState], prefix: Prefix) -> Prefix:
    """Return a prefix as it is, or read anew if the model or its mode (train, eval) has changed since it was read.

    `Prefixes._keep_fresh` calls it as a prefix is looked up, for a text that begins with it. owner: the patch's state, weakly,
    since it owns the prefixes.
    """
    state = owner()
    assert state is not None
    same = is_read_alike(target.decoder, prefix) and prefix.training == target.decoder.training
    return prefix if same else _read_prefix(target, state, prefix.ids)


def _read_prefix(target: Target, state: PatchState, tokens: tuple[int, ...]) -> Prefix:
    """Read tokens into a new cache by one pass of the patched decoder; return it as a Prefix.

    `read_prefix` calls it for a new prefix, `renew_prefix` for a stale one.
    """
    cache, ids_1N = state.new_cache(), torch.tensor([tokens], device=target.devices()[0])
    with torch.no_grad():
        target.decoder(input_ids=ids_1N, use_cache=True, **{state.cache_name: cache})
    clear_offsets(target.outer, cache)
    return Prefix(tokens, cache, target.decoder.training)


def _refuse_images(target: Target, tokens: tuple[int, ...]) -> None:
    """Raise KVPatchError, for `read_prefix`, for a text with images or sounds: a prefix is read from tokens alone."""
    kinds = target.list_placeholders()
    found = next((token for token in tokens if token in kinds), None)
    if found is not None:
        given = "pixel_values" if kinds[found] == "an image" else "input_features"
        raise KVPatchError(
            f"This text holds token {found}, which stands for {kinds[found]}, but a prefix is read from tokens alone. Read it "
            f"with {kinds[found]}: cache = patch.new_cache(), model(input_ids, {given}=..., {CACHE}=cache), and give each "
            "question a cache.clone()."
        )


def _refuse_invoked(target: Target, tokens: tuple[int, ...]) -> None:
    """Raise KVPatchError, for `read_prefix`, if a text has the tokens from which an aLoRA adapter of PEFT acts.

    Only generate() looks for these tokens, so that a prefix would be read without the adapter.
    """
    acting = stamp_model(target.decoder).adapters[0].split(" + ")
    for model in target.generators:
        for name, config in getattr(model, "peft_config", {}).items():
            calls = list(getattr(config, "alora_invocation_tokens", None) or ())
            starts = range(len(tokens) - len(calls) + 1) if calls and name in acting else ()
            at = next((start for start in starts if list(tokens[start : start + len(calls)]) == calls), None)
            if at is not None:
                raise KVPatchError(
                    f"This text invokes adapter {name!r} by its tokens {calls} at {at}, from where it acts, but a prefix is "
                    f"read without it: take patch.prefix(ids[:{at}]), and give generate() the whole text."
                )


def _read_ids(ids: object) -> tuple[int, ...]:
    """Return the token ids of one text, which `read_prefix` got as a tensor or list; raise KVPatchError for anything else."""
    listed = ids.tolist() if isinstance(ids, Tensor) else ids
    if isinstance(listed, Sequence) and len(listed) == 1 and isinstance(listed[0], Sequence):
        listed = listed[0]
    whole = isinstance(listed, Sequence) and all(isinstance(one, int) and not isinstance(one, bool) for one in listed)
    if not whole or not listed:
        found = f"a tensor {list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise KVPatchError(f"A prefix is one text: give its token ids, int64 [N] or [1, N], or a list; this is {found}.")
    return tuple(listed)  # type: ignore[arg-type]
