"""Bits or tokens? Recall at equal bytes: k of the text in 16 bits, or what the same bytes hold in 8 or in 4.

Models run in bfloat16, so that 16 bits are 16. The tokens follow from the bytes as `k="...B"` of patched() counts them, scales
and zeros included: with heads of 32 numbers 1.8 times the tokens in 8 bits and 3.2 times in 4, at most all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvpatch.arch.adapter import dtype_of
from kvpatch.hooks.target import Target
from kvpatch.policies.budgets import share

from ..settings import Setting
from .recall import Recall
from .task import FIVE, SMALL, UNPATCHED, Sample, set_policy

BITS = (16, 8, 4)


def label_bits(policy: str, bits: int) -> str:
    """The label of a setting."""
    return f"{policy}, {bits} bits"


class Bits(Recall):
    """A setting's `k` is the share of the text that its bytes hold in 16 bits."""

    name = "bits"
    about = "8 or 4 bits for each key and value at the bytes of 16: more tokens, each of them coarser."
    budgets = (0.1, 0.2)
    policies = ("h2o", "roco", "snapkv", "adakv")
    models = FIVE
    count = 16

    def settings(self, policies: tuple[str, ...] = ()) -> list[Setting]:
        """Each policy with each number of bits."""
        return [UNPATCHED] + [
            set_policy(policy, k, SMALL.get(policy, {}) | {"bits": bits}, label_bits(policy, bits))
            for k in self.budgets
            for policy in policies or self.policies
            for bits in BITS
        ]

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Give each scenario the bytes of its own prompts, which are equally long."""
        model.to(torch.bfloat16)
        target = Target.find(model)
        token = len(target.attentions) * target.bytes_per_token(16, dtype_of(target.decoder))
        for scenario in dict.fromkeys(sample.group["scenario"] for sample in samples):
            here = [sample for sample in samples if sample.group["scenario"] == scenario]
            n = here[0].data.rows.prompt_length
            way = setting if setting == UNPATCHED else replace(setting, k=f"{share(setting.k, n) * token}B")
            yield from super().run(model, way, here)
