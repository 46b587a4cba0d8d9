"""The report: kept tokens, memory, and the backends that ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from . import plotting
from .cache.cache import EvictingCache
from .errors import KVPatchError

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Characters for shares of kept tokens, from none to all in eighths."""


@dataclass
class Report:
    """Snapshot of a cache: the kept tokens, their memory, and the backends that ran.

    `str(report)` is a table for people, `to_dict()` plain numbers for programs, and `plot(path)` a picture.

    Attributes:
        policy: name of the policy.
        schedule: "prompt", "decode" or "both".
        budget: of each layer, tokens (int) or a share of the prompt (float).
        backend: names of the backends that ran.
        seen: columns that went through the cache, padding included.
        nbytes: bytes allocated for keys and values.
        full_nbytes: bytes of a cache that keeps every column.
        positions: of each layer, positions of the held tokens, int64 [B,H,T]; -1 in an empty slot.
        lengths: tokens of each batch row without padding.
        backends: by task, the backend that ran last and the reason against each preferred one.
        mass: of each layer, the share of the prompt's attention on kept tokens, [B,H], over the query rows that the policy
            observed; None if it observed none or kept everything.
        bounds: of each layer, the sliding window in tokens if the layer keeps that instead of a budget, else None.
        part: the heads of this process, if several processes share the model; all numbers here count those alone.
        felt: whether any token was computed after the first eviction; tokens before it have a full cache's logits.

    Example:
        with kvpatch.patched(model, policy="h2o", k=0.5) as patch:
            model.generate(**inputs)
        print(patch.report())
        patch.report().plot("kept.png")
    """

    policy: str
    schedule: str
    budget: tuple[int | float, ...]
    backend: str
    seen: int
    nbytes: int
    full_nbytes: int
    positions: list[Tensor]
    lengths: tuple[int, ...] = ()
    backends: dict[str, tuple[str, str]] = field(default_factory=dict)
    mass: list[Tensor | None] = field(default_factory=list)
    bounds: tuple[int | None, ...] = ()
    part: str = ""
    felt: bool = True

    @classmethod
    def of(cls, cache: EvictingCache) -> Report:
        """Take a snapshot of `cache`, which later changes to the cache do not affect."""
        every: list[Any] = cache.layers
        settings = cache.settings
        filled = [index for index, layer in enumerate(every) if layer.is_initialized]
        layers = [every[index] for index in filled]
        full = sum(
            layer.positions.shape[:2].numel() * tensor.shape[-1] * tensor.element_size() * min(layer.seen, bound or layer.seen)
            for layer, bound in zip(layers, (settings.bounds[index] for index in filled), strict=True)
            for tensor in (layer.kv.keys, layer.kv.values)
        )
        return cls(
            policy=settings.policy.name,
            schedule=settings.policy.schedule,
            budget=settings.budget.per_layer,
            backend=", ".join(dict.fromkeys(name for name, _ in cache.choice.ran.values())) or "torch",
            backends=dict(cache.choice.ran),
            seen=cache.get_seq_length(),
            nbytes=cache.nbytes,
            full_nbytes=full,
            positions=[cache.positions(index) for index in filled],
            lengths=() if cache.seen_B is None else tuple(cache.next_positions()[:, 0].tolist()),
            part="" if settings.parallel.size == 1 else str(settings.parallel),
            mass=[None if layer.mass_BH is None else layer.mass_BH.float().cpu() for layer in layers],
            bounds=tuple(settings.bounds[index] for index in filled),
            felt=cache.turns.count > 1 or cache.counters.steps > 0 or 0 < (settings.block or 0) < cache.get_seq_length(),
        )

    @property
    def share(self) -> float:
        """Bytes of the cache as a share of a full cache's; 1.0 for an empty cache."""
        return self.nbytes / self.full_nbytes if self.full_nbytes else 1.0

    def held(self) -> Tensor:
        """Return the number of tokens that each head holds, int64 [L,B,H]."""
        if not self.positions:
            return torch.zeros(0, 0, 0, dtype=torch.long)
        return torch.stack([(positions >= 0).sum(-1).cpu() for positions in self.positions])

    def kept(self, row: int = 0) -> Tensor:
        """Return the held tokens of one batch row as a bool mask [L,H,T] over the T tokens of its text.

        Raises:
            KVPatchError: there is no such row, or the cache is empty.
        """
        if not self.positions:
            raise KVPatchError("The cache is empty: there is nothing to show. Run the model inside the block first.")
        B, H, _ = self.positions[0].shape
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < B:
            raise KVPatchError(f"row={row!r}: the batch has the rows 0 to {B - 1}.")
        n = self.lengths[row] if self.lengths else 1 + max(int(p[row].max()) for p in self.positions)
        kept = torch.zeros(len(self.positions), H, n + 1, dtype=torch.bool)
        for layer, positions in enumerate(self.positions):
            kept[layer].scatter_(1, positions[row].cpu() % (n + 1), True)  # -1, an empty slot, goes to column n
        return kept[..., :n]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON can hold."""
        return {
            "policy": self.policy,
            "schedule": self.schedule,
            "budget": list(self.budget),
            "backend": self.backend,
            "backends": {task: {"name": name, "why": why} for task, (name, why) in self.backends.items()},
            "part": self.part,
            "seen": self.seen,
            "lengths": list(self.lengths),
            "nbytes": self.nbytes,
            "full_nbytes": self.full_nbytes,
            "held": self.held().tolist(),
            "bounds": list(self.bounds),
            "mass": [None if mass is None else mass.tolist() for mass in self.mass],
            "felt": self.felt,
        }

    def __str__(self) -> str:
        seen = f"{self.seen:,}"
        if self.lengths and min(self.lengths) != self.seen:
            seen += f" columns; the rows' own: {_range(self.lengths)}"
        rows = [("policy", f"{self.policy} (evicts: {_WHEN.get(self.schedule, self.schedule)})"), ("tokens seen", seen)]
        rows.insert(1, ("budget", self._budget()))
        if any(bound is not None for bound in self.bounds):
            rows.append(("sliding layers", self._bounds()))
        if self.part:
            rows.append(("counted here", self.part))
        held = self.held()
        if held.numel():
            per_layer = [_range(layer.flatten().tolist()) for layer in held]
            rows.append(("tokens held per head", _range(held.flatten().tolist())))
            if len(set(per_layer)) > 1:
                rows.append(("  layer by layer", ", ".join(per_layer)))
            rows.append(("KV bytes", f"{self.nbytes:,} of {self.full_nbytes:,} in full ({self.share:.0%})"))
        if not self.felt and self.nbytes < self.full_nbytes:
            rows.append(("felt by", "no token: all were computed before the first eviction, as with a full cache"))
        masses = [mass for mass in self.mass if mass is not None]
        if masses:
            mean, least = torch.stack(masses).mean(), min(float(mass.min()) for mass in masses)
            kept = f"{mean:.1%} of the mass that the prompt's rows gave; least in one head {least:.1%}"
            rows.append(("attention kept", kept))
        rows.append(("attention by", self.backend))
        for task, (name, why) in self.backends.items():
            rows.append((f"  {task}", name + (f" ({why})" if why else "")))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _bounds(self) -> str:
        own = [(layer, bound) for layer, bound in enumerate(self.bounds) if bound is not None]
        windows = _range([bound for _, bound in own])
        return f"{', '.join(str(layer) for layer, _ in own)} hold their own window of {windows}; the policy acts on the others"

    def _budget(self) -> str:
        if self.policy == "full":
            return "all tokens"
        budgets = [_budget(k) for k in self.budget]
        if len(set(budgets)) > 1:
            return f"layer by layer: {', '.join(budgets)}"
        return budgets[0] + (", counting generated tokens only" if self.schedule == "decode" else "")

    def strip(self, row: int = 0, width: int = 64) -> str:
        """Draw one line per layer for a terminal; a character shows the share of tokens kept in its part of the text.

        Args:
            row: of the batch.
            width: characters of a line; a text of fewer tokens gets one character per token.

        Raises:
            KVPatchError: there is no such row, or `width` is not a positive int.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise KVPatchError(f"width={width!r} must be a number of characters, at least 1.")
        kept = self.kept(row).float().mean(1)
        edges = torch.linspace(0, kept.shape[1], min(width, kept.shape[1]) + 1).round().long().tolist()
        lines = []
        for layer, share in enumerate(kept):
            cells = (float(share[a:b].mean()) for a, b in pairwise(edges))
            lines.append(f"layer {layer:>2} |{''.join(map(block, cells))}| {share.mean():.0%}")
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str], row: int = 0, what: str = "kept") -> None:
        """Save a picture of one batch row.

        Args:
            path: file to write, such as "kept.png".
            row: of the batch.
            what: "kept" draws a line per layer and head and a column per token of the text; "budgets" a heat map of the
                number of tokens that each head holds.

        Raises:
            KVPatchError: matplotlib is missing, `path` cannot be written, or there is no such row or picture.
        """
        title = f"{self.policy}: {self._budget()}, {self.share:.0%} of the full cache's bytes"
        if what == "kept":
            plotting.save(plotting.every_head(self.kept(row), title), path)
        elif what == "budgets":
            plotting.save(plotting.budgets(self.kept(row).sum(-1), title), path)
        else:
            raise KVPatchError(f"what={what!r} is no picture; give 'kept' or 'budgets'.")


_WHEN = {"prompt": "after the prompt", "decode": "while generating", "both": "after the prompt and while generating"}


def _range(numbers: tuple[int, ...] | list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _budget(k: int | float) -> str:
    if isinstance(k, int):
        return f"{k:,} tokens"
    return "all tokens" if k == 1.0 else f"{k:g} of the prompt"


def block(share: float) -> str:
    """Return the character for a share in [0, 1]: blank for exactly none, full for exactly all."""
    eighths = round(8 * share)
    return BLOCKS[8 if share >= 1 else 0 if share <= 0 else min(max(eighths, 1), 7)]
