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
from ..policies.needs.last_queries import NewestQueries
from ..policies.parallel import Parallel
from ..policies.policy import Policy
from ..policies.repeated import repeat_instruction
from ..storage.calibration import make_calibration

_KEEPS_ALL = 1 << 20  # tokens, more than a piece of text has


@torch.no_grad()
def calibrate(
    model: Any, pieces: Sequence[Tensor], on_piece: Callable[[], None] = lambda: None, teacher: Policy | None = None
) -> Calibration:
    """Return statistics of a model's queries over some text, for `kvpatch calibrate`; with a teacher, weights that imitate it.

    Args:
        model: not patched.
        pieces: token ids [1,n] of pieces of text, each read by itself.
        on_piece: called after each.
        teacher: policy of a second reading, as `make_teacher` makes it, to learn for the policy `learned`; None for queries.

    Raises:
        KVPatchError: `patched` refuses the model; or, with a teacher, no piece is longer than its sinks.
    """
    # the model's parts; sums by layer and statistic
    target, sums = Target.find(model), dict[int, dict[str, Totals]]()
    longest = max(piece.shape[1] for piece in pieces)
    if teacher is not None and longest <= teacher.scope.sinks:
        raise KVPatchError(f"The text has {longest} tokens, of which {teacher.scope.sinks} are sinks: give a longer one.")
    # Recall: a score for which layers keep their queries; _KEEPS_ALL: a budget of more tokens than a piece has
    with patched(model, teacher or Policy("calibration", Recall(longest)), _KEEPS_ALL) as patch:
        readers = [_LayerReader.of(target, module, adapter, longest) for module, adapter in target.attentions]
        for piece in pieces:
            cache = patch.new_cache()
            # the name of the model's parameter for a cache
            model(piece, **{cache_argument(type(model).forward): cache})
            for index, layer in enumerate(cache.layers):
                if "repeated" in layer.state and teacher is not None:  # the teacher's scores
                    _add_piece(_read_scores(layer, teacher.scope.sinks), sums.setdefault(index, {}))
                elif isinstance(recent := layer.need_notes.get("recent"), NewestQueries):  # the piece's queries
                    _add_piece(readers[index].read_queries(layer, recent), sums.setdefault(index, {}))
            on_piece()
    # from the sums over all pieces to what the calibration stores, such as means
    layers = {
        index: {name: MEASURES[name].finish(found).to(MEASURES[name].dtype) for name, found in totals.items()}
        for index, totals in sums.items()
    }
    return make_calibration(target.identity(), layers, sum(piece.shape[1] for piece in pieces))


def make_teacher(tokenizer: Any, chunk: int, name: str = "kvzip_plus") -> Policy:
    """Return the policy from which `calibrate` learns for the policy `learned`: it reads each piece of text twice.

    `kvpatch calibrate` calls it.

    Args:
        tokenizer: of the model; the second reading's instruction is in its words.
        chunk: tokens that are repeated at a time.
        name: "kvzip_plus", or "kvzip" where an output projection is not known.
    """
    return get_policy(name).with_options(instruction=repeat_instruction(tokenizer), chunk=chunk)


@dataclass(frozen=True)
class _LayerReader:
    """Reads queries and sums of one layer, for a calibration.

    Attributes:
        bound: the layer's adapter.
        parallel: the share of this process in its heads.
        rotation: of its keys by their positions; None if there is none, or none that can be undone.
        table: by which the rotation is undone.
    """

    bound: BoundAdapter
    parallel: Parallel
    rotation: Rotation | None
    table: Any

    @classmethod
    def of(cls, target: Target, module: Any, adapter: Adapter, count: int) -> _LayerReader:
        """Make the reader of a layer's queries. count: tokens of the longest piece.

        `calibrate` calls it for each layer before the model reads the first piece.
        """
        heads, head_dim = adapter.kv_shape(module)
        bound, device = BoundAdapter(adapter, module, heads), next(module.parameters()).device
        undone = adapter.obstacle(target.decoder, renumbered=False) is None  # rotations by position can be undone
        table = adapter.rotary_table(target.decoder, device, count) if undone else None
        # for Rotation: the rotary matrix of a position, in float64
        like = torch.empty(0, head_dim, device=device, dtype=torch.float64)

        def rotate(place: int) -> Tensor:
            return bound.mean_rotation(torch.tensor([[place]], device=device), like, table)[0, 0]

        return cls(bound, target.parallel, None if table is None else Rotation.of(rotate, count), table)

    def read_queries(self, layer: SlotLayer, recent: NewestQueries) -> Sample:
        """Return a piece's queries, as attention used them and moved to position 0, and each token's "area" (`_measure_areas`).

        `calibrate` calls it by layer and piece. layer: its cache, which has read the piece. recent: the queries.
        """
        real = recent.positions_BW[0] >= 0
        q_HGQD = recent.q_BHGWD[0][:, :, real]
        area_HT = self._measure_areas(layer, q_HGQD.shape[1])
        if self.rotation is None:
            return Sample(q_HGQD, area_HT)
        q, places = q_HGQD.flatten(0, 1)[None].double(), recent.positions_BW[:, None, real]
        # rotate from each query's position back, and then to position 0
        at_0 = self.bound.rotate_back(q, places, self.table)
        at_0 = self.bound.rotate(at_0, torch.zeros_like(places), self.table)
        return Sample(q_HGQD, area_HT, self.rotation, at_0[0].view(q_HGQD.shape))

    def _measure_areas(self, layer: SlotLayer, group: int) -> Tensor | None:
        """Return each token's "area" [H,T] in a piece: the attention it got times its projected value's norm.

        `read_queries` calls it. Attention counts more from farther queries: that of t to i times (t - i + 1) / (t + 1). None if
        the output projection, after which the norm is taken, is not known.
        """
        if not self.bound.adapter.projects:
            return None
        v_BHTD = layer.view()[1]
        rows, _ = self.bound.output_rows(v_BHTD, group, self.parallel)
        return layer.statistic("area")[0, :, : layer.columns_used] * projected_norms(v_BHTD, rows, 2)[0]


def _read_scores(layer: SlotLayer, sinks: int) -> Sample:
    """Return what `learned` learns from: features of a piece's tokens after the sinks, and logarithms of a teacher's scores.

    `calibrate` calls it for each layer when the model has read a piece of text, a batch of one row, under the teacher: a policy
    that reads it twice, and scores each token by the greatest attention that it gets in the second reading ("repeated").
    """
    k_BHTD, v_BHTD, positions_BHT = layer.view()
    scored = positions_BHT[0, 0] >= sinks  # all heads hold all tokens, in one order
    x_HTF = learned.list_features(k_BHTD, v_BHTD, positions_BHT[:, 0])[0]  # F features of each token
    return Sample(x_HTF=x_HTF[:, scored], y_HT=learned.make_target(layer.state_view()["repeated"])[0][:, scored])


def _add_piece(sample: Sample, sums: dict[str, Totals]) -> None:
    """Add a piece's sample to a layer's sums (by statistic) in place; `calibrate` calls it for each piece and layer."""
    for name in list_statistics(sample.kinds):
        sums[name] = MEASURES[name].add_piece(sums.get(name), sample)
