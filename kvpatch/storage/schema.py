"""Schema of a saved cache, checked against the patch that loads it before any tensor is read.

It covers names, types and ranges in the description, and names, shapes and dtypes of the tensors, which follow from policy,
model and description. contents.py checks the values of the tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..backends.entries import FULL, Rounded, codecs
from ..cache import invariants
from ..cache.cache import EvictingCache
from ..cache.modes import Appending, Evicting, Filling, Growing, Mode, Moving, Reading
from ..cache.tensors import FLOATS, HEAD_TENSORS
from ..policies.context import OWN_STATE, SIZES, NewTokens, accumulator
from .header import Entry, are_counts
from .kinds import Description, Field, check_fields

HISTORY = (
    Field.of_count("steps"),
    Field.of_count("turns"),
    Field("turn_from_B", are_counts, "turn_from_B is {value:.60}"),  # the next prompt sets it anew
    Field.of_flag("joined"),
    Field.of_flag("padded"),
    Field.of_flag("by_columns"),
    Field.of_count("edited", optional=True),
)
ROWS = {  # tensors of the cache as a whole, batch first: the name in files, and the attribute of the cache
    "seen_B": "seen_B",  # tokens of each row
    "gaps_B": "rows.gaps_B",  # padding between a row's tokens
    "shared": "shared_score",  # the score that all layers share
    "shortfall_B": "counters.steps_behind_B",  # decode steps that a row is behind
    "span_B": "counters.temperature_steps_B",  # over which a row's temperature changes
}
TENSORS = ("positions", *(one.name for one in HEAD_TENSORS))
DTYPES = {str(dtype): dtype for dtype in FLOATS}
ATTRIBUTES = {  # numbers of a layer: the name in files, and the attribute of the layer
    "used": "columns_used",
    "seen": "columns_read",
    "holes": "may_have_empty",
    "contiguous": "in_text_order",
    "floor": "first_croppable",
    "sliding": "sliding",
}
LAYER = (*map(Field.of_count, ("used", "seen", "floor")), *map(Field.of_flag, ("holes", "contiguous")), Field("sliding"))
BESIDE = (Field("mode"), Field("dtype", list(DTYPES).__contains__, "dtype is {value:.40}"))
SLOTS = (Field("head_offsets"), Field("limits"))


class LayerShape(NamedTuple):
    """Shape of a model's layer.

    Attributes:
        heads: KV heads H.
        key: head size of the keys.
        value: head size of the values.
        group: G, query heads per KV head; None if the configuration does not tell.
        sliding: sliding window in tokens, or None.
        latent: whether a value is a part of its key.
    """

    heads: int
    key: int
    value: int
    group: int | None
    sliding: int | None
    latent: bool = False


def check_header(about: Description, entries: dict[str, Entry], cache: EvictingCache, shapes: list[LayerShape]) -> None:
    """Raise InvalidError, before tensors are read, unless a file's description and header fit the empty `cache`.

    `load` calls it through `_read_file`. about, entries: the file's description and header. Each check takes its tensors'
    entries out of `left`, a copy of `entries`; what is left in the end does not belong there. Tensors that are first looked
    for (`in left`) may be missing.
    """
    left = dict(entries)
    B = _take_entry(left, "seen_B", (torch.int64,), (None,)).shape[0]  # seen_B: tokens that each row has read
    history, layers = check_fields("its cache", about["cache"], HISTORY), about["layers"]
    invariants.must(isinstance(layers, list) and len(layers) == len(cache.layers), f"it has not {len(cache.layers)} layers")
    for index, described in enumerate(layers):
        _Layer(cache, index, B, history["turns"] > 0, shapes[index]).check(described, left)  # turns: prompts read so far
    if cache.settings.by_columns and "gaps_B" in left:  # padding between a row's tokens, which positions count
        _take_entry(left, "gaps_B", (torch.int64,), (B,))
    for name in ("shortfall_B", "span_B"):
        if history["joined"] and name in left:
            _take_entry(left, name, (torch.float64,), (B,))
    if cache.settings.policy.needs.across_layers and history["turns"] and cache.settings.acts:  # a score of all layers
        _take_entry(left, "shared", FLOATS[:2], (B, shapes[0].heads, None))
    if "ids" in left:  # files of earlier versions have none
        _take_entry(left, "ids", (torch.int64,), (B, layers[0]["seen"]))
    _check_states(left, cache, B)
    invariants.must(not left, f"it holds {', '.join(sorted(left)):.80}, which nothing here would use")


def _check_states(left: dict[str, Entry], cache: EvictingCache, B: int) -> None:
    """Check the header's entries for a hybrid's recurrent states, for `check_header`, and remove them from `left`.

    Any size is allowed but for the batch B. A model without such states has nothing to check.
    """
    for number, count in () if cache.settings.layer_numbers is None else cache.settings.layer_numbers.states:
        names = [f"states.{number}.{kind}.{key}" for kind in ("conv_states", "recurrent_states") for key in range(count)]
        held = [name for name in names if name in left]
        invariants.must(held, f"it holds no state of layer {number}")
        for name in held:
            _take_entry(left, name, FLOATS, (B, *[None] * (len(left[name].shape) - 1)))


class _Layer:
    """Check of one layer. has_prompt: the cache has read a prompt to its end. on_budget: it has, and the policy evicts."""

    def __init__(self, cache: EvictingCache, index: int, B: int, has_prompt: bool, shape: LayerShape) -> None:
        """Gather what the layer `index` of the empty `cache` may have in a file of B rows, for `check_header`."""
        self.cache, self.index, self.B, self.has_prompt = cache, index, B, has_prompt
        self.H, self.sizes, self.group, self.sliding = shape.heads, (shape.key, shape.value), shape.group, shape.sliding
        self.latent = shape.latent
        self.policy, self.where = cache.settings.policies[index], f"layer {index}"
        self.on_budget = cache.settings.evicts[index] and has_prompt  # a prompt has ended, and the layer may evict

    def check(self, described: object, left: dict[str, Entry]) -> None:
        """Check the layer's description and its tensors' header entries, for `check_header`, before tensors are read.

        left: the entries that no layer has claimed so far, by name. Those of this layer are removed from it, and nothing else
        changes. The file's `mode` says how the layer's decode steps store and evict. Raises InvalidError at the first that is
        wrong.
        """
        mode = self._find_mode(described)
        fields = (*LAYER, *BESIDE, *map(Field.of_count, mode.saved), *SLOTS)
        about = check_fields(self.where, described, fields, where=f"{self.where}: ")
        # counts of columns: C are allocated; `used` are in use, of which `floor` at the front cannot be cropped
        sliding, used = about["sliding"], about["used"]
        invariants.must(sliding == (self.sliding if self.has_prompt else None), f"{self.where}: sliding is {sliding!r:.40}")
        dtype = DTYPES[about["dtype"]]  # of keys and values
        C = self._take_tensor(left, "positions", (torch.int64,), (self.B, self.H, None)).shape[2]
        invariants.must(0 <= used <= C and about["floor"] <= used, f"{self.where}: {used} of {C} slots are used")
        shape = self._find_shape(about["head_offsets"], C, mode.fills_free_slots and about["holes"])
        # keys and values: [...,D] in the model's dtype, or bytes if they are rounded; with them the centre of the keys
        bits = FULL if mode is Reading else self.cache.settings.bits  # a prompt that is still being read is not rounded
        kinds = zip(("keys", "values"), self.sizes, codecs(bits, *self.sizes, dtype, self.latent), strict=True)
        for name, size, codec in kinds:
            if codec.latent:  # values that are a part of their keys
                continue
            stored, width = (torch.uint8, codec.width) if isinstance(codec, Rounded) else (dtype, size)
            self._take_tensor(left, name, (stored,), (*shape, width))
        if bits != FULL:
            self._take_tensor(left, "centre_BH1D", (dtype,), (self.B, self.H, 1, self.sizes[0]))
        if mode.fills_free_slots:
            self._take_tensor(left, "free_BH", (torch.int64,), (self.B, self.H))
        for kind in HEAD_TENSORS:  # with a number for each head, such as its budget; a layer must or may have it
            may = f"{self.index}.{kind.name}" in left and kind.may_be(self.cache.settings, self.index, self.on_budget)
            if may or kind.must_be(self.on_budget):
                self._take_tensor(left, kind.name, kind.dtypes, kind.shape(self.B, self.H))
        self._check_limits(about["limits"])
        self._check_state(left, dtype, C, mode.evicts)

    def _find_mode(self, described: object) -> type[Mode]:
        """Return the mode (how decode steps store and evict) that a file names, for `check`. InvalidError if it cannot be so.

        Before a prompt's end it is Reading. Later decode steps evict (Filling until the budget is reached, then Evicting, or
        Moving if heads' budgets follow the text), or they do not: Appending, and Growing in slots.
        """
        name = described.get("mode") if isinstance(described, dict) else None
        may: tuple[type[Mode], ...] = (Reading,)
        if self.has_prompt:
            steps: tuple[type[Mode], ...] = (Moving,) if self.cache.settings.rules[self.index].moves else (Filling, Evicting)
            may = steps if self.on_budget and self.policy.schedule != "prompt" else (Appending, Growing)
        found = [mode for mode in may if mode.name == name]
        invariants.must(found, f"{self.where}: mode is {name!r:.40}, which is none of {[mode.name for mode in may]}")
        return found[0]

    def _take_tensor(self, left: dict[str, Entry], name: str, dtypes: Any, shape: tuple[int | None, ...]) -> Entry:
        return _take_entry(left, f"{self.index}.{name}", dtypes, shape)

    def _find_shape(self, head_offsets: object, C: int, may_be_ragged: bool) -> tuple[int, ...]:
        """Return, for `check`, the shape of stored keys and values without the last axis: [B,H,C], or [F] if heads are ragged.

        F: entries of all heads end to end. may_be_ragged: heads may have different lengths in this mode. head_offsets: None, or
        how many slots each head has and how many are filled, as a file to load says. InvalidError if these do not fit the
        layer.
        """
        shape: tuple[int, ...] = (self.B, self.H, C)
        if head_offsets is not None:
            pair = isinstance(head_offsets, list) and len(head_offsets) == 2 and all(are_counts(part) for part in head_offsets)
            invariants.must(pair and may_be_ragged, f"{self.where}: head_offsets are {head_offsets!r:.60}")
            assert isinstance(head_offsets, list)
            capacities, filled = head_offsets
            valid = len(capacities) == len(filled) == self.B * self.H and max(capacities) == C and min(capacities) > 0
            valid = valid and all(used <= slots for used, slots in zip(filled, capacities, strict=True))
            slots = f"{self.B * self.H} heads of up to {C} slots"
            invariants.must(valid, f"{self.where}: head_offsets {head_offsets!r:.60} are not those of {slots}")
            shape = (sum(capacities),)
        return shape

    def _check_limits(self, limits: object) -> None:
        """Raise InvalidError, for `check`, unless `limits` (protected tokens) are counts by row, or None if nothing evicts."""
        if not self.on_budget:
            invariants.must(limits is None, f"{self.where}: limits of a layer that the policy does not act on")
            return
        valid = isinstance(limits, list) and len(limits) == self.B
        valid = valid and all(are_counts(row) and len(row) == len(SIZES) for row in limits)  # type: ignore[attr-defined]
        invariants.must(valid, f"{self.where}: limits are {limits!r:.60}")

    def _check_state(self, left: dict[str, Entry], dtype: torch.dtype, C: int, evicting: bool) -> None:
        """Check, for `check`, the header entries of what the policy stores for each key, such as sums; remove them from `left`.

        evicting: later steps evict, so that the file must have all states and notes (what the policy remembers of the layer).
        """
        shape, wide = (self.B, self.H, C), (accumulator(dtype),)  # `wide`: the dtype of scores
        if not self.cache.settings.evicts[self.index]:
            return
        # sums of attention probabilities
        for name in self.policy.needs.statistics:
            self._take_tensor(left, f"state.{name}", wide, shape)
        # numbers that the policy computes when a token enters the cache: a token of zeros shows their names and shapes
        key, value = (torch.zeros(1, self.H, 1, size, dtype=dtype, device="cpu") for size in self.sizes)
        position = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        entry = self.policy.entry(NewTokens(key, value, position, self.group or 1, self.index, self.cache.settings.seed))
        for name, tensor in entry.items():
            rest = tensor.shape[3:] if self.group else (None,) * (tensor.ndim - 3)  # it may be of each query head
            self._take_tensor(left, f"state.{name}", (tensor.dtype,), (*shape, *rest))
        # needs (what a score reads): states that are dropped where no later step evicts (not `lasts`), and notes
        for need in self.policy.needs:
            for name in () if need.lasts else need.states:
                if evicting or f"{self.index}.state.{name}" in left:
                    self._take_tensor(left, f"state.{name}", wide, shape)
            sizes = {"B": self.B, "H": self.H, "G": self.group or 1, "D": self.sizes[0]}
            for name, note_shape in need.saved(sizes).items() if evicting else ():
                kinds = (torch.int64,) if name.startswith(("positions", "columns")) else (dtype, *wide)
                self._take_tensor(left, f"{need.name}.{name}", kinds, note_shape)
        for name, may, kind, must, _ in OWN_STATE:  # state that options ask for, such as `protect=`; kind: its dtype
            if may(self.policy) and (must or f"{self.index}.state.{name}" in left):
                self._take_tensor(left, f"state.{name}", wide if kind is None else (kind,), shape)


def _take_entry(left: dict[str, Entry], name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> Entry:
    """Take a tensor's header entry out of `left`; InvalidError unless it has one of `dtypes` and this shape (None: any).

    `check_header` and `_Layer` call it for each tensor that they check.
    """
    invariants.must(name in left, f"it holds no {name}")
    entry = left.pop(name)
    fits = len(entry.shape) == len(shape) and all(want in (None, size) for want, size in zip(shape, entry.shape, strict=True))
    message = f"{name} is {entry.dtype} {list(entry.shape)} where {' or '.join(map(str, dtypes))} {list(shape)} belongs"
    invariants.must(fits and entry.dtype in dtypes, message.replace("None", "n"))
    return entry
