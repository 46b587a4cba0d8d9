"""Does a token's attention get steady [RoCo 4.3, Figure 3, "persistence of attention robustness"]?

For a token of the text: the standard deviation of the attention that it got from its next 1, 2, 3 ... queries, its own row left
out. Every point of the curve is a mean over the same tokens: the first half of the text, each followed for half of the text (or
as far as a sliding window reaches). Attention is averaged over the query heads of a KV head first, as RoCo's scope does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import reduce
from torch import Tensor

from kvpatch.errors import KVPatchError

from .observe import Observing, by_model, kv_heads, look, plot, recipes
from .rows import alike
from .task import FULL, Request, Sample, Setting, Subject

EARLY, FALLEN = 50, 0.9
"""The paper's brief phase, in queries; a deviation has declined when it ends at or below this part of its peak."""
POINTS = tuple(2**i for i in range(1, 13))


def deviations(a_BHTT: Tensor, horizon: int) -> Tensor:
    """std[b,h,i,m-1] of a[i+1..i+m, i] for m = 1..horizon, of the tokens i that have as many queries behind them."""
    return _running(_received(a_BHTT, horizon))


def _received(a_BHTT: Tensor, horizon: int) -> Tensor:
    """What token i gets from its m-th later query, [B,H,I,M]."""
    token = torch.arange(a_BHTT.shape[-1] - horizon, device=a_BHTT.device)[:, None]
    return a_BHTT[:, :, token + 1 + torch.arange(horizon, device=a_BHTT.device), token]


def _running(p_BHIM: Tensor) -> Tensor:
    count = torch.arange(1, p_BHIM.shape[-1] + 1, device=p_BHIM.device)
    mean, square = p_BHIM.cumsum(-1) / count, p_BHIM.square().cumsum(-1) / count
    return (square - mean.square()).clamp_min(0).sqrt()


def phases(std_BHIM: Tensor, early: int) -> dict[str, Tensor]:
    """Of each token, [B,H,I]: the query at which its deviation peaks, whether that is early, whether it falls again."""
    top, at = std_BHIM.max(-1)
    M = std_BHIM.shape[-1]
    return {
        "peak_step": at + 1.0,
        "share_early": (at < early).double(),
        "share_fifth": (at < M // 5).double(),
        "declines": ((top > 0) & (std_BHIM[..., -1] <= FALLEN * top)).double(),
    }


class Robustness(Observing):
    name = "robustness"
    about = "Does the deviation of a token's attention rise for a few queries, and then fall?"
    source = '[RoCo 4.3, Figure 3, "persistence of attention robustness"]'
    metric = "share_early"
    metrics: ClassVar[dict[str, str]] = {
        "share_early": f"share of tokens whose deviation peaks within {EARLY} queries (-o early=)",
        "share_fifth": "share of tokens whose deviation peaks within the first fifth of the queries looked at",
        "declines": "share of tokens whose deviation ends at least 10% below its peak",
        "peak_step": "query at which a token's deviation peaks, mean over tokens",
        "curve_peak": "query at which the mean deviation peaks",
        "shuffled_early": "share_early of the same attention with the queries in random order",
        "shuffled_declines": "declines of the same attention with the queries in random order",
        **{f"std_{m}": f"deviation over the next {m} queries, mean over tokens, heads and layers" for m in POINTS},
    }
    better = ""
    policies = ()
    count = 32
    options: ClassVar[dict[str, Any]] = {**Observing.options, "early": EARLY}

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        """A finding about the model: policies make no difference."""
        return [FULL]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        early = self.option(request, "early")
        if not isinstance(early, int) or early < 1:
            raise KVPatchError(f"early={early!r} must be a number of queries, 1 or more.")
        return super().samples(subject, request, seed)

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        for chunk in alike(samples, request.batch):
            T = len(chunk[0].data[0])
            found: dict[str, list[Tensor]] = {}
            for layer in look(subject.model, self.tokens(subject, chunk), 0)[0]:
                a = reduce(layer.attention(), "b (h g) t i -> b h t i", "mean", h=kv_heads(subject.model, layer))
                width = int(layer.x_BNRT[0, 0, -1].isfinite().sum())
                for name, value in self._of(a, min(T // 2, width - 1), request, seed).items():
                    found.setdefault(name, []).append(value)
            means = {name: torch.stack(parts).mean(0) for name, parts in found.items()}
            curve = means.pop("curve")
            means |= {f"std_{m}": curve[:, m - 1] for m in POINTS if m <= curve.shape[1]}
            means["curve_peak"] = curve.argmax(-1) + 1.0
            yield from ({name: value[b].item() for name, value in means.items()} for b in range(len(chunk)))

    def _of(self, a_BHTT: Tensor, horizon: int, request: Request, seed: int) -> dict[str, Tensor]:
        """One layer's figures [B], and its curve [B,M]."""
        got, early = _received(a_BHTT, horizon), self.option(request, "early")
        draws = torch.rand(got.shape[2:], generator=torch.Generator().manual_seed(seed))
        std, mixed = _running(got), _running(got.gather(-1, draws.argsort(-1).to(got.device).expand_as(got)))
        own, shuffled = phases(std, early), phases(mixed, early)
        own["shuffled_early"], own["shuffled_declines"] = shuffled["share_early"], shuffled["declines"]
        return {name: one.mean((1, 2)) for name, one in own.items()} | {"curve": std.mean((1, 2))}

    def pictures(self, table: Any, out: Path) -> None:
        """Figure 3: the mean curve, a line per model."""
        lines = by_model(table, {f"std_{m}": m for m in POINTS})
        plot(
            lines, out / "robustness-curve.png", "How a token's attention varies, a line per model",
            "later queries looked at", "standard deviation of the attention from them", kinds=recipes(table), log=True,
        )  # fmt: skip
