"""Caches of several texts made one: what a loop needs that reads new prompts while other rows are being continued.

The rows of such a cache stand at different places of their texts. What a text's length decides is per row here as it is in a
padded batch (positions, budgets, protected sizes) and so is what its number of decode steps decides; what is moved is what
each head holds, into buffers of the sizes that the end of a prompt would have given it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import KVPatchError
from .policies.moment import Limits
from .ragged import Extents, wasteful
from .slots import SLACK, SlotLayer, slack
from .storage import settings_of

if TYPE_CHECKING:
    from .cache import EvictingCache

MISPLACED = (
    "position_ids do not go on from what each row of this concatenated cache has seen: leave them out, or pass "
    "cache.next_positions()."
)


def join(caches: Sequence[EvictingCache], consume: bool) -> EvictingCache:
    """See EvictingCache.concatenate."""
    _check(caches)
    first, seen = caches[0], [cache.seen_B for cache in caches if cache.seen_B is not None]
    new = type(first)(
        first.policy, first.budget, seed=first.seed, block=first.block, renumbered=first.renumbered, backend=first.choice.wanted
    )
    new.make_table, new.joined = first.make_table, True
    new.seen_B = torch.cat([seen_B.to(seen[0].device) for seen_B in seen])
    new.turns, new.turn_from_B = max(cache.turns for cache in caches), sum((cache.turn_from_B for cache in caches), [])
    new.shared = _shared(caches)
    _set_steps(new, caches)
    columns, limits = int(new.seen_B.max()), _Limits()
    for index, layer in enumerate(new.layers):
        _join_layer(layer, [cache.layers[index] for cache in caches], limits)
        layer.seen = columns
        if consume:
            for cache in caches:
                cache.layers[index].reset()
    for cache in caches if consume else ():
        cache.reset()
    new.deck_due = True
    return new


# ---- positions of what follows ----


def place(call: dict[str, Any], cache: EvictingCache, Q: int, mask_BT: Tensor | None, known: tuple[str, ...]) -> None:
    """Give a decoder the position_ids of Q new tokens per row, for its own are the same for all rows; `call` are its
    arguments, of which it knows those by the names `known`.

    Raises:
        KVPatchError: it was given others, or takes none and needs some.
    """
    geometry = cache.layers[0].geometry
    if "position_ids" not in known:
        if geometry is None or geometry.slopes_HG is None:
            raise KVPatchError(
                "Rows of a concatenated cache are at different places of their texts, which this model's decoder cannot be "
                "told, for it takes no position_ids: continue the caches one by one."
            )
        return
    given, wanted = call.get("position_ids"), cache.next_positions(Q)
    real = None if mask_BT is None else mask_BT[:, -Q:].to(wanted.device).bool()
    if real is not None and real.shape == wanted.shape and Q > 1:  # a padded prompt
        wanted = (wanted[:, :1] + real.long().cumsum(-1) - 1).clamp(min=0)
    if given is None:
        call["position_ids"] = wanted
    elif given.shape[-1] == Q and given.shape[0] in (1, len(wanted)):
        wrong = given.to(wanted.device) != wanted
        wrong = wrong if real is None or real.shape != wrong.shape else wrong & real
        if wanted.device.type != "cpu" or torch.compiler.is_compiling():  # asserted on the device, without waiting for it
            torch._assert_async(~wrong.any(), MISPLACED)
        elif bool(wrong.any()):
            row = int(wrong.any(-1).nonzero()[0])
            raise KVPatchError(f"{MISPLACED} Row {row} has seen {int(cache.next_positions()[row])} tokens.")


# ---- what can be joined ----


def _check(caches: Sequence[EvictingCache]) -> None:
    from .cache import EvictingCache

    if not caches:
        raise KVPatchError("EvictingCache.concatenate was given no cache: give a list with at least one.")
    if len({id(cache) for cache in caches}) < len(caches):
        raise KVPatchError("A cache is in the list twice: give its clone(), or repeat its rows with batch_repeat_interleave().")
    for index, cache in enumerate(caches):
        if not isinstance(cache, EvictingCache):
            raise KVPatchError(
                f"Cache {index} is a {type(cache).__name__}: only caches that the patched model filled can be concatenated."
            )
        cache.catch_up()
        _check_one(index, cache)
        _check_same(index, caches[0], cache)


def _check_one(index: int, cache: EvictingCache) -> None:
    if cache.unfinished or cache.turn_open:
        raise KVPatchError(f"Cache {index} is in the middle of a prompt: read it to its end, then concatenate.")
    if not cache.turns or cache.seen_B is None:
        raise KVPatchError(f"Cache {index} has read no prompt: run one through it first.")
    if cache.room is not None:
        raise KVPatchError(
            f"Cache {index} was made with room={cache.room} (or by a generate() that compiles), for buffers that never change: "
            "concatenating makes new ones. Make it without room."
        )
    if cache.by_columns:
        raise KVPatchError(
            f"Cache {index} read a padded batch without position_ids, so that its positions count the padding, which is gone "
            "here: pass position_ids (attention_mask.cumsum(-1) - 1, as generate() does), or read the prompts unpadded."
        )


def _check_same(index: int, first: EvictingCache, cache: EvictingCache) -> None:
    mine, theirs = settings_of(cache), settings_of(first)
    differ = [name for name in theirs if mine[name] != theirs[name]]
    shapes = [[_shape(layer) for layer in one.layers] for one in (first, cache)]
    for words, old, new in zip(("KV heads", "head size", "dtype", "device"), *(zip(*one, strict=True) for one in shapes), strict=True):
        if old != new:
            differ.append(words)
            theirs, mine = {**theirs, words: old[0]}, {**mine, words: new[0]}
    if differ:
        name = differ[0]
        raise KVPatchError(
            f"Cache {index} was made under another patch or model than cache 0: {name} is {mine[name]!r} there and "
            f"{theirs[name]!r} here. Rows of one batch share all settings."
        )


def _shape(layer: SlotLayer) -> tuple[int, tuple[int, int], torch.dtype, torch.device]:
    assert layer.keys is not None and layer.values is not None
    return layer.positions.shape[1], (layer.keys.shape[-1], layer.values.shape[-1]), layer.dtype, layer.positions.device


# ---- what rows have beside their slots ----


def _set_steps(new: EvictingCache, caches: Sequence[EvictingCache]) -> None:
    """Decode steps of each row since its prompt, where a score's temperature asks."""
    assert new.seen_B is not None
    score, steps = new.policy.score, []
    for cache in caches:
        assert cache.seen_B is not None
        lag_B = torch.zeros(len(cache.seen_B), dtype=torch.float64) if cache.lag_B is None else cache.lag_B.cpu()
        steps.append(cache.steps - lag_B)
    steps_B = torch.cat(steps)
    new.steps = int(steps_B.max())
    if score is not None and score.temperature(0, 8) != score.temperature(8, 8) and bool((steps_B < new.steps).any()):
        new.lag_B = (new.steps - steps_B).to(new.seen_B.device)


def _shared(caches: Sequence[EvictingCache]) -> Tensor | None:
    """The sums that layers share, by position, as wide as the longest text's."""
    sums = [cache.shared for cache in caches if cache.shared is not None]
    if not sums:
        return None
    width = max(one.shape[-1] for one in sums)
    return torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[-1])) for one in sums])


class _Limits:
    """Joined protected sizes: layers that shared theirs go on sharing them."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], Limits] = {}

    def of(self, parts: list[Limits]) -> Limits:
        key = tuple(map(id, parts))
        if key not in self.known:
            self.known[key] = Limits.cat(parts)
        return self.known[key]


# ---- one layer ----


def _join_layer(new: SlotLayer, parts: list[SlotLayer], limits: _Limits) -> None:
    first = parts[0]
    new.dtype, new.device, new.is_initialized = first.dtype, first.device, True
    new.evicting, new.sliding, new.geometry = first.evicting, first.sliding, first.geometry
    new.output_rows, new.record_past = first.output_rows, any(part.record_past for part in parts)
    if first.limits is not None:
        new.limits = limits.of([part.limits for part in parts if part.limits is not None])
    if all(part.keep_BH1 is not None for part in parts):
        new.keep_BH1 = torch.cat([part.keep_BH1 for part in parts if part.keep_BH1 is not None])
    if any(part.mass_BH is not None for part in parts):  # None: all of that prompt was kept
        of_all = [torch.ones(part.positions.shape[:2], device=part.positions.device) for part in parts]
        new.mass_BH = torch.cat([one if part.mass_BH is None else part.mass_BH for part, one in zip(parts, of_all, strict=True)])
    counts = [int(n) for part in parts for n in (part.positions[:, :, : part.used] >= 0).sum(-1).flatten().tolist()]
    with torch.no_grad():
        _lay_out(new, parts, counts)
        _fill(new, parts)
    _open(new, counts)


def _needs(layer: SlotLayer, counts: list[int]) -> tuple[list[int], int]:
    """Slots that each head needs, and what it holds while decoding above what it holds now (the most of all heads)."""
    if not layer.evicting:
        return counts, 0
    assert layer.keep_BH1 is not None
    keeps = layer.keep_BH1.flatten().tolist()
    return [keep + 1 for keep in keeps], max(keep - count for keep, count in zip(keeps, counts, strict=True))


def _lay_out(new: SlotLayer, parts: list[SlotLayer], counts: list[int]) -> None:
    """Empty buffers for heads that hold `counts` tokens: ragged where dense ones would waste too much."""
    like, (needs, new.filling) = parts[0], _needs(new, counts)
    H, B = like.positions.shape[1], len(counts) // like.positions.shape[1]
    assert like.keys is not None and like.values is not None
    if wasteful(needs):
        new.slack = 0 if new.evicting else slack(max(counts))
        capacities = [need + new.slack for need in needs]
        new.extents = Extents(capacities, needs if new.evicting else counts, like.positions.device)
        C, rows = new.extents.width, (new.extents.rows,)
    else:
        held = max(counts)
        C = max(needs) if new.evicting else held + held // SLACK + slack(held)
        rows = (B, H, C)  # type: ignore[assignment]
    new.keys, new.values = (t.new_zeros(*rows, t.shape[-1]) for t in (like.keys, like.values))
    new.positions = like.positions.new_full((B, H, C), -1)
    for part in parts:
        for name, t in part.state.items():
            if name not in new.state:
                new.state[name] = t.new_zeros(B, H, C, *t.shape[3:])


def _fill(new: SlotLayer, parts: list[SlotLayer]) -> None:
    """Move what each head holds to the front of its stretch, in text order."""
    assert new.keys is not None and new.values is not None
    heads, C = 0, new.positions.shape[2]
    for part in parts:
        assert part.keys is not None and part.values is not None
        positions = part.positions[:, :, : part.used].flatten(0, 1)
        count = (positions >= 0).sum(-1)
        index = positions.masked_fill(positions < 0, torch.iinfo(positions.dtype).max).argsort(-1)
        head, column = (torch.arange(index.shape[1], device=index.device) < count[:, None]).nonzero(as_tuple=True)
        taken = index[head, column]
        for mine, theirs in ((new.keys, part.keys), (new.values, part.values)):
            rows = theirs.reshape(-1, theirs.shape[-1])[_begin(part)[head] + taken]
            mine.view(-1, mine.shape[-1])[_begin(new)[heads + head] + column] = rows.detach()
        new.positions.view(-1, C)[heads + head, column] = positions[head, taken]
        for name, tensor in part.state.items():
            new.state[name].flatten(0, 1)[heads + head, column] = tensor.flatten(0, 1)[head, taken]
        heads += len(positions)


def _begin(layer: SlotLayer) -> Tensor:
    """The row of keys and values, flattened, at which each head's slots begin [B*H]."""
    if layer.extents is not None:
        return layer.extents.begin_N
    assert layer.keys is not None
    return torch.arange(layer.positions.shape[:2].numel(), device=layer.positions.device) * layer.keys.shape[2]


def _open(new: SlotLayer, counts: list[int]) -> None:
    """Where the next token goes."""
    C, held = new.positions.shape[2], max(counts)
    if new.evicting or new.extents is not None:
        new.used, new.free_BH = C, torch.tensor(counts, device=new.positions.device).view(new.positions.shape[:2])
        new.holes = new.extents is not None or min(counts) + 1 < C
    else:
        new.used, new.holes = held, min(counts) < held
    new.contiguous, new.floor = False, new.used
