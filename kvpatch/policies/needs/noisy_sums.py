"""Keyformer's statistic: sums of the softmax of noisy logits, at a temperature that rises while text is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor

from ...errors import KVPatchError
from .. import noise
from ..budgets import check_count, is_number
from ..context import Block, NewTokens
from .sums import Sums


@dataclass(frozen=True)
class NoisySums(Sums):
    """The sum "gumbel" of softmax((x + noise) / tau) [Keyformer eq. 9, 10]: see scores.GumbelSoftmax.

    The entry "noise" [B,H,Q,G] holds exp(noise), at least 0, which weights the probabilities.

    Attributes:
        noise: distribution, "gumbel", "gaussian", "constant" or "none".
        resample: draw noise anew for every query.
        tau: temperatures (init, end).
        generation_length: new tokens to assume without generate().
    """

    key: str = "gumbel"
    noise: str = "gumbel"
    resample: bool = False
    tau: tuple[float, float] = (1.0, 2.0)
    generation_length: int = 256
    entry_by_position: ClassVar[bool] = True

    @property
    def fresh(self) -> bool:
        return self.resample and self.noise in ("gumbel", "gaussian")

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        if self.noise not in ("gumbel", "gaussian", "constant", "none"):
            raise KVPatchError(f"noise={self.noise!r} must be 'gumbel', 'gaussian', 'constant' or 'none'.")
        if not (isinstance(self.tau, tuple | list) and len(self.tau) == 2 and all(map(_is_temperature, self.tau))):
            raise KVPatchError(f"tau={self.tau!r} must be two positive temperatures (init, end), such as (1.0, 2.0).")
        check_count("generation_length", self.generation_length, "tokens")
        for name, value in (("resample", self.resample), ("shared", self.across_layers)):
            if not isinstance(value, bool):
                raise KVPatchError(f"{name}={value!r} must be True or False.")
        if not is_number(self.decay) or not 0.0 <= self.decay <= 1.0:
            raise KVPatchError(f"damping={self.decay!r} must be in [0, 1]; 1.0 does not damp.")

    def temperature(self, step: int | Tensor, length: int | Tensor | None) -> float | Tensor:
        """Return the temperature tau that divides noisy logits before their softmax, for `Needs.temperature`.

        Args:
            step: number of the decode step; 0 for the rows of the prompt. A tensor if batch rows have taken different numbers
                of steps, or the step is compiled.
            length: number of new tokens that generate() was asked for; None without generate().
        """
        first, last = self.tau
        if isinstance(step, Tensor) and isinstance(length, Tensor):
            return first if first == last else first + torch.minimum(step, length) * (last - first) / length
        assert not isinstance(length, Tensor)
        length = length or self.generation_length
        return first + min(step, length) * (last - first) / length

    def draw_for_rows(self, block: Block) -> Tensor:
        """Draw noise [N,G,R,M] for each query and key of a block of rows, for `_sum_noisy` under resample=True."""
        head, row, key = block.place()  # numbers of query heads, positions of rows and keys
        head, row, key = head[:, :, None, None], row[:, None, :, None], key[:, None, None, :]
        return self._distribute_noise(noise.uniform(block.seed, block.layer, head, row, key))

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        """Return exp(noise) of keys that enter the cache, to store with them, for `Policy.entry`.

        {} without noise, or if each query draws noise (`fresh`).
        """
        if self.noise == "none" or self.fresh:
            return {}
        (B, H, Q), G, device = new.k_BHQD.shape[:3], new.group, new.k_BHQD.device
        if self.noise == "constant":
            return {"noise": torch.full((B, H, Q, G), noise.GUMBEL_MEAN, device=device).exp()}
        head = rearrange(new.first * G + torch.arange(H * G, device=device), "(h g) -> 1 h 1 g", g=G)
        layer = rearrange(new.layer, "b -> b 1 1 1") if isinstance(new.layer, Tensor) else new.layer
        u = noise.uniform(new.seed, layer, head, -1, rearrange(new.positions_BQ, "b q -> b 1 q 1"))
        return {"noise": self._distribute_noise(u).exp()}  # every step uses the exponential

    def _distribute_noise(self, u: Tensor) -> Tensor:
        """Transform uniform numbers `u` to noise of the distribution that the user chose."""
        return noise.gumbel(u) if self.noise == "gumbel" else noise.gaussian(u)


def _is_temperature(value: object) -> bool:
    return is_number(value) and 0 < value < float("inf")
