"""The bound adapter: an adapter together with one attention module, by which attention and scores ask about that module."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..backends.protocol import Geometry
from ..policies.needs.query_moments import mean_rotation
from ..policies.parallel import WHOLE, Parallel
from .adapter import Adapter
from .upstream import Conv1D


@contextmanager
def _set_evaluating(attn: nn.Module) -> Iterator[None]:
    """Switch a module and its submodules to eval mode while `output_rows` measures its projection; afterwards switch back."""
    training = [module for module in attn.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def local(tensor: Tensor) -> Tensor:
    """Return this process' part of a sharded parameter (a DTensor); return other tensors unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _plain_weight(module: Any, inputs: int) -> Tensor | None:
    """Return the weight [inputs,E] of a plain output projection; None for another, which `output_rows` then measures.

    inputs: the width of the heads that this process computes. Of a sharded weight the part of this process is returned, or all
    of it if the process computes all heads.
    """
    weight = getattr(module, "weight", None)
    if type(module) not in (nn.Linear, Conv1D) or hasattr(module, "_hf_hook") or not isinstance(weight, Tensor):
        return None
    if hasattr(weight, "full_tensor"):  # sharded; a process that has all heads needs all rows
        weight = local(weight) if local(weight).shape[-1] == inputs else weight.full_tensor()
    elif type(weight) not in (Tensor, nn.Parameter):  # a quantized tensor has a type of its own
        return None
    weight = weight.T if type(module) is nn.Linear else weight
    return weight if weight.shape[0] == inputs else None  # a partial weight belongs to a module that splits its input


class BoundAdapter:
    """An adapter and the attention module that it is asked about.

    Attributes:
        adapter: the adapter.
        attn: the attention module.
        H: KV heads of the module.
        autocast: whether the module is called under torch.autocast.
    """

    def __init__(self, adapter: Adapter, attn: Any, H: int) -> None:
        self.adapter, self.attn, self.H, self.autocast = adapter, attn, H, False
        self._rows: tuple[Any, Tensor] | None = None  # of a plain projection: its weight, and `output_rows`

    def geometry(self, device: torch.device) -> Geometry:
        """Return the layer's variant of attention (scale, ALiBi slopes, window, softcap, sinks), with its tensors on `device`.

        `Call` asks once for each layer of a new cache, which keeps it; a replay for training asks in each pass, without a
        cache.
        """
        slopes = self.adapter.slopes(self.attn)
        if slopes is not None:
            slopes = slopes.to(device).unflatten(0, (self.H, -1))  # [H,G]
        sinks = self.adapter.sinks(self.attn)
        if sinks is not None:
            sinks = local(sinks).to(device).unflatten(0, (self.H, -1))  # local: this process's part of a sharded tensor
            sinks = sinks if torch.is_grad_enabled() else sinks.detach()  # sinks are parameters, which training updates
        adapter, attn = self.adapter, self.attn
        # coarse: the factor of ALiBi in a model that rounds it to bfloat16, else None
        fields = (adapter.scale(attn), slopes, adapter.sliding(attn), adapter.softcap(attn), sinks, adapter.coarse(attn))
        return Geometry(*fields)

    def rotate(self, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Apply positions `places_BHT` to queries or keys."""
        return self.adapter.rotate(self.attn, x_BHTD, places_BHT, table)

    def rotate_back(self, x_BHTD: Tensor, places_BHT: Tensor, table: Any) -> Tensor:
        """Undo `rotate`."""
        return self.adapter.rotate_back(self.attn, x_BHTD, places_BHT, table)

    def mean_rotation(self, places_BF: Tensor, like: Tensor, table: Any) -> Tensor:
        """Return the mean of the rotary matrices [B,1,D,D] at the next F positions, `places_BF`.

        `Call.mean_rotation` calls it: policies that score keys by expected later queries multiply the mean unrotated query by
        it. like: a tensor of the dtype and on the device of the result. table: cosines and sines by position.
        """
        limit = self.adapter.max_positions(getattr(self.attn, "config", None))
        places_BF = places_BF if limit is None else places_BF.clamp(max=limit - 1)  # beyond the model's table its last one
        return mean_rotation(functools.partial(self.rotate, table=table), places_BF, like)

    def head_values(self, v_BHTD: Tensor) -> Tensor:
        """Return the values [B,N,T,D] that the output projection is applied to, by KV head or (N = H*G) by query head."""
        return self.adapter.head_values(self.attn, v_BHTD)

    def output_rows(self, like: Tensor, group: int, parallel: Parallel = WHOLE) -> tuple[Tensor, bool]:
        """Return the output projection W_O by query head [N,G,D,E], and whether it was measured.

        `Call._output_rows` calls it when scores or selections multiply values by W_O. The weight of a plain projection is read,
        and a view of it kept in `_rows` for the next call. Any other projection (LoRA, quantized, offloaded) is measured: it is
        applied to unit vectors, and its bias subtracted. Processes that share a projection by rows take turns, since it sums
        their outputs.

        Args:
            like: values [B,N,T,D] to which W_O will be applied, for dtype, device, N and D.
            group: G, query heads for each of the N.
            parallel: the share of this process in the layer's heads.
        """
        module = getattr(self.attn, self.adapter.projection) if self.adapter.projection else None
        if self._rows is not None and self._rows[0] is getattr(module, "weight", None) and type(module) is nn.Linear:
            return self._rows[1], False
        (_, N, _, D), measured = like.shape, False
        inputs = N * group * D  # of the projection
        plain = _plain_weight(module, inputs)
        if plain is not None:
            weight = plain
        else:
            unit, measured = torch.eye(inputs, dtype=like.dtype, device=like.device)[None], True
            run = module if module is not None else lambda y: self.adapter.output(self.attn, y)
            mixed = torch.autocast(like.device.type) if self.autocast else nullcontext()
            with mixed, _set_evaluating(self.attn):  # a dropout on the way is no part of the weight
                # under tensor parallelism the projection sums over processes, so all call it together: at each turn one of
                # them gives unit vectors and the others zeros. What zeros give is the bias, which is subtracted
                answers = [run(unit if turn == parallel.rank else unit * 0) for turn in range(parallel.size)]
                weight = (answers[parallel.rank] - run(unit[:, :1] * 0))[0]
        rows = rearrange(weight.detach(), "(n g d) e -> n g d e", n=N, g=group)
        if plain is not None and weight._base is getattr(module, "weight", None):  # a view, which changes with the weight
            self._rows = weight._base, rows
        return rows, measured
