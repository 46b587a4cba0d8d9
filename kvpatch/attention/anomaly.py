"""Checks of patched(..., strict=True): a NaN or infinite number raises, naming the layer, the tensor and the positions.

Every check reads back from the device, so a pass synchronizes with it in each layer.
"""

from __future__ import annotations

from torch import Tensor

from ..cache import invariants
from ..cache.state import TextState
from ..errors import InvalidError, KVPatchError
from .layer_call import Call

SHOWN = 4  # positions that an error lists


def check_inputs(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise KVPatchError if q [B,H*G,Q,D], k or v [B,H,Q,D] is not finite for a token that is not padding.

    `_attend_layer` calls it under strict=True in each layer of each pass, before the cache changes.
    """
    for name, tensor in (("queries", q), ("keys", k), ("values", v)):
        _refuse_bad(call, name, ~tensor.isfinite().all(-1), call.positions_BQ[:, None], "This layer's cache is as before.")


def check_outcome(call: Call, out_BHGQD: Tensor) -> None:
    """Raise KVPatchError if the layer's output, or a number that the policy stores with a key (`state_view`), is not finite.

    `_attend_layer` calls it under strict=True at the end of each layer of each pass.
    """
    bad_BHQ = ~out_BHGQD.isfinite().all(-1).flatten(1, 2)
    _refuse_bad(call, "probabilities (attention's output)", bad_BHQ, call.positions_BQ[:, None], "")
    positions_BHT = call.slots.view()[2]
    for name, tensor in call.slots.state_view().items():
        if tensor.is_floating_point():
            bad_BHT = ~tensor.isfinite().flatten(3).all(-1) if tensor.ndim > 3 else ~tensor.isfinite()
            _refuse_bad(call, f"scores ({name!r})", bad_BHT, positions_BHT, "")


def check_value(call: Call, value_BHT: Tensor) -> None:
    """Raise KVPatchError if the score's value() is NaN for a token although all state that it reads is finite.

    Under strict=True `Policy.eviction_keys` calls it, as `context.watch`, with the scores of an eviction.
    """
    given = [tensor for tensor in call.slots.state_view().values() if tensor.is_floating_point()]
    if all(bool(tensor.isfinite().all()) for tensor in given):  # else check_outcome names it
        _refuse_bad(call, "scores (of value())", value_BHT.isnan(), call.slots.view()[2], "")


def check_cache(cache: TextState) -> None:
    """Raise KVPatchError if the cache breaks its invariants: that is a defect of kvpatch.

    `_attend_layer` calls it under strict=True after the last layer of each pass. Changes nothing.
    """
    try:
        invariants.check_cache(cache)
    except InvalidError as error:
        raise KVPatchError(
            f"strict=True: after this pass the cache contradicts itself: {error}. That is a defect of kvpatch: start again "
            "with a new cache, and please report it with what was done to this one."
        ) from error


def _refuse_bad(call: Call, what: str, bad_BHT: Tensor, positions: Tensor, advice: str) -> None:
    """Raise KVPatchError if `bad_BHT` marks a token that is not padding (positions [B,1|H,T] >= 0); else do nothing.

    `check_inputs`, `check_outcome` and `check_value` call it for each tensor. The message names batch rows, positions and
    heads. T: tokens of the pass, or used slots. what: the numbers that were checked. advice: a sentence to add, or "".
    """
    bad_BHT = bad_BHT & (positions >= 0)
    if not bool(bad_BHT.any()):
        return
    batch_rows = enumerate(zip(positions.expand_as(bad_BHT), bad_BHT, strict=True))
    places = [(b, p) for b, (row, bad) in batch_rows for p in sorted(row[bad].unique().tolist())]
    first_places = ", ".join(f"row {b} position {p}" for b, p in places[:SHOWN])
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    heads = ", ".join(map(str, sorted(set(bad_BHT.nonzero()[:, 1].tolist()))))
    raise KVPatchError(
        f"strict=True: the {what} of layer {call.layer} ({call.settings.strict[call.layer] or 'the model itself'}) are NaN or "
        f"infinite at {first_places}{more}, head {heads}. {advice}{' ' if advice else ''}"
        "Look at this layer's weights and at the layers before it; a float16 model that overflows may run in bfloat16 "
        "(model.to(torch.bfloat16)). Leave strict out to go on: a NaN then counts as the lowest score."
    )
