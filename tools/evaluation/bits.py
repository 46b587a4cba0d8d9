"""Bits or tokens? Recall at equal bytes: k of the text in 16 bits, or what the same bytes hold in 8 or in 4.

Models run in bfloat16, so that 16 bits are 16. The tokens follow from the bytes as `k="...B"` of patched() counts them, scales
and zeros included: with heads of 32 numbers 1.8 times the tokens in 8 bits and 3.2 times in 4, at most all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from kvpatch.arch.adapter import dtype_of
from kvpatch.hooks.target import Target
from kvpatch.policies.budgets import share

from .recall import Recall
from .task import FULL, SMALL, Request, Sample, Setting, Subject

BITS = (16, 8, 4)


def label(policy: str, bits: int) -> str:
    return f"{policy}, {bits} bits"


class Bits(Recall):
    """A setting's `k` is the share of the text that its bytes hold in 16 bits."""

    name = "bits"
    about = "8 or 4 bits for each key and value at the bytes of 16: more tokens, each of them coarser."
    source = ""
    budgets = (0.1, 0.2)
    policies = ("h2o", "roco", "snapkv", "adakv")
    count = 16
    options: ClassVar[dict[str, Any]] = Recall.options | {"scenarios": "in,after"}

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        return [FULL] + [
            Setting(policy, k, SMALL.get(policy, {}) | {"bits": bits}, label(policy, bits))
            for k in request.budgets or self.budgets
            for policy in request.policies or self.policies
            for bits in BITS
        ]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        subject.model.to(torch.bfloat16)
        return super().samples(subject, request, seed)

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        """Give each scenario the bytes of its own prompts, which are equally long."""
        target = Target.find(subject.model)
        token = len(target.attentions) * target.bytes_per_token(16, dtype_of(target.decoder))
        for scenario in dict.fromkeys(sample.group["scenario"] for sample in samples):
            here = [sample for sample in samples if sample.group["scenario"] == scenario]
            way = setting if setting == FULL else replace(setting, k=f"{share(setting.k, here[0].n) * token}B")
            yield from super().run(subject, way, here, request, seed)
