"""Scores that read a calibration: measurements of a model that a pass over text makes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import Rule, check_count, is_list, parse_k, share
from .context import EvictionContext, NewTokens, accumulator
from .measures import MEASURES, Calibration, measure_pairs
from .needs import AnyNeed, Calibrated, Held, LastQueries, Sums
from .scores import Recency, Score


@dataclass(frozen=True)
class CalibratedScore(Score):
    """Base class of scores that read a calibration.

    Attributes:
        calibration: what `load_calibration` returns.
    """

    calibration: Calibration | None = None
    calibrated: ClassVar[tuple[str, ...]] = ()  # statistics of the calibration that it reads

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (Calibrated(self.calibrated, self.calibration),)

    def read_calibration(self, new: NewTokens) -> Tensor:
        """Return the layer's first calibrated statistic [H,...], for the heads of this process, those from `new.first` on.

        `entry` of QueryFilter and Learned calls it for the tokens of each pass. `calibrated`: names of the statistics.
        """
        assert self.calibration is not None and isinstance(new.layer, int)
        H = new.k_BHQD.shape[1]
        return self.calibration.of(new.layer, self.calibrated[0], new.k_BHQD)[new.first : new.first + H]

    def check(self) -> None:
        """Raise KVPatchError if `calibration` is neither a Calibration nor None. `Policy.__post_init__` calls it."""
        if self.calibration is not None and not isinstance(self.calibration, Calibration):
            raise KVPatchError(
                f"calibration={self.calibration!r:.60} is no calibration: give kvpatch.load_calibration(path) of a file that "
                "`kvpatch calibrate` or `kvpatch learn` wrote."
            )


@dataclass(frozen=True)
class QueryFilter(CalibratedScore):
    """Projection of keys on the first singular direction of queries [Q-Filters].

    s[i] = k_i . f, where f is the first right singular vector of the queries of a KV head's group over a text read before, as
    attention uses them, turned so that their mean points along it.

    Differs from the paper: the queries of the whole group make one vector; no mean of vectors is taken.

    Attributes:
        calibration: what `load_calibration` returns.
    """

    calibrated: ClassVar[tuple[str, ...]] = ("direction",)

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        """Return each new key's projection on its head's calibrated direction, to store with the token, for `Policy.entry`."""
        direction = self.read_calibration(new)
        return {"projection": (new.k_BHQD.to(direction.dtype) @ direction[None, :, :, None]).squeeze(-1)}

    def value(self, context: EvictionContext) -> Tensor:
        return context.state["projection"]


@dataclass(frozen=True)
class TriAttention(CalibratedScore):
    """Logits that the mean query of coming positions gives, and how far queries spread about it [TriAttention].

    Positions turn the pairs of channels f of a head. A query head has a mean query m at position 0, and pairs of the mean
    length e[f], over a text read before. Let `now` be the number of tokens so far, R(p) the rotation of position p, and D the
    powers of two from 1 to `reach`. For key k_i as it is cached,

    x[i] = mean over d in D of k_i . R(now + d) m + sum over f of (e[f] - |m_f|) * |k_i,f|.

    x is standardized for each query head: less its mean, divided by its standard deviation, over the held tokens, or over the
    generated ones where the prompt is kept (schedule "decode"). s[i] = the greatest of the group's.

    Channels that are not turned are in the first term alone. Where the rotation's frequencies change with the length of the
    text, those of the calibration's text are taken.

    Differs from the paper: the kept prompt is not counted in the budget; each KV head of each layer selects by itself, an
    option of the authors' code. The standardization and the greatest of the group are that option's.

    Attributes:
        calibration: what `load_calibration` returns.
        reach: the farthest offset.
    """

    reach: int = 65536
    calibrated: ClassVar[tuple[str, ...]] = ("mean", "norm", "pairs", "turn")
    schedules: ClassVar[tuple[str, ...]] = ("decode", "both")

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (*super().needs, Held())

    def check(self) -> None:
        super().check()
        check_count("reach", self.reach, "positions")

    def value(self, context: EvictionContext) -> Tensor:
        """Return how much coming queries will attend to each key [B,H,T]. `Policy.eviction_keys` calls it at each eviction."""
        keys = context.view(Held)[0]
        keys = keys.to(accumulator(keys.dtype))
        # mean and norm: of queries; pairs: channels that rotate together; turn: each pair's angle per position
        mean, norm, pairs, turn = self._read_statistics(context, keys)
        # mean rotation to coming positions, 1, 2, 4, 8 ... ahead; angles are float64 like `turn`: far positions stay exact
        offset = 1 << torch.arange(self.reach.bit_length(), device=keys.device)
        positions = context.newest_B11 + 1 + offset
        angle = positions[..., None] * turn
        cos, sin = (part.mean(2, keepdim=True).to(keys.dtype) for part in (angle.cos(), angle.sin()))
        a, b = mean[..., pairs[:, 0]], mean[..., pairs[:, 1]]
        rotated_mean = mean.expand(len(keys), *mean.shape).clone()
        rotated_mean[..., pairs[:, 0]], rotated_mean[..., pairs[:, 1]] = a * cos - b * sin, a * sin + b * cos
        spread = norm - measure_pairs(mean, pairs)  # how far queries deviate from their mean, by pair
        x = rotated_mean @ keys.transpose(-1, -2) + spread @ measure_pairs(keys, pairs).transpose(-1, -2)
        return _standardize_scores(x, context).amax(2)

    def _read_statistics(self, context: EvictionContext, keys: Tensor) -> list[Tensor]:
        """Return the calibrated statistics of the layer, in the order of `calibrated`, for `value` at an eviction.

        Those with an axis of heads ("H") are cut to the heads of this process. keys: for device and dtype.
        """
        assert self.calibration is not None and isinstance(context.layer, int)
        H = keys.shape[1]
        first = context.parallel.first(H)  # index of this process's first head
        statistics = {name: self.calibration.of(context.layer, name, keys) for name in self.calibrated}
        return [x[first : first + H] if MEASURES[name].shape[0] == "H" else x for name, x in statistics.items()]


def _standardize_scores(x_BHGT: Tensor, context: EvictionContext) -> Tensor:
    """Scale each query head's logits to mean 0 and deviation 1, so that `TriAttention.value` can compare heads of a group.

    It does so at each eviction. Mean and deviation leave out empty slots, and the prompt where a policy evicts generated tokens
    alone.
    """
    counted = context.positions_BHT >= (context.limits.prompt.clamp(min=0) if context.limits.any_prompt else 0)
    counted = counted[:, :, None]
    x, count = x_BHGT.masked_fill(~counted, 0.0), counted.sum(-1, keepdim=True).clamp(min=1)
    x = (x - x.sum(-1, keepdim=True) / count).masked_fill(~counted, 0.0)
    return x / (x.square().sum(-1, keepdim=True) / count).sqrt().clamp(min=_LEAST)


@dataclass(frozen=True)
class WholeHeads(CalibratedScore, Recency):
    """Heads that keep everything, and others that keep the first and the newest tokens [DuoAttention].

    A KV head's area is the mean, over query rows t of a text read before and over the group's query heads, of

    sum over i from 4 to t of a[t,i] * |v_i W_O| * (t - i + 1) / (t + 1),

    the area under the row's cumulated attention, each token weighed by what its value adds to the layer's output (W_O: the
    output projection; |.|: length, averaged over the group). It is what a window of the newest r tokens would miss, on
    average over r from none to all. Attention to the first four tokens, which any head may fall back on, is left out.
    The share `k` of the heads of all layers, those of the largest area, at least one, keeps everything. The others keep
    `sinks` first and `recent` newest tokens.

    Differs from the paper: it learns by gradients which heads need everything. The area is that of kvpress'
    `duo_attention_on_the_fly`, but weighed by values, and under the attention of real rows; there it is of a text's mean
    query to its mean key at all positions.

    Attributes:
        calibration: what `load_calibration` returns.
    """

    calibrated: ClassVar[tuple[str, ...]] = ("area",)

    def budget(self, k: object, policy: Any, bounds: Sequence[int | None]) -> object:
        """Return budgets k[layer][head] by which a share `k` of heads keeps every token; k=1.0 stays 1.0.

        `settings_of` calls it. bounds: sliding windows of layers, as in `Budget.parse`.

        Raises:
            KVPatchError: `k` is no share, the policy divides a budget over heads or layers, or its sinks= and recent= together
                are no number of tokens above 0.
        """
        part = None if is_list(k) or isinstance(k, Rule) else parse_k(k)
        if not isinstance(part, float):
            raise KVPatchError(
                f"k={k!r:.60}: policy {policy.name!r} keeps heads whole, and k is their share: give k=0.5 or the like. The "
                "others keep as many tokens as sinks= and recent= say."
            )
        if policy.over_heads is not None or policy.over_layers is not None:
            raise KVPatchError(
                f"policy {policy.name!r} divides a budget over heads or layers that has no size: its heads keep everything, or "
                "sinks= and recent= tokens. Use the policy inside."
            )
        few = policy.scope.sinks + policy.scope.recent
        if not isinstance(few, int) or few < 1:
            raise KVPatchError(
                f"recent={policy.scope.recent!r} with sinks={policy.scope.sinks!r}: they are all that heads of policy "
                f"{policy.name!r} keep which are not whole, so give numbers of tokens, such as recent=256."
            )
        return k if part == 1.0 else self._make_table(part, few, bounds)

    def _make_table(self, part: float, few: int, bounds: Sequence[int | None]) -> list[float | list[float | int]]:
        """Return the table k[layer][head] for `budget`: 1.0 for a share `part` of heads, of largest areas; `few` for others.

        A head's area is the attention that a window of newest tokens would miss, as calibrated. bounds: each layer's sliding
        window; layers with one get 1.0.
        """
        assert self.calibration is not None
        areas = {layer: self.calibration.layers[layer]["area"] for layer, bound in enumerate(bounds) if bound is None}
        order = torch.cat([*areas.values()]).argsort(descending=True, stable=True)  # of equal areas the lower layer's
        keeps_all = torch.zeros(len(order), dtype=torch.bool, device="cpu")
        keeps_all[order[: max(1, share(part, len(order)))]] = True
        heads = iter(keeps_all.tolist())
        return [[1.0 if next(heads) else few for _ in areas[layer]] if layer in areas else 1.0 for layer in range(len(bounds))]


@dataclass(frozen=True)
class Recall(Score):
    """Score of a forward pass that calibrates: layers keep the queries and sums of their attention. No token is evicted.

    Attributes:
        count: queries to keep, at least as many as the pass has tokens.
    """

    count: int = 1

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return Sums("area"), LastQueries(self.count, protected=False)

    def value(self, context: EvictionContext) -> Tensor:
        return context.positions_BHT.float()


_LEAST = 1e-6  # least standard deviation that scores are divided by
