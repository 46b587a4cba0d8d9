"""One choice of a policy at a time, the rest as published: what does it matter?"""

from __future__ import annotations

from typing import Any

from ..settings import Setting
from .recall import Recall
from .task import SMALL, UNPATCHED, set_policy

Variant = tuple[str, str, dict[str, Any]]
"""A label, a policy, and the options that are tried."""

_PLAIN = {"noise": "none", "tau": (1.0, 1.0)}
"""Keyformer without its noise and temperature: the accumulated attention score, which `damping` was tried on."""

FAMILIES: dict[str, tuple[str, list[Variant]]] = {
    "recent": (
        "[Keyformer A.4] the share of the budget for the newest tokens",
        [(f"{share:g}", "keyformer", {"recent": share}) for share in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)],
    ),
    "shared": (
        "[Keyformer Table 3] a score for each layer or one for all",
        [("per layer", "keyformer", {}), ("shared", "keyformer", {"shared": True})],
    ),
    "positions": (
        "[Keyformer Table 3] original positions, or the rank among what is held",
        [(name, policy, {"positions": how}) for policy in ("keyformer", "streaming_llm")
         for how in ("original", "renumbered") for name in (f"{policy}, {how}",)],
    ),
    "damping": (
        "[Keyformer 2.3.3, Figure 5] what multiplies the old accumulated attention score; a fifth of the budget is recent",
        [(f"{factor:g}", "keyformer", _PLAIN | {"damping": factor, "recent": 0.2}) for factor in (1.0, 0.975, 0.95, 0.9, 0.8)],
    ),
    "scope": (
        "[RoCo Figure 4] the mean score outside a local window, or outside the top by standard deviation; shares of the budget",
        [(f"deviation {share:g}", "roco", {"protected": share}) for share in (0.0, 0.3, 0.5, 0.7, 0.9)]
        + [(f"window {share:g}", "roco", {"protected": 0, "recent": share}) for share in (0.3, 0.5, 0.7, 0.9)],
    ),
    "block": (
        "[RoCo Table 6] tokens that are read before each eviction; whole: the prompt at once",
        [("whole", "roco", {}), *((str(size), "roco", {"block": size}) for size in (1, 4, 16, 64))],
    ),
    "pooling": (
        "[SnapKV] the observation window's scores, pooled over neighbours or not",
        [("none", "snapkv", SMALL["snapkv"] | {"pooling": None})]
        + [(f"{how}, {kernel}", "snapkv", {"window": 8, "pooling": how, "kernel": kernel})
           for how in ("max", "avg") for kernel in (3, 5, 7)],
    ),
}  # fmt: skip


def label_variant(family: str, variant: str) -> str:
    """The label of a setting."""
    return f"{family}: {variant}"


class Ablate(Recall):
    """Recall, with variants of one policy in place of policies."""

    name = "ablate"
    about = "One choice of a policy at a time."
    source = "[Keyformer; RoCo; SnapKV]"
    budgets = (0.3,)
    policies = tuple(FAMILIES)

    def settings(self, policies: tuple[str, ...] = ()) -> list[Setting]:
        """Every variant of the families."""
        return [UNPATCHED] + [
            set_policy(policy, k, options, label_variant(family, variant))
            for k in self.budgets
            for family in policies or self.policies
            for variant, policy, options in FAMILIES[family][1]
        ]
