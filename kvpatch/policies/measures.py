"""The table of what a calibration measures: of each statistic its shape, its sums over pieces of text, and how they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .context import accumulator

Totals = tuple[Tensor, ...]
Of = Literal["queries", "turned", "outputs", "scores"]

MORE = 4
"""Features of a token besides its value: see learned.list_features."""


@dataclass(frozen=True)
class Rotation:
    """Positions of a layer's queries and keys, as rotations of pairs of channels.

    Position p turns the channels (a, b) of a pair by the angle p * turn: x_a becomes x_a cos - x_b sin, and x_b becomes
    x_a sin + x_b cos. Some tables also lengthen what they turn, at every position alike. Channels without a pair stay.

    Attributes:
        pairs_P2: the channels of each pair, int64.
        turn_P: radians per position, float64.
    """

    pairs_P2: Tensor
    turn_P: Tensor

    @classmethod
    def of(cls, matrix_at: Callable[[int], Tensor], count: int) -> Rotation | None:
        """Find the pairs of channels and their angles in a model's rotations, for `kvpatch calibrate`; None if none is turned.

        P: pairs. A pair (a, b) shows in the matrix of position 1 as an entry above the diagonal.

        Args:
            matrix_at: matrix_at(p) returns the matrix [D,D] of position p: row d is what the d-th unit vector becomes.
            count: positions that may be asked for are below that.
        """
        first = matrix_at(1).double().cpu() if count > 1 else torch.empty(0, 0, device="cpu")
        a, b = first.triu(1).nonzero(as_tuple=True)
        if not len(a):
            return None
        turn = torch.atan2(first[a, b], first[a, a])
        # an angle is known up to whole turns; each position 2, 4, 8 ... halves the rounding error of the angle per position
        for place in (1 << power for power in range(1, (count - 1).bit_length())):
            later = matrix_at(place).double().cpu()
            angle = torch.atan2(later[a, b], later[a, a])
            whole_turns = ((place * turn - angle) / (2 * math.pi)).round()
            turn = (angle + 2 * math.pi * whole_turns) / place
        return cls(torch.stack([a, b], 1), turn)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measurements of a model, as `kvpatch calibrate` and `kvpatch learn` make them and `load_calibration` reads them.

    Attributes:
        model: values that identify the model.
        layers: of each layer that a budget applies to, its statistics by name (measures.MEASURES): "direction" [H,D], the first
            singular direction of each KV head's queries, with unit length, turned so that the queries' mean points along it,
            where the output projection is known "area" [H], how far each KV head's attention reaches (see WholeHeads);
            and where positions are rotations that can be undone, "mean" [H,G,D] of each query head at position 0, "norm"
            [H,G,P], the mean length of its pairs of channels, these "pairs" [P,2] and their "turn" [P] in radians per position.
            Or, of `kvpatch learn`, "weight" [H,F] of a token's features (learned.Learned).
        tokens: how many were read.
        digest: checksum of all that.

    Example:
        calibration = kvpatch.load_calibration("calibration.safetensors")
        with kvpatch.patched(model, "q_filter", k=0.5, calibration=calibration):
            model.generate(**inputs)
    """

    model: Mapping[str, object]
    layers: Mapping[int, Mapping[str, Tensor]]
    tokens: int
    digest: str
    _placed: dict[tuple[int, str, torch.device, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Calibration {self.digest[:16]}>"

    def of(self, layer: int, name: str, like: Tensor) -> Tensor:
        """Return a layer's statistic `name` for all heads, on `like`'s device; float32 becomes the dtype of scores.

        `read_calibration` and TriAttention call it. The converted tensor is kept in `_placed`, for the next call.
        """
        statistic = self.layers[layer][name]
        key = layer, name, like.device, accumulator(like.dtype) if statistic.dtype == torch.float32 else statistic.dtype
        if key not in self._placed:
            self._placed[key] = statistic.to(*key[2:])
        return self._placed[key]


@dataclass(frozen=True)
class Sample:
    """Sample of one layer over a piece of text: queries and what they look at, or tokens' features and scores.

    Attributes:
        q_HGQD: the queries as attention used them.
        rotation: None where there is none, or none is known.
        plain_HGQD: the queries moved to position 0, where nothing is turned; None without a rotation.
        area_HT: of the key at each position, the sum "area" (statistics.py) over queries and group, times the length of its
            value after the output projection, averaged over the group; None where that projection is not known.
        x_HTF: features of tokens.
        y_HT: what is to be learned of these tokens.
    """

    q_HGQD: Tensor | None = None
    area_HT: Tensor | None = None
    rotation: Rotation | None = None
    plain_HGQD: Tensor | None = None
    x_HTF: Tensor | None = None
    y_HT: Tensor | None = None

    @property
    def kinds(self) -> tuple[Of, ...]:
        """Kinds of statistics (Measure.kind) that `kvpatch calibrate` or `learn` can measure of this sample: by its fields.

        "scores" need features, "turned" a rotation (unrotated queries), "outputs" the output projection.
        """
        if self.x_HTF is not None:
            return ("scores",)
        optional: tuple[tuple[Of, object], ...] = (("turned", self.rotation), ("outputs", self.area_HT))
        return ("queries", *(kind for kind, value in optional if value is not None))


@dataclass(frozen=True)
class Measure:
    """One statistic of a calibration.

    Attributes:
        name: its name in files and in `Calibration.layers`.
        shape: a letter for each axis: H KV heads, G query heads of a group, D head size, P pairs of channels, F features of a
            token; or a number.
        of: of(sample) returns what a piece of text adds to the sums.
        finish: finish(sums) makes the statistic of the sums over all pieces.
        kind: "queries", "turned" for queries without their rotation, "outputs" for what goes through the output projection,
            or "scores" of a second reading.
        dtype: in a file.
        adds_up: False if every piece gives the same, so that the first one is enough.
    """

    name: str
    shape: str
    of: Callable[[Sample], Totals]
    finish: Callable[[Totals], Tensor]
    kind: Of
    dtype: torch.dtype = torch.float32
    adds_up: bool = True

    def add_piece(self, sums: Totals | None, sample: Sample) -> Totals:
        """Return totals `sums` plus those of a text's next piece (`sample`): on the CPU, floats in float64.

        `_add_piece` calls it for each layer and piece in `kvpatch calibrate` and `learn`. `of`: what this piece adds.
        """
        if sums is not None and not self.adds_up:  # every piece gives the same
            return sums
        piece = tuple(x.double().cpu() if x.is_floating_point() else x.cpu() for x in self.of(sample))
        return piece if sums is None else tuple(old + new for old, new in zip(sums, piece, strict=True))


def measure_pairs(x: Tensor, pairs_P2: Tensor) -> Tensor:
    """Return the lengths [...,P] of the pairs of channels of vectors [...,D]."""
    return torch.hypot(x[..., pairs_P2[:, 0]], x[..., pairs_P2[:, 1]])


def _sum_products(sample: Sample) -> Totals:
    """Return the sums of q q^T [H,D,D] and q [H,D] over a piece of text, for `Measure.add_piece` of the row "direction"."""
    assert sample.q_HGQD is not None
    q = sample.q_HGQD.flatten(1, 2).float()
    return q.transpose(1, 2) @ q, q.sum(1)


def _find_direction(sums: Totals) -> Tensor:
    """Return "direction" (a row of MEASURES) from the sums of `_sum_products`: first right singular vectors of queries [H,D].

    `kvpatch calibrate` ends with it. Each is turned to the side of its queries' mean.
    """
    products, total = sums
    first = torch.linalg.eigh(products).eigenvectors[..., -1]  # in ascending order
    side = (first * total).sum(-1, keepdim=True)
    return first * torch.where(side < 0, -1.0, 1.0)


def _count_plain(sample: Sample) -> Totals:
    """Return, for "mean" (a row of MEASURES), a piece's number of queries and the sum of these, moved to position 0."""
    assert sample.plain_HGQD is not None
    return _count_sums(sample.plain_HGQD)


def _count_norms(sample: Sample) -> Totals:
    """Return, for "norm" (a row of MEASURES), a piece's number of queries and the sum of their pairs' lengths [H,G,P]."""
    assert sample.plain_HGQD is not None and sample.rotation is not None
    return _count_sums(measure_pairs(sample.plain_HGQD, sample.rotation.pairs_P2.to(sample.plain_HGQD.device)))


def _count_sums(x_HGQD: Tensor) -> Totals:
    """Return the number Q of queries and the sum over them, which `_divide_sums` makes a mean of."""
    return torch.tensor(x_HGQD.shape[2], device="cpu"), x_HGQD.sum(2)


def _divide_sums(sums: Totals) -> Tensor:
    """Return a mean from all pieces' (number of queries, sum over queries); 0 if there were no queries."""
    return sums[1] / sums[0].clamp(min=1)


def _sum_areas(sample: Sample) -> Totals:
    """Return, for "area" (a row of MEASURES: attention that a window would miss), a piece's queries and the sum of areas [H].

    `Measure.add_piece` calls it. The first tokens are left out of both.
    """
    assert sample.q_HGQD is not None and sample.area_HT is not None
    _, G, Q, _ = sample.q_HGQD.shape
    return torch.tensor(max(Q - FIRST, 0), device="cpu"), sample.area_HT[:, FIRST:].sum(1) / G


def _list_pairs(sample: Sample) -> Totals:
    """Return "pairs" (a row of MEASURES): channels that positions turn together. Each piece of a text has the same."""
    assert sample.rotation is not None
    return (sample.rotation.pairs_P2,)


def _list_turns(sample: Sample) -> Totals:
    """Return "turn" (a row of MEASURES): each pair's angle per position. Each piece of a text has the same."""
    assert sample.rotation is not None
    return (sample.rotation.turn_P,)


def _take_sums(sums: Totals) -> Tensor:
    """Return the one tensor of a row of MEASURES that does not add up over pieces, "pairs" or "turn", as it is."""
    return sums[0]


def _sum_regression(sample: Sample) -> Totals:
    """Return, for "weight" (a row of MEASURES), X^T X [H,F,F] and X^T y [H,F] of a piece of text that `kvpatch learn` reads.

    x: the tokens' features. y: the logarithm of their scores by a second reading, which is learned.
    """
    assert sample.x_HTF is not None and sample.y_HT is not None
    x, y = sample.x_HTF.double(), sample.y_HT.double()
    return x.transpose(1, 2) @ x, (x * y[..., None]).sum(1)


def _solve_regression(sums: Totals) -> Tensor:
    """Return least-squares weights [H,F] from the sums of `_sum_regression`, with a ridge in units of each feature's size.

    `kvpatch learn` ends with it. size: the root of a feature's sum of squares.
    """
    products, total = sums
    size = products.diagonal(dim1=-2, dim2=-1).sqrt()
    size = torch.where(size > 0, size, 1.0)
    ridge = _RIDGE * torch.eye(size.shape[-1], dtype=size.dtype, device="cpu")
    return torch.linalg.solve(products / (size[:, :, None] * size[:, None]) + ridge, total / size) / size


_RIDGE = 1e-3


FIRST = 4  # tokens that draw attention wherever a head looks, and count for no area
# fmt: off
MEASURES = {row.name: row for row in (
    Measure("direction", "HD",  _sum_products,   _find_direction,   "queries"),  # first singular direction of a group's queries
    Measure("mean",      "HGD", _count_plain,    _divide_sums,      "turned"),  # of the queries of each head at position 0
    Measure("norm",      "HGP", _count_norms,    _divide_sums,      "turned"),  # mean length of their pairs of channels
    Measure("pairs",     "P2",  _list_pairs,     _take_sums,        "turned", torch.int64, adds_up=False),  # see Rotation
    Measure("turn",      "P",   _list_turns,     _take_sums,        "turned", torch.float64, adds_up=False),
    Measure("area",      "H",   _sum_areas,      _divide_sums,      "outputs"),  # under the curves of attention: see WholeHeads
    Measure("weight",    "HF",  _sum_regression, _solve_regression, "scores"),  # of a token's features: see learned.Learned
)}
# fmt: on
WHOLE: tuple[tuple[Of, ...], ...] = (
    *(("queries", *turned, *outputs) for turned in (("turned",), ()) for outputs in (("outputs",), ())),
    ("scores",),
)
"""Sets of kinds (Measure.kind), one of which a calibration has of each layer: with all statistics of these kinds."""


def list_statistics(kinds: tuple[Of, ...]) -> list[str]:
    """Return the names of the statistics of these kinds (Measure.kind), in the order of the table MEASURES."""
    return [name for name, measure in MEASURES.items() if measure.kind in kinds]
