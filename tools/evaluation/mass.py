"""Budgets by mass beside fixed ones that hold as many tokens on average, on the two texts of `kvpatch demo`.

`python -m tools.evaluation.mass` prints the table of docs/guides/memory.md, and rows beside it: a minute on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kvpatch
from kvpatch.cli.demo import source_file
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer
from kvpatch.cli.needles import Text, task_needles
from kvpatch.evaluation.divergence import Comparison
from kvpatch.evaluation.teacher_forcing import feed
from tools.docs_tables import markdown

CASES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "snapkv": ((0.5, 0.7, 0.9), {}),
    "h2o": ((0.7, 0.9, 0.97), {"recent": 16}),
    "roco": ((0.7, 0.9, 0.97), {"recent": 10, "protected": 0}),
}
"""Masses of each policy, and its options: sizes in tokens, since a mass gives no size that a share could be of."""


@dataclass(frozen=True)
class Reader:
    """A model and its text: how well it does under a budget."""

    model: Any
    text: Text

    def held(self, policy: kvpatch.Policy, k: Any) -> float:
        """Return the tokens that a head holds on average, without those that nothing evicts."""
        with torch.no_grad(), kvpatch.patched(self.model, policy, k) as patch:
            feed(self.model, self.text.ids_BT, self.text.n, self.text.mask_BT)
            mean = float(patch.report().held().float().mean())
        return mean - (self.text.ids_BT.shape[1] - self.text.n if policy.schedule == "prompt" else 0)

    def answers(self, policy: kvpatch.Policy, k: Any) -> float:
        """Return the share of questions that greedy decoding answers."""
        with torch.no_grad(), kvpatch.patched(self.model, policy, k):
            fed = feed(self.model, self.text.ids_BT, self.text.n, self.text.mask_BT)
        return float(self.text.right(fed.logits_BSV).double().mean())

    def divergence(self, policy: kvpatch.Policy, k: Any) -> float:
        """Return the KL divergence from the full cache's predictions, in nats per token."""
        return Comparison(self.model, self.text.ids_BT, self.text.n).figures(policy, k).kl

    def pair(self, measure: str, policy: kvpatch.Policy, mass: float) -> tuple[float, float]:
        """Return a measure under a mass, and under the fixed budget of the same mean size."""
        k, measured = kvpatch.Mass(mass), getattr(self, measure)
        return measured(policy, k), measured(policy, max(1, round(self.held(policy, k))))


def questions() -> Reader:
    """Return llama-0 and its prompts with questions."""
    return Reader(load_model(str(MODELS / "llama-0"), "float32"), task_needles())


def source() -> Reader:
    """Return llama-python and one excerpt of a source file."""
    name = str(MODELS / "llama-python")
    model = load_model(name, "float32")
    text = source_file(model, load_tokenizer(name))
    return Reader(model, Text(text.what, text.ids_BT[:1], text.n))


def rows(readers: dict[str, Reader], cases: dict[str, Any] = CASES) -> Iterator[tuple[str, ...]]:
    """Yield policy, mass, and for each measure its value under the mass and at equal size."""
    for name, (masses, options) in cases.items():
        policy = kvpatch.get_policy(name).with_options(**options)
        for mass in masses:
            pairs = [reader.pair(measure, policy, mass) for measure, reader in readers.items()]
            yield (name, f"{mass:g}", *(f"{value:.3f}" for pair in pairs for value in pair))


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = rows({"answers": questions(), "divergence": source()})
    print(markdown(("policy", "mass", "answers", "at equal size", "KL", "at equal size"), table))
