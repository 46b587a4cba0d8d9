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

Attentions = list[tuple[nn.Module, Adapter]]  # with what each layer's queries see; a reader's see what its source's do


class Evictions:
    """Record of what each head holds, noted pass by pass; `n` tokens of `total` are the prompt, `pads_B` of them padding."""

    def __init__(self, n: int, total: int, pads_B: Tensor | None = None) -> None:
        self.n, self.total, self.pads_B = n, total, pads_B
        self.passes: list[list[Tensor]] = []
        self.groups: list[int] = []

    def note_held(self, cache: EvictingCache) -> None:
        """Note the positions that each layer holds after a pass."""
        held = [cache.positions(layer).cpu() for layer in range(len(cache.layers))]
        self.groups = [find_steps(cache).calls[layer].group for layer in range(len(cache.layers))]
        if self.pads_B is not None and not cache.settings.by_columns:
            held = [one + self.pads_B[:, None, None] * (one >= 0) for one in held]
        self.passes.append(held)

    def list_seen(self) -> list[Tensor]:
        """Return what each query sees, bool [B,H*G,Q,T] per layer: all before it in the prompt, then what was held."""
        causal = torch.ones(self.total, self.total, dtype=torch.bool, device="cpu").tril()
        return [self._see_layer(causal, index) for index in range(len(self.passes[0]))]

    def _see_layer(self, causal_QT: Tensor, index: int) -> Tensor:
        """Return which tokens each query of a layer saw, [B,N,Q,T]."""
        rows = [one[index] for one in self.passes[:-1]]  # what the last pass left, no query sees
        B, H = rows[0].shape[:2]
        seen = causal_QT.expand(B, H, -1, -1).clone()
        for step, positions_BHT in enumerate(rows):
            held = torch.zeros(B, H, self.total + 1, dtype=torch.bool, device="cpu")
            held.scatter_(-1, positions_BHT.clamp(min=-1) % (self.total + 1), True)  # -1, an empty slot, falls behind the end
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
    """Run the unpatched model; each layer's queries see what `seen` says, within the layer's window.

    It runs in one pass; a hybrid reads the prompt and then token by token, since that is another computation for its states.

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
    attentions = [pair for _, _, pair in target.modules()]
    seen = [seen[layer] for layer, _, _ in target.modules()]
    pads_B = torch.zeros(1, dtype=torch.int64, device="cpu") if mask_BT is None else (mask_BT.cumsum(-1) == 0).sum(-1).cpu()
    with _put_masks(attentions, seen, pads_B):
        if target.stack is not None and target.stack.states:
            return feed(model, ids_BT, n, mask_BT).logits_BSV
        return widen(predictions(model(ids_BT, attention_mask=mask_BT, use_cache=False, **places)))[:, n - 1 :]


@contextmanager
def _put_masks(attentions: Attentions, seen: list[Tensor], pads_B: Tensor) -> Iterator[None]:
    """Mask the queries of each attention module by `seen` inside the with-block, by a pre-hook."""
    hooks = []
    try:
        for (module, adapter), seen_BNQT in zip(attentions, seen, strict=True):
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
    """Pre-hook of an attention module that hides more in its own mask, which may hold ALiBi too."""

    def __init__(self, window: int | None, seen_BNQT: Tensor, pads_B: Tensor, disguised: bool = False) -> None:
        at_BT = torch.arange(seen_BNQT.shape[-1], device="cpu") - pads_B[:, None]
        self.seen = keep_in_window(seen_BNQT, window, at_BT[:, None, None], at_BT[:, None, :, None])
        self.window, self.read, self.disguised = window, 0, disguised

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = parameters(type(module))  # type: ignore[arg-type]
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        name = "attention_mask" if "attention_mask" in names else next(name for name in names if name.endswith("mask"))
        hidden, own = call.pop(names[0]), call.get(name)
        mask = self._hide_columns(own, self._of_pass(own, hidden.shape[1]).to(hidden.device), hidden)
        call[name] = mask.as_subclass(_OneMask) if self.disguised else mask
        return (hidden,), call

    def _of_pass(self, own: Tensor | None, Q: int) -> Tensor:
        """Return the mask of the pass's Q queries over the keys that the module's cache has, perhaps a window's alone."""
        start, self.read = self.read, self.read + Q
        keys = own.shape[-1] if own is not None else self.window if Q == 1 else None
        return self.seen[:, :, start : self.read, : self.read][..., -(keys or 0) :]

    def _hide_columns(self, own: Tensor | None, seen_BNQT: Tensor, hidden_BQE: Tensor) -> Tensor:
        if own is not None and own.dtype == torch.bool:
            return own & seen_BNQT if own[0, 0, -1, -1] else own | ~seen_BNQT  # a token sees itself: so it says what True means
        own = torch.zeros_like(seen_BNQT, dtype=hidden_BQE.dtype) if own is None else own
        mask = own.masked_fill(~seen_BNQT, torch.finfo(own.dtype).min)
        return mask.expand(len(hidden_BQE), -1, -1, -1)


@torch.no_grad()
def measure_rounding(model: Any, mixers: Sequence[nn.Module], ids_BT: Tensor, places: dict[str, Tensor]) -> float:
    """Return how far logits move if every number that `mixers` return is off by one unit in the last place.

    That is what another order of summation may change. The result is a share of the largest logit, which counts as at least 1;
    it is at least one unit itself. In float64 the unit is float32's, since some models compute softmax in float32 regardless.

    mixers: the modules of attention, and those that stand in its place in a hybrid's other layers.
    """
    draw = torch.Generator().manual_seed(0)

    def off(module: nn.Module, args: Any, out: Any) -> Any:
        y, rest = (out, None) if isinstance(out, Tensor) else (out[0], out[1:])
        sign = torch.randint(0, 2, y.shape, generator=draw, device="cpu").to(y) * 2 - 1
        y = y * (1 + _find_unit(y.dtype) * sign)
        return y if rest is None else (y, *rest)

    expected = widen(predictions(model(ids_BT, use_cache=False, **places)))
    hooks = [module.register_forward_hook(off) for module in mixers]
    try:
        moved = widen(predictions(model(ids_BT, use_cache=False, **places)))
    finally:
        for hook in hooks:
            hook.remove()
    return max(_find_unit(model.dtype), float((moved - expected).abs().max()) / max(1.0, float(expected.abs().max())))


def _find_unit(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
