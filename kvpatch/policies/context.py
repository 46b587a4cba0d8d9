"""Inputs of scores, scopes and selection: the eviction context, its protected sizes, and a block of attention rows.

Dimension key: see kvpatch/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .batched import Batched
from .numbers import on_device
from .parallel import WHOLE, Parallel
from .windows import find_end, find_oldest


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and statistics for a model of `dtype`: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


class OwnState(NamedTuple):
    """A tensor of a layer's state [B,H,T] that comes from no score or need.

    Attributes:
        name: its key in the state.
        may: may(policy) tells whether layers under this policy may have it.
        dtype: its dtype; None for that of scores.
        must: whether every layer that may have it does.
        blank: whether only marked tokens have a number, so that a new token, whose slot may hold an evicted one's, writes zero.
    """

    name: str
    may: Callable[[Any], bool]
    dtype: torch.dtype | None = None
    must: bool = True
    blank: bool = False


OWN_STATE = (
    OwnState("norm", lambda policy: policy.keeps_norms),
    OwnState("protect", lambda policy: policy.scope.protect is not None, torch.bool, must=False),
    OwnState("quota", lambda policy: policy.scope.quota is not None, torch.int64),
    OwnState("span", lambda policy: policy.scope.quota is not None, torch.int64, blank=True),
    OwnState("unseen", lambda policy: policy.needs.statistics, must=False, blank=True),  # since an edit
)


def not_weighed(known: Tensor, out: Tensor | None) -> Tensor:
    """Raise KVPatchError, as `norms` of a context whose policy's selection has not declared that it weighs values."""
    raise KVPatchError("context.norms() is there if the selection's class says weighs_values = True.")


def at_hand(tensor: Tensor) -> bool:
    """Tell whether the tensor is on the CPU, where its values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


View = TypeVar("View", covariant=True)


class Viewed(Protocol[View]):
    """A need, as far as a context knows it."""

    def view(self, context: EvictionContext) -> View:
        """Return what a score or scope reads of it."""


@dataclass
class EvictionContext:
    """State of one layer when tokens are evicted: at the end of a prompt, a block, or a decode step.

    Tensors [B,H,T] have one entry per slot, in the order of the cached keys; at the end of a prompt that is text order.
    Several layers may be stacked along B.

    Attributes:
        layer: index of the layer; int64 [B,1,1] for stacked layers.
        seed: seed of the policy's random numbers.
        positions_BHT: int64, the token's position in the text; -1 in an empty slot.
        newest_B11: int64, position of the newest token, so that `newest_B11 - positions_BHT` is a token's age.
        recent_B11: int64, position above which tokens belong to the protected recent ones.
        state: the policy's statistics and entries by name, [B,H,T] or [B,H,T,n].
        limits: protected sizes of each batch row.
        group: G, query heads per KV head.
        sliding: window of the layer in tokens, a Chunk if it begins anew instead of sliding; None without one.
        empty: whether some slots may be empty.
        aligned: whether heads with equal scores hold the same tokens in the same slots.
        parallel: the share of this process in the layer's heads.
        keep_BH1: int64, tokens that each head may hold; None where the selection needs no count.
        lost_BH1: scores of the tokens that each head has evicted, as they were then, added up; None where nothing asks for it.
        value: values of the score [B,H,T], once the eviction keys were asked for.
        norms: norms(known, out) returns the norms of the projected values [B,H,T]. Entries where the mask `known` or `out`
            is True are not needed and may hold anything.
        needs: what score and scope need (policies/needs), whose views they may ask for.
        layer_read: the layer that these views read.
        watch: gets the values of the score [B,H,T], at the end of a prompt and under strict=True; else None.
    """

    layer: int | Tensor
    seed: int
    positions_BHT: Tensor
    newest_B11: Tensor
    recent_B11: Tensor
    state: dict[str, Tensor]
    limits: Limits
    group: int
    sliding: int | None
    empty: bool
    aligned: bool = True
    parallel: Parallel = WHOLE
    keep_BH1: Tensor | None = None
    lost_BH1: Tensor | None = None
    value: Tensor = field(init=False, repr=False)
    norms: Callable[[Tensor, Tensor | None], Tensor] = field(default=not_weighed, repr=False)
    needs: Sequence[Viewed[Any]] = ()
    layer_read: Any = field(default=None, repr=False)
    watch: Callable[[Tensor], None] | None = None
    _rows_seen: Tensor | None = field(default=None, repr=False)
    _mean: Tensor | None = field(default=None, repr=False)

    def view(self, kind: type[Viewed[View]]) -> View:
        """Return what a need (what a score or scope declares that it reads) gives, such as keys and values for view(Held).

        `Score.value` and `Scope.mask` call it at an eviction. `needs`: those of the policy.

        Raises:
            KVPatchError: neither the score nor the scope declares it.
        """
        for need in self.needs:
            if isinstance(need, kind):
                return need.view(self)
        name = kind.__name__
        raise KVPatchError(f"context.view({name}) is there if the class of the score or scope says needs = ({name}(...),).")

    @property
    def rows_seen(self) -> Tensor:
        """Number c of query rows that could see each token so far [B,H,T], by which `mean` divides sums. Computed once."""
        if self._rows_seen is None:
            next_B11, positions = self.newest_B11 + 1, self.positions_BHT
            until = next_B11 if self.sliding is None else torch.minimum(next_B11, find_end(self.sliding, positions))
            self._rows_seen = (until - positions).to(self.state["sum"].dtype)
            if "unseen" in self.state:  # queries after it that never saw it, since it was inserted into the text later
                self._rows_seen = self._rows_seen - self.state["unseen"]
        return self._rows_seen

    @property
    def dead_BHT(self) -> Tensor | None:
        """Tokens outside the sliding window of every later query, which nothing will attend to; None without a window."""
        return None if self.sliding is None else self.positions_BHT < find_oldest(self.sliding, self.newest_B11 + 1)

    @property
    def mean(self) -> Tensor:
        """Mean attention [B,H,T] that each token got from the query rows that could see it. Computed once per eviction."""
        if self._mean is None:
            mean = self.state["sum"] / self.rows_seen
            self._mean = mean if self.group == 1 else mean.div_(self.group)
        return self._mean


@dataclass
class NewTokens:
    """Tokens that enter the cache of a layer, for `entry` of scores and needs.

    Attributes:
        k_BHQD: their keys, as they are cached.
        v_BHQD: their values.
        positions_BQ: their positions, int64; -1 for padding.
        group: G, query heads per KV head.
        layer: index of the layer, or of each batch row [B] if layers are stacked.
        seed: seed of the policy's random numbers.
        first: index, in the whole model, of the first KV head in k_BHQD.
    """

    k_BHQD: Tensor
    v_BHQD: Tensor
    positions_BQ: Tensor
    group: int
    layer: int | Tensor
    seed: int
    first: int = 0


SIZES = ("first", "newest", "prompt", "deviation", "observed", "nominal")
FLAGS = ("any_first", "any_newest", "any_prompt")


@dataclass
class Limits(Batched):
    """Protected sizes of each batch row, clamped so that the kept set has exactly the budget; tensors are int64 [B,1,1].

    The flags and deviation_count are Python values, so that sizes of zero cost no tensor operation and no synchronization.

    Attributes:
        first: position below which tokens are protected: sinks, or a prompt that the schedule keeps.
        newest: number of newest tokens that are protected.
        prompt: position below which tokens are kept outside the budget and not ranked (schedule "decode").
        deviation: tokens protected by rank: by standard deviation (r in RoCo), or by the range of their values.
        observed: query rows in the observation window.
        nominal: protected tokens in all; the fewest tokens of a head where the budget follows from scores.
        any_first, any_newest, any_prompt: whether the size is above zero in some row.
        deviation_count: the value of `deviation` if all rows share it, else None.
    """

    first: Tensor
    newest: Tensor
    prompt: Tensor
    deviation: Tensor
    observed: Tensor
    nominal: Tensor
    any_first: bool
    any_newest: bool
    any_prompt: bool
    deviation_count: int | None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]], device: torch.device) -> Limits:
        """Make the protected sizes of a batch, for `set_limits` when a prompt ends. rows: what `Scope.limits` returns.

        SIZES and FLAGS are names of fields: numbers of tokens or positions by row, and whether some row has one above zero.
        """
        first, newest, prompt, deviation, _, _ = zip(*rows, strict=True)
        deviation_count = deviation[0] if len(set(deviation)) == 1 else None
        sizes = on_device(rows, device).T.contiguous().view(6, len(rows), 1, 1)
        flags = any(first), any(newest), any(prompt)
        values: dict[str, Any] = dict(zip((*SIZES, *FLAGS), (*sizes, *flags), strict=True))
        return cls(**values, deviation_count=deviation_count)

    @classmethod
    def cat(cls, parts: Sequence[Limits]) -> Limits:
        """Concatenate the rows of several limits (protected sizes), as `EvictingCache.concatenate` joins caches.

        SIZES are the tensors by row. FLAGS: is a size above zero in some row? deviation_count: a number if all rows agree.
        """
        values: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in SIZES}
        values |= {name: any(getattr(part, name) for part in parts) for name in FLAGS}
        counts = {part.deviation_count for part in parts}
        return cls(**values, deviation_count=counts.pop() if len(counts) == 1 else None)


@dataclass
class Block:
    """Attention probabilities of a block of query rows, and the other inputs of a statistic.

    Attributes:
        p_NGRM: probabilities; they sum to one over M, to zero in rows of padding.
        keys_NR: number of keys that each row attends to; empty where no statistic needs it.
        noise_NMG: exp(noise) of each key, from a need's `entry`; None where the score keeps none.
        place: place() returns query heads [N,G], positions of rows [N,R] and of keys [N,M], for noise drawn per query.
        tau: temperature of the softmax.
        layer: index of the layer.
        seed: seed of the policy's random numbers.
        grouped: whether a statistic needs `group_NRM`, so that others read it too instead of summing over the group again.
    """

    p_NGRM: Tensor
    keys_NR: Tensor
    noise_NMG: Tensor | None
    place: Callable[[], tuple[Tensor, Tensor, Tensor]]
    tau: float | Tensor
    layer: int | Tensor
    seed: int
    grouped: bool = False
    _group_NRM: Tensor | None = None

    @property
    def group_NRM(self) -> Tensor:
        """Probabilities [N,R,M] summed over the query heads that share a KV head; computed once for all statistics.

        N heads of all batch rows, R query rows of the block, M keys.
        """
        if self._group_NRM is None:  # no cached_property: torch.compile does not trace its lock
            self._group_NRM = self.p_NGRM.sum(1)
        return self._group_NRM


@dataclass
class Observed:
    """Rows of an observation window, for WindowAttention.fold. Keys are in text order, empty slots first.

    Attributes:
        p_NGRM: their probabilities; zero in rows that do not count.
        candidate_NM: bool, tokens before the window.
        values: values() returns the values [N,M,D].
    """

    p_NGRM: Tensor
    candidate_NM: Tensor
    values: Callable[[], Tensor]
