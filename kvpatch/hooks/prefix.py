"""Reading a prefix: one pass of the decoder under the patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.prefix import Prefix
from ..errors import KVPatchError
from .state import PatchState
from .target import Target


def read_prefix(target: Target, state: PatchState, ids: Tensor | Sequence[int]) -> Prefix:
    """Return the prefix of these tokens, read if the patch does not have it.

    Raises:
        KVPatchError: these are no tokens of one text, or the patch is not in force.
    """
    tokens = _tokens(ids)
    known = state.prefixes.get(tokens)
    if known is not None:
        return known
    cache, ids_1N = state.new_cache(), torch.tensor([tokens], device=target.devices()[0])
    with torch.no_grad():
        target.decoder(input_ids=ids_1N, use_cache=True, **{state.cache_name: cache})
    return state.prefixes.add(Prefix(tokens, cache, state.identity()))


def _tokens(ids: object) -> tuple[int, ...]:
    listed = ids.tolist() if isinstance(ids, Tensor) else ids
    if isinstance(listed, Sequence) and len(listed) == 1 and isinstance(listed[0], Sequence):
        listed = listed[0]
    whole = isinstance(listed, Sequence) and all(isinstance(one, int) and not isinstance(one, bool) for one in listed)
    if not whole or not listed:
        found = f"a tensor {list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise KVPatchError(f"A prefix is one text: give its token ids, int64 [N] or [1, N], or a list; this is {found}.")
    return tuple(listed)  # type: ignore[arg-type]
