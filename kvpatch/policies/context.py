"""What scores, scopes and selection read: a context at which something is chosen, the sizes that hold in it, and a block of
attention rows to be summed.

Dimension key (see kvpatch/__init__.py): N = any part of B*H, R rows of a block, M keys of a block, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .parallel import WHOLE, Parallel


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Scores are float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class EvictionContext:
    """What is known when scores are read: of one layer, at the end of a prompt or of a decode step. (Or of several layers
    stacked along B; then layer is [B,1,1].)

    positions_BHT (-1: empty slot) and the state's tensors lie slot by slot as the keys do, in text order at the end of a
    prompt. newest_B11 is the newest token's position, so that `newest - positions` is an age; tokens above recent_B11 are
    in the protected window. limits holds each row's protected sizes. group is G; sliding is the attention window in
    tokens, or None. empty: some slots may be empty. aligned: all heads hold the same tokens in the same slots where their
    scores are the same. parallel: whose heads these are, of a model that several processes share.

    For a selection that asks: keep_BH1, tokens that each head may hold, and norms(known, out), the projected value norms
    [B,H,T], which need not be right where a mask says that they are not wanted.
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
    norms: Callable[[Tensor, Tensor | None], Tensor] | None = None
    _rows_seen: Tensor | None = field(default=None, repr=False)
    _mean: Tensor | None = field(default=None, repr=False)

    @property
    def rows_seen(self) -> Tensor:
        """c [B,H,T]: how many query rows could see each token so far, its own included; of the sums' dtype."""
        if self._rows_seen is None:
            seen = (self.newest_B11 + 1 - self.positions_BHT).to(self.state["sum"].dtype)
            self._rows_seen = seen if self.sliding is None else seen.clamp(max=self.sliding)
        return self._rows_seen

    @property
    def mean(self) -> Tensor:
        """Mean probability [B,H,T] that each token got from the rows that could see it."""
        if self._mean is None:
            mean = self.state["sum"] / self.rows_seen
            self._mean = mean if self.group == 1 else mean.div_(self.group)
        return self._mean


SIZES = ("first", "newest", "prompt", "deviation", "observed", "nominal")
FLAGS = ("any_first", "any_newest", "any_prompt")


@dataclass
class Limits:
    """Sizes in tokens, clamped row by row so that the kept set is exactly the budget; int64 [B,1,1].

    first: tokens below this position are protected (sinks, or a prompt that is kept whole). newest: so many newest ones
    are. prompt: positions below it take no part in rankings (schedule "decode"). deviation: RoCo's r. observed: rows of the
    observation window. The rest is known to the host, so that nothing is computed for a size of zero; deviation_count is
    r where it is one for all rows.
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
        """From one tuple (first, newest, prompt, deviation, observed, nominal) per row."""
        first, newest, prompt, deviation, _, _ = zip(*rows, strict=True)
        count = deviation[0] if len(set(deviation)) == 1 else None
        sizes = torch.tensor(rows, device=device).T.contiguous().view(6, len(rows), 1, 1)
        flags = any(first), any(newest), any(prompt)
        found: dict[str, Any] = dict(zip((*SIZES, *FLAGS), (*sizes, *flags), strict=True))
        return cls(**found, deviation_count=count)

    @classmethod
    def cat(cls, parts: Sequence[Limits]) -> Limits:
        """The rows of several."""
        found: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in SIZES}
        found |= {name: any(getattr(part, name) for part in parts) for name in FLAGS}
        counts = {part.deviation_count for part in parts}
        return cls(**found, deviation_count=counts.pop() if len(counts) == 1 else None)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Limits:
        """The same with every tensor changed along its batch axis."""
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)


@dataclass
class Block:
    """Attention probabilities of some query rows, and what a statistic may need beside them.

    p_NGRM sums to one over M (to zero in rows of padding). keys_NR: how many keys each row attends to. noise_NMG: the
    score's own entry for these keys. place() gives query heads [N,G] and positions of rows [N,R] and keys [N,M], for
    fresh noise.
    """

    p_NGRM: Tensor
    keys_NR: Tensor | None
    noise_NMG: Tensor | None
    place: Callable[[], tuple[Tensor, Tensor, Tensor]]
    tau: float | Tensor
    layer: int | Tensor
    seed: int
