"""How little of the attention matters, and how much of it a policy keeps [Keyformer 2.2, Figures 3a and 3b].

The queries are those behind the prompt, as while text is generated; their attention is the full cache's, every query head's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpatch.errors import KVPatchError

from .observe import Observing, by_model, plot, recipes, watch
from .rows import alike
from .task import Request, Sample, Setting, Subject

POINTS = (1, 2, 5, *range(10, 100, 10))
"""Per cent of the tokens, for the mass that they hold."""
FEW, MOST, DEEP = 0.01, 0.9, 64
"""The share of a row's maximum below which a key hardly counts; the part of the mass that is sought; layers that are named."""


def below(x_BNRT: Tensor, threshold: float) -> Tensor:
    """Share of the keys a row sees that get less than `threshold` times its maximum, [B,N,R]."""
    a = (x_BNRT - x_BNRT.amax(-1, keepdim=True)).exp()
    seen = x_BNRT.isfinite()
    return ((a < threshold) & seen).sum(-1).double() / seen.sum(-1)


def held_by_top(x_BNRT: Tensor, percent: float) -> Tensor:
    """Attention of the `percent` of its keys that a row attends to most, at least one of them, [B,N,R]."""
    sums = x_BNRT.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    keys = x_BNRT.isfinite().sum(-1, keepdim=True)
    count = (keys * percent / 100 + 1e-6).floor().long().clamp_min(1)
    return sums.gather(-1, count - 1)[..., 0]


def needed(x_BNRT: Tensor, mass: float) -> Tensor:
    """The least share of its keys that holds `mass` of a row's attention, [B,N,R]."""
    sums = x_BNRT.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    return ((sums < mass - 1e-9).sum(-1).double() + 1) / x_BNRT.isfinite().sum(-1)


class Sparsity(Observing):
    name = "sparsity"
    about = "How many keys get almost no attention, how few hold most of it, and how much of it does a policy keep?"
    source = "[Keyformer 2.2, Figures 3a and 3b]"
    metric = "mass"
    metrics: ClassVar[dict[str, str]] = {
        "mass": "share of the full cache's attention that falls on what the policy holds when the query comes",
        "held": "share of the tokens so far that the query finds; policies that evict once keep all that is generated",
        "sparsity": "share of keys that get less than 1% of their row's maximum",
        "tokens_for_90": "share of its keys that hold 90% of a row's attention",
        **{f"top_{p}": f"attention held by the {p}% of its keys that a row attends to most" for p in POINTS},
        **{f"layer_{i}_sparsity": f"sparsity of layer {i}" for i in range(DEEP)},
    }
    budgets = (0.1, 0.3, 0.5)
    count = 16
    options: ClassVar[dict[str, Any]] = {**Observing.options, "thresholds": ()}

    def __init__(self) -> None:
        super().__init__()
        self.metrics = dict(type(self).metrics)

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        for threshold in self._thresholds(request):
            self.metrics[f"sparsity_{threshold:g}"] = f"share of keys that get less than {threshold:g} of their row's maximum"
        return super().samples(subject, request, seed)

    def _thresholds(self, request: Request) -> tuple[float, ...]:
        given = self.option(request, "thresholds")
        found = (given,) if isinstance(given, int | float) else tuple(given)
        if not all(isinstance(one, int | float) and 0 < one < 1 for one in found):
            raise KVPatchError(f"thresholds={given!r} must be shares of a row's maximum, as in -o thresholds=0.001,0.05.")
        return found

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        for chunk in alike(samples, request.batch):
            n = chunk[0].n
            layers, _ = self.look(subject, chunk, n)
            if setting.policy == "full":
                found = self._shape([layer.x_BNRT for layer in layers], request)
            else:
                watched = watch(subject.model, setting, self.tokens(subject, chunk), n, seed)
                kept = [watched.asked(at, n, layer.x_BNRT.shape[1]) for at, layer in enumerate(layers)]
                parts = [layer.attention().mul(one).sum(-1) for layer, one in zip(layers, kept, strict=True)]
                seen = torch.arange(n + 1, kept[0].shape[-1] + 1, device=kept[0].device)
                held = torch.stack([(one.sum(-1) / seen).mean((1, 2)) for one in kept])
                found = {"mass": torch.stack(parts).mean((0, 2, 3)), "held": held.mean(0)}
            yield from ({name: value[b].item() for name, value in found.items()} for b in range(len(chunk)))

    def _shape(self, layers: list[Tensor], request: Request) -> dict[str, Tensor]:
        """What is known without a policy, each [B]: means over rows, heads and layers."""
        by_layer = torch.stack([below(x, FEW).mean((1, 2)) for x in layers])
        found = {"sparsity": by_layer.mean(0), "tokens_for_90": self._mean(needed, layers, MOST)}
        found |= {f"sparsity_{t:g}": self._mean(below, layers, t) for t in self._thresholds(request)}
        found |= {f"top_{p}": self._mean(held_by_top, layers, p) for p in POINTS}
        return found | {f"layer_{i}_sparsity": one for i, one in enumerate(by_layer[:DEEP])}

    @staticmethod
    def _mean(measure: Callable[[Tensor, float], Tensor], layers: list[Tensor], value: float) -> Tensor:
        return torch.stack([measure(x, value).mean((1, 2)) for x in layers]).mean(0)

    def pictures(self, table: Any, out: Path) -> None:
        """Figure 3b: the attention that the top p per cent hold, a line per model."""
        lines = by_model(table, {f"top_{p}": p for p in POINTS})
        plot(
            lines, out / "sparsity-mass.png", "Attention on the keys that get most, a line per model",
            "keys that a row attends to most, %", "share of the row's attention", kinds=recipes(table),
        )  # fmt: skip
