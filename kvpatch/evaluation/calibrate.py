"""Calibration: one pass over text, piece by piece, that measures each head's queries, or what a second reading looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arch.adapter import Adapter
from ..arch.bound import BoundAdapter
from ..arch.upstream import cache_argument
from ..backends.value_norms import projected_norms
from ..cache.layer import SlotLayer
from ..errors import KVPatchError
from ..hooks.target import Target
from ..patching import patched
from ..policies import get_policy, learned
from ..policies.calibration import Calibration, Recall
from ..policies.measures import MEASURES, Rotation, Sample, Totals, list_statistics
from ..policies.needs.last_queries import Recent
from ..policies.parallel import Parallel
from ..policies.policy import Policy
from ..policies.repeated import repeat_instruction
from ..storage.calibration import make_calibration

_KEEPS_ALL = 1 << 20  # tokens, more than a piece of text has


@torch.no_grad()
def calibrate(
    model: Any, pieces: Sequence[Tensor], on_piece: Callable[[], None] = lambda: None, teacher: Policy | None = None
) -> Calibration:
    """Measure the queries that a model asks over some text; or learn what a second reading of it looks at.

    Args:
        model: not patched.
        pieces: token ids [1,n] of pieces of text, each read by itself.
        on_piece: called after each.
        teacher: policy of a second reading, as `make_teacher` makes it, to learn for the policy `learned`; None for queries.

    Raises:
        KVPatchError: the model cannot be read so; or, with a teacher, no piece is longer than its sinks.
    """
    target, sums = Target.find(model), dict[int, dict[str, Totals]]()
    longest = max(piece.shape[1] for piece in pieces)
    if teacher is not None and longest <= teacher.scope.sinks:
        raise KVPatchError(f"The text has {longest} tokens, of which {teacher.scope.sinks} are sinks: give a longer one.")
    with patched(model, teacher or Policy("calibration", Recall(longest)), _KEEPS_ALL) as patch:
        parts = [_Parts.of(target, module, adapter, longest) for module, adapter in target.attentions]
        for piece in pieces:
            cache = patch.new_cache()
            model(piece, **{cache_argument(type(model).forward): cache})
            for index, layer in enumerate(cache.layers):
                if "repeated" in layer.state and teacher is not None:
                    _add_piece(_read_taught(layer, teacher.scope.sinks), sums.setdefault(index, {}))
                elif isinstance(recent := layer.notes.get("recent"), Recent):
                    _add_piece(parts[index].sample(layer, recent), sums.setdefault(index, {}))
            on_piece()
    layers = {
        index: {name: MEASURES[name].finish(found).to(MEASURES[name].dtype) for name, found in own.items()}
        for index, own in sums.items()
    }
    return make_calibration(target.identity(), layers, sum(piece.shape[1] for piece in pieces))


def make_teacher(tokenizer: Any, chunk: int, name: str = "kvzip_plus") -> Policy:
    """Return the policy that `learned` learns from.

    Args:
        tokenizer: of the model; the second reading's instruction is in its words.
        chunk: tokens that are repeated at a time.
        name: "kvzip_plus", or "kvzip" where an output projection is not known.
    """
    return get_policy(name).with_options(instruction=repeat_instruction(tokenizer), chunk=chunk)


@dataclass(frozen=True)
class _Rotations:
    """The rotation of a layer's keys, with the adapter and table by which it is undone."""

    rotation: Rotation
    adapter: BoundAdapter
    table: Any

    @classmethod
    def of(cls, target: Target, module: Any, adapter: Adapter, count: int) -> _Rotations | None:
        """Return a layer's rotations for positions below `count`; None if it has none, or none that can be undone."""
        weight = next(module.parameters())
        turns = adapter.obstacle(target.decoder, renumbered=False) is None
        table = adapter.rotary_table(target.decoder, weight.device, count) if turns else None
        if table is None:
            return None
        heads, head_dim = adapter.kv_shape(module)
        bound, like = BoundAdapter(adapter, module, heads), torch.empty(0, head_dim, device=weight.device, dtype=torch.float64)

        def turned(place: int) -> Tensor:
            return bound.mean_rotation(torch.tensor([[place]], device=like.device), like, table)[0, 0]

        rotation = Rotation.of(turned, count)
        return None if rotation is None else cls(rotation, bound, table)


@dataclass(frozen=True)
class _Parts:
    """Parts of a layer by which a calibration reads its queries and sums.

    Attributes:
        turning: its rotation; None as in _Rotations.of.
        bound: its adapter.
        parallel: the share of this process in its heads.
    """

    turning: _Rotations | None
    bound: BoundAdapter
    parallel: Parallel

    @classmethod
    def of(cls, target: Target, module: Any, adapter: Adapter, count: int) -> _Parts:
        bound = BoundAdapter(adapter, module, adapter.kv_shape(module)[0])
        return cls(_Rotations.of(target, module, adapter, count), bound, target.parallel)

    def sample(self, layer: SlotLayer, recent: Recent) -> Sample:
        """Return a piece's queries, and what they look at."""
        known = recent.positions_BW[0] >= 0
        q_HGQD, turning = recent.q_BHGWD[0][:, :, known], self.turning
        area_HT = self._measure_areas(layer, q_HGQD.shape[1])
        if turning is None:
            return Sample(q_HGQD, area_HT)
        q, places = q_HGQD.flatten(0, 1)[None].double(), recent.positions_BW[:, None, known]
        plain = turning.adapter.rotate_back(q, places, turning.table)
        plain = turning.adapter.rotate(plain, torch.zeros_like(places), turning.table)
        return Sample(q_HGQD, area_HT, turning.rotation, plain[0].view(q_HGQD.shape))

    def _measure_areas(self, layer: SlotLayer, group: int) -> Tensor | None:
        """Return each token's "area" sum [H,T] times the norm of its projected value; None if the projection is not known."""
        if not self.bound.adapter.projects:
            return None
        v_BHTD = layer.view()[1]
        rows, _ = self.bound.output_rows(v_BHTD, group, self.parallel)
        return layer.statistic("area")[0, :, : layer.used] * projected_norms(v_BHTD, rows, 2)[0]


def _read_taught(layer: SlotLayer, sinks: int) -> Sample:
    """Return a piece's tokens of a layer behind its sinks, with the logarithms of their scores."""
    k_BHTD, v_BHTD, positions_BHT = layer.view()
    among = positions_BHT[0, 0] >= sinks  # all heads hold all tokens, in one order
    x_HTF = learned.list_features(k_BHTD, v_BHTD, positions_BHT[:, 0])[0]
    return Sample(x_HTF=x_HTF[:, among], y_HT=learned.make_target(layer.state_view()["repeated"])[0][:, among])


def _add_piece(sample: Sample, sums: dict[str, Totals]) -> None:
    """Add a piece to the sums of a layer."""
    for name in list_statistics(sample.kinds):
        sums[name] = MEASURES[name].add_piece(sums.get(name), sample)
