"""One choice of a policy at a time, the rest as published: what does it matter?"""

from __future__ import annotations

from typing import Any, ClassVar

from kvpatch.errors import KVPatchError, suggest

from .recall import Recall
from .task import FULL, SMALL, Request, Setting, Subject

Variant = tuple[str, str, dict[str, Any]]
"""A label, a policy, and the options that are tried."""

_PLAIN = {"noise": "none", "tau": (1.0, 1.0)}
"""Keyformer without its noise and temperature: the accumulated attention score, which `damping` was tried on."""

FAMILIES: dict[str, tuple[str, list[Variant]]] = {
    "noise": (
        "[Keyformer Table 4] what is added to the logits, once per key or (resample) for every query",
        [(noise, "keyformer", {"noise": noise}) for noise in ("gumbel", "gaussian", "constant", "none")]
        + [("gumbel, resample", "keyformer", {"noise": "gumbel", "resample": True})],
    ),
    "tau": (
        "[Keyformer A.8] the temperature from the first to the last generated token",
        [(f"{a:g} to {b:g}", "keyformer", {"tau": (float(a), float(b))}) for a, b in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 1))],
    ),
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
    "alpha": (
        "[CriticalKV 4.3] the share of the budget that stage one takes; 1 is snapkv",
        [(f"{alpha:g}", "critical_snapkv", {"alpha": alpha} | SMALL["snapkv"]) for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)],
    ),
    "pooling": (
        "[SnapKV] the observation window's scores, pooled over neighbours or not",
        [("none", "snapkv", SMALL["snapkv"] | {"pooling": None})]
        + [(f"{how}, {kernel}", "snapkv", SMALL["snapkv"] | {"pooling": how, "kernel": kernel})
           for how in ("max", "avg") for kernel in (3, 5, 7)],
    ),
}  # fmt: skip


def label(family: str, variant: str) -> str:
    return f"{family}: {variant}"


class Ablate(Recall):
    """Recall, with variants of one policy in place of policies. -o families=noise,tau chooses among `FAMILIES`."""

    name = "ablate"
    about = "one choice of a policy at a time: noise, tau, recent, shared, positions, damping, scope, block, alpha, pooling"
    source = "[Keyformer Tables 3, 4, Figure 5, A.4, A.8; RoCo Figure 4, Table 6; CriticalKV 4.3]"
    budgets = (0.3,)
    count = 8
    options: ClassVar[dict[str, Any]] = Recall.options | {"scenarios": "in,after", "families": "all"}

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        if request.policies is not None:
            raise KVPatchError("Task ablate has its own policies: choose with -o families=noise,tau instead of --policies.")
        wanted = FAMILIES if (asked := self.option(request, "families")) == "all" else str(asked).split(",")
        for family in wanted:
            if family not in FAMILIES:
                raise KVPatchError(f"families={family} is unknown.{suggest(family, FAMILIES)} Known: {', '.join(FAMILIES)}.")
        return [FULL] + [
            Setting(policy, k, options, label(family, variant))
            for k in request.budgets or self.budgets
            for family in wanted
            for variant, policy, options in FAMILIES[family][1]
        ]
