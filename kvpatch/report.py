"""What was kept, what it cost, what it saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import EvictingCache


@dataclass
class Report:
    """The state of one cache, taken when a run ended. str() is a table; `to_dict()` for machines; `plot(path)`.

    seen: tokens that went through the cache (columns, padding included). positions: per layer [B,H,T], -1 for an empty
    slot. nbytes: keys and values really allocated; full_nbytes: what a cache that keeps every column would hold.
    """

    policy: str
    schedule: str
    budget: tuple[int | float, ...]
    backend: str
    seen: int
    nbytes: int
    full_nbytes: int
    positions: list[Tensor]

    @classmethod
    def of(cls, cache: EvictingCache) -> Report:
        layers = [layer for layer in cache.layers if layer.is_initialized]
        full = sum(
            tensor.shape[0] * tensor.shape[1] * tensor.shape[3] * tensor.element_size() * layer.seen
            for layer in layers
            for tensor in (layer.keys, layer.values)
        )
        return cls(
            policy=cache.policy.name,
            schedule=cache.policy.schedule,
            budget=cache.budget.per_layer,
            backend="torch",
            seen=cache.get_seq_length(),
            nbytes=cache.nbytes,
            full_nbytes=full,
            positions=[layer.positions[:, :, : layer.used] for layer in layers],
        )

    def held(self) -> Tensor:
        """Tokens held, int64 [L,B,H]."""
        if not self.positions:
            return torch.zeros(0, 0, 0, dtype=torch.long)
        return torch.stack([(positions >= 0).sum(-1).cpu() for positions in self.positions])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            "policy": self.policy,
            "schedule": self.schedule,
            "budget": list(self.budget),
            "backend": self.backend,
            "seen": self.seen,
            "nbytes": self.nbytes,
            "full_nbytes": self.full_nbytes,
            "held": self.held().tolist(),
        }

    def __str__(self) -> str:
        held = self.held()
        rows = [("policy", f"{self.policy} (evicts: {self.schedule})"), ("tokens seen", f"{self.seen}")]
        if held.numel():
            low, high = int(held.min()), int(held.max())
            rows.append(("tokens held per head", f"{low}" if low == high else f"{low} to {high}"))
            share = self.nbytes / self.full_nbytes
            rows.append(("KV bytes", f"{self.nbytes:,} of {self.full_nbytes:,} in full ({share:.0%})"))
        rows.append(("attention by", self.backend))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
