"""What the measures of attention share: texts, one look at the full cache, and what a policy holds at every step.

Dimension key: B rows, N query heads, H KV heads, G query heads of a KV head, T tokens of a text, of which the first n are read
at once and the last Q one by one; R rows of attention that are looked at; S = 1 + Q moments: after the prompt and each further
token.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import repeat
from torch import Tensor
from transformers import PreTrainedModel

from kvpatch.arch import adapter_of, list_architectures
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.teacher_forcing import wide
from kvpatch.plotting import new_figure, save, style
from tools.evaluation import perturbation

from .rows import rows_of
from .task import Request, Sample, Setting, Subject, Task, digest

LENGTH, STEPS = 256, 48
Lines = dict[str, list[tuple[float, float]]]
"""Of a picture: points by label."""
RETAINED = 8
"""Batches whose full attention is kept at hand while settings follow each other."""


# ---- the full cache, and a policy's ----


def look(model: PreTrainedModel, tokens_BT: Tensor, start: int) -> tuple[list[perturbation.Layer], Tensor]:
    """perturbation.look for any device. Raises KVPatchError for a model without an adapter."""
    if not any(adapter_of(module) for module in model.modules()):
        raise KVPatchError(f"No adapter for {type(model).__name__}. Known architectures: {', '.join(list_architectures())}.")
    with tokens_BT.device:  # masks are made where tensors are made by default
        return perturbation.look(model, tokens_BT, start)


def kv_heads(model: PreTrainedModel, layer: perturbation.Layer) -> int:
    return getattr(model.config, "num_key_value_heads", None) or layer.x_BNRT.shape[1]


@dataclass(frozen=True)
class Watched:
    """held: of each layer which tokens its KV heads hold at every moment, bool [B,H,S,T]; logits_BSV of those moments."""

    held: list[Tensor]
    logits_BSV: Tensor

    def asked(self, layer: int, n: int, heads: int) -> Tensor:
        """What each query behind the prompt attends to, bool [B,N,Q,T]: what is held when it comes, and itself."""
        held_BHQT = self.held[layer][:, :, :-1].clone()
        Q = held_BHQT.shape[2]
        steps = torch.arange(Q, device=held_BHQT.device)
        held_BHQT[:, :, steps, n + steps] = True
        return repeat(held_BHQT, "b h q t -> b (h g) q t", g=heads // held_BHQT.shape[1])


@torch.no_grad()
def watch(model: Any, setting: Setting, tokens_BT: Tensor, n: int, seed: int = 0) -> Watched:
    """Feed rows without padding as kvpatch.evaluation.teacher_forcing does, and note after every forward what is held."""
    T = tokens_BT.shape[1]
    past, logits, moments = None, [], []
    with setting.told(T - n).patched(model, seed):
        for start, stop in [(0, n), *((t, t + 1) for t in range(n, T))]:
            out = model(tokens_BT[:, start:stop], past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(wide(out.logits[:, -1:]))
            moments.append([_held(past, layer, stop, T) for layer in range(len(past.layers))])
    return Watched([torch.stack(one, 2) for one in zip(*moments, strict=True)], torch.cat(logits, 1))


def _held(cache: Any, layer: int, seen: int, T: int) -> Tensor:
    """bool [B,H,T]; a cache that never evicts holds all it has seen."""
    if not hasattr(cache, "positions"):
        B, H = cache.layers[layer].keys.shape[:2]
        return (torch.arange(T, device=cache.layers[layer].keys.device) < seen).expand(B, H, T)
    at_BHK = cache.positions(layer)
    held = torch.zeros(*at_BHK.shape[:2], T + 1, dtype=torch.bool, device=at_BHK.device)
    return held.scatter_(-1, at_BHK.where(at_BHK >= 0, T), True)[..., :T]


# ---- tasks that look ----


class Memory:
    """The last few results of a costly call on one model: the settings of a batch follow each other and share them."""

    def __init__(self, size: int = RETAINED) -> None:
        self.size, self.found = size, dict[Hashable, Any]()
        self.model: Any = None

    def get(self, model: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        if self.model is not model:
            self.model = model
            self.found.clear()
        if key not in self.found:
            value = make()
            while len(self.found) >= self.size:
                self.found.pop(next(iter(self.found)))
            self.found[key] = value
        return self.found[key]


class Observing(Task):
    """A task over texts without padding, of `length` tokens, the last `steps` of which are fed one by one.

    A sample's data begins with its tokens [T]. The texts of the shipped models are recall's, of the code model held-out source;
    of any other, windows of --data.
    """

    options: ClassVar[dict[str, Any]] = {"length": LENGTH, "steps": STEPS}

    def __init__(self) -> None:
        self.looks = Memory()

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        length, steps = self.option(request, "length"), self.option(request, "steps")
        if not all(isinstance(number, int) for number in (length, steps)) or not 0 < steps < length:
            raise KVPatchError(f"steps={steps!r} must be 1 or more and less than length={length!r}, the tokens of a text.")
        rows_BT = rows_of(subject, request, seed, request.count or self.count, length)
        return [Sample(f"{i:03}", length - steps, (row,), {}, digest(row)) for i, row in enumerate(rows_BT)]

    def look(self, subject: Subject, chunk: list[Sample], start: int) -> tuple[list[perturbation.Layer], Tensor]:
        """The full cache's layers for the queries from `start` on; remembered."""
        key = start, *(sample.digest for sample in chunk)
        return self.looks.get(subject.model, key, lambda: look(subject.model, self.tokens(subject, chunk), start))

    @staticmethod
    def tokens(subject: Subject, chunk: list[Sample]) -> Tensor:
        return torch.stack([sample.data[0] for sample in chunk]).to(subject.model.device)


def by_model(table: Any, points: Mapping[str, float]) -> Lines:
    """What was measured of the full cache: a line per model through these metrics at these places."""
    parts = {model: table.where(model=model) for model in table.models}
    return {model: _line(part, ("full", 1.0), points) for model, part in parts.items()}


def recipes(table: Any) -> dict[str, str]:
    """The recipe of each model; models of one recipe are drawn alike."""
    return {line["model"]: line["recipe"] for line in table.lines}


def by_setting(table: Any, k: Any, points: Mapping[str, float]) -> Lines:
    """The same of every setting at budget k."""
    return {name: _line(table, (name, k), points) for name in table.names}


def _line(table: Any, cell: tuple[str, Any], points: Mapping[str, float]) -> list[tuple[float, float]]:
    found = ((x, table.mean(cell, name)) for name, x in points.items())
    return sorted((x, one.mean) for x, one in found if one is not None)


def plot(
    lines: Lines, path: Path, title: str, across: str, up: str, *, kinds: Mapping[str, str] | None = None, log: bool = False
) -> None:
    """Draw a line per model or setting. kinds: what each line is one of, such as the models' recipes; None for settings."""
    axes = new_figure(figsize=(8, 4.6), layout="constrained").add_subplot()
    seen = list(dict.fromkeys(kinds.values())) if kinds else []
    for label, points in lines.items():
        if points:
            kind = kinds[label] if kinds else label
            colour, marker = (f"C{seen.index(kind)}", "osD^vP"[seen.index(kind) % 6]) if kinds else style(label)
            dashes = "--" if label.startswith("critical") else "-"
            named = axes.get_legend_handles_labels()[1]
            axes.plot(
                *zip(*points, strict=True), marker=marker, ms=4, color=colour, ls=dashes, label="_" if kind in named else kind
            )
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(across)
    axes.set_ylabel(textwrap.fill(up, 46))
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    save(axes.figure, path)
