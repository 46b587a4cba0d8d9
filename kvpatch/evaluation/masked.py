"""The unpatched model with a mask of each layer's own: attention without the tokens that a policy evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..arch.adapter import Adapter
from ..attention.steps import find_steps
from ..cache.cache import EvictingCache
from ..hooks.attention import parameters
from ..hooks.target import Target
from ..policies.windows import keep_in_window
from .teacher_forcing import feed, predictions, widen

Attentions = list[tuple[nn.Module, Adapter]]


class Evictions:
    """Record of the tokens that each head holds, noted pass by pass: a prompt of `n` of `total` tokens, then one by one.

    pads_B: tokens of padding at the start of each row; None for none.
    """

    def __init__(self, n: int, total: int, pads_B: Tensor | None = None) -> None:
        self.n, self.total, self.pads_B = n, total, pads_B
        self.passes: list[list[Tensor]] = []
        self.groups: list[int] = []

    def note_held(self, cache: EvictingCache) -> None:
        """Note the positions that each layer's cache holds, to build masks from.

        `feed` calls it after each pass (`watch`); it changes no cache. Positions become columns of the batch, padding included.
        """
        held = [cache.positions(layer).cpu() for layer in range(len(cache.layers))]
        self.groups = [find_steps(cache).calls[layer].group for layer in range(len(cache.layers))]  # queries per KV head
        if self.pads_B is not None and not cache.settings.by_columns:
            held = [positions + self.pads_B[:, None, None] * (positions >= 0) for positions in held]
        self.passes.append(held)

    def list_seen(self) -> list[Tensor]:
        """Return what each query sees, bool [B,H*G,Q,T] per layer: all before it in the prompt, then what was held."""
        causal = torch.ones(self.total, self.total, dtype=torch.bool, device="cpu").tril()
        return [self._see_layer(causal, index) for index in range(len(self.passes[0]))]

    def _see_layer(self, causal_QT: Tensor, index: int) -> Tensor:
        """Return the mask of a layer, for `list_seen`: which tokens each query saw, bool [B,N,Q,T], by the noted passes.

        causal_QT: True up to the query itself. Queries of the prompt (the first `n`) see all that; each later one sees what
        was held before it, and itself.
        """
        # positions held after each pass: of each, the next query sees these and itself
        held_after = [held_by_layer[index] for held_by_layer in self.passes[:-1]]  # no query sees what the last pass left
        B, H = held_after[0].shape[:2]
        seen = causal_QT.expand(B, H, -1, -1).clone()
        for step, positions_BHT in enumerate(held_after):
            held = torch.zeros(B, H, self.total + 1, dtype=torch.bool, device="cpu")
            held.scatter_(
                -1, positions_BHT.clamp(min=-1) % (self.total + 1), True
            )  # -1, an empty slot, marks the last column, which is cut off
            seen[:, :, self.n + step] &= held[..., :-1]
            seen[:, :, self.n + step, self.n + step] = True
        return seen.repeat_interleave(self.groups[index], 1)

    def count_evicted(self) -> tuple[int, int]:
        """Return the fewest and the most tokens that a head had evicted in the end."""
        held = torch.cat([(positions >= 0).sum(-1).flatten() for positions in self.passes[-1]])
        return self.total - int(held.max()), self.total - int(held.min())


@torch.no_grad()
def predict_masked(
    model: Any,
    target: Target,
    ids_BT: Tensor,
    n: int,
    seen: list[Tensor],
    places: dict[str, Tensor],
    mask_BT: Tensor | None = None,
) -> Tensor:
    """Return the unpatched model's predictions if each layer's queries see what `seen` says, within the layer's window.

    `_predict_masked` and `_predict_padded` check a policy's predictions against them. The text is read in one pass; by a hybrid
    token by token, since one pass computes its states in another way.

    Args:
        model: not patched.
        target: its parts.
        ids_BT: token ids.
        n: tokens of the prompt.
        seen: bool [B,N,Q,T] per layer, for N query heads or 1; B may be 1.
        places: position_ids, if the model takes them.
        mask_BT: 0 for left padding.

    Returns:
        Logits [B,1+T-n,V] after the prompt and after each further token, or hidden states of a model without a head.
    """
    # modules(): the layer whose keys a module uses (it sees what that one sees), whether it only reads them, (module, adapter)
    attentions = [pair for _, _, pair in target.modules()]
    seen = [seen[layer] for layer, _, _ in target.modules()]
    pads_B = torch.zeros(1, dtype=torch.int64, device="cpu") if mask_BT is None else (mask_BT.cumsum(-1) == 0).sum(-1).cpu()
    with _put_masks(attentions, seen, pads_B):
        if target.layer_numbers is not None and target.layer_numbers.states:
            return feed(model, ids_BT, n, mask_BT).logits_BSV
        return widen(predictions(model(ids_BT, attention_mask=mask_BT, use_cache=False, **places)))[:, n - 1 :]


@contextmanager
def _put_masks(attentions: Attentions, seen: list[Tensor], pads_B: Tensor) -> Iterator[None]:
    """Hide keys from the unpatched model's attention modules inside a with-block, by pre-hooks; for `predict_masked`.

    seen: for each module, which keys its queries see. pads_B: tokens of padding at the start of each row.
    """
    hooks = []
    try:
        for (module, adapter), seen_BNQT in zip(attentions, seen, strict=True):
            # one_mask: the module refuses masks that differ by head
            mask = _Masked(adapter.sliding(module), seen_BNQT, pads_B, adapter.one_mask)
            hooks.append(module.register_forward_pre_hook(mask, with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _OneMask(Tensor):
    """A mask with a row for each head [B,H,Q,T] for code that adds it to its logits, but asks for the size [B,1,Q,T] first."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def size(self, dim: int | None = None) -> Any:
        """Return the size of a mask that is the same for all heads."""
        B, _, Q, T = self.shape
        return torch.Size((B, 1, Q, T)) if dim is None else (B, 1, Q, T)[dim]


class _Masked:
    """Pre-hook of an attention module that hides more keys in the mask that the module gets, which may hold ALiBi too."""

    def __init__(self, window: int | None, seen_BNQT: Tensor, pads_B: Tensor, disguised: bool = False) -> None:
        """Note which keys the queries see, of those in the layer's window. disguised: the module refuses masks by head."""
        at_BT = torch.arange(seen_BNQT.shape[-1], device="cpu") - pads_B[:, None]
        self.seen = keep_in_window(seen_BNQT, window, at_BT[:, None, None], at_BT[:, None, :, None])
        self.window, self.read, self.disguised = window, 0, disguised

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's arguments with a mask that also hides evicted keys. torch calls this before each forward()."""
        # the arguments by name, given by position or keyword; the first are the hidden states
        names = parameters(type(module))  # type: ignore[arg-type]
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        name = "attention_mask" if "attention_mask" in names else next(name for name in names if name.endswith("mask"))
        hidden, given = call.pop(names[0]), call.get(name)
        mask = self._hide_keys(given, self._take_rows(given, hidden.shape[1]).to(hidden.device), hidden)
        # disguised: the module refuses a mask that differs by head, unless it seems to be the same for all
        call[name] = mask.as_subclass(_OneMask) if self.disguised else mask
        return (hidden,), call

    def _take_rows(self, given: Tensor | None, Q: int) -> Tensor:
        """Return which of the module's keys the pass's Q queries see, for `__call__`; add Q to `read`, the tokens so far."""
        start, self.read = self.read, self.read + Q
        # keys of the module, the newest ones: as many as its mask has; without a mask, in a decode step, those of its window
        n_keys = given.shape[-1] if given is not None else self.window if Q == 1 else None
        return self.seen[:, :, start : self.read, : self.read][..., -(n_keys or 0) :]

    def _hide_keys(self, given: Tensor | None, seen_BNQT: Tensor, hidden_BQE: Tensor) -> Tensor:
        """Return the mask `given` with the unseen keys hidden too, for `__call__`: bool or added to logits, as `given` is."""
        if given is not None and given.dtype == torch.bool:  # the last query sees itself, which tells what True means
            return given & seen_BNQT if given[0, 0, -1, -1] else given | ~seen_BNQT
        given = torch.zeros_like(seen_BNQT, dtype=hidden_BQE.dtype) if given is None else given
        mask = given.masked_fill(~seen_BNQT, torch.finfo(given.dtype).min)
        return mask.expand(len(hidden_BQE), -1, -1, -1)


@torch.no_grad()
def measure_rounding(model: Any, mixers: Sequence[nn.Module], ids_BT: Tensor, places: dict[str, Tensor]) -> float:
    """Return how far logits move if each number that `mixers` return is off by one unit in the last place: for a tolerance.

    `Checks.__init__` calls it. Another order of summation may move them as far. The result is a share of the largest logit,
    which counts as at least 1; it is at least one unit itself. In float64 the unit is float32's, since some models compute
    softmax in float32 regardless.

    mixers: the modules of attention, and those that stand in its place in a hybrid's other layers. They get hooks meanwhile.
    places: position_ids.
    """
    draw = torch.Generator().manual_seed(0)

    def shift_output(module: nn.Module, args: Any, out: Any) -> Any:
        """Return a mixer's output, each number off by one unit, up or down. torch calls this after its forward()."""
        y, rest = (out, None) if isinstance(out, Tensor) else (out[0], out[1:])
        sign = torch.randint(0, 2, y.shape, generator=draw, device="cpu").to(y) * 2 - 1
        y = y * (1 + _find_unit(y.dtype) * sign)
        return y if rest is None else (y, *rest)

    expected = widen(predictions(model(ids_BT, use_cache=False, **places)))
    hooks = [module.register_forward_hook(shift_output) for module in mixers]
    try:
        moved = widen(predictions(model(ids_BT, use_cache=False, **places)))
    finally:
        for hook in hooks:
            hook.remove()
    return max(_find_unit(model.dtype), float((moved - expected).abs().max()) / max(1.0, float(expected.abs().max())))


def _find_unit(dtype: torch.dtype) -> float:
    """Return one unit in the last place of a number near 1, of float32 in place of float64; for `measure_rounding`."""
    return torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
