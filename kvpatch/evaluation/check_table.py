"""The table of results that `check_model` returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..report_text import align_rows

ROUNDINGS = 6
"""Tolerance in units of masked.measure_rounding: how far logits move if each layer's attention is off by its last digit."""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: its name, whether it passed, and the measured difference or the error message."""

    name: str
    passed: bool
    detail: str


def compare_logits(name: str, got: Tensor, expected: Tensor, remark: str, tolerance: float) -> CheckResult:
    """Compare, for a check named `name`, a patch's logits with the unpatched model's wherever the latter are finite.

    `_run_check` calls it. Some are not finite where a vocabulary is cut with -inf, and under padding in float64 where a model's
    softmax is in float32, for which float64's mask is -inf (BLOOM, MPT). If none is, the check fails. remark: put before what
    was found. tolerance: a share of the largest logit.
    """
    finite = expected.isfinite()
    if not finite.any():
        return CheckResult(name, False, "all logits of the unpatched model are NaN or infinite")
    if not finite.all():
        remark += f"{1 - float(finite.float().mean()):.0%} of the logits are NaN or infinite unpatched too, the others "
    largest = max(1.0, float(expected[finite].abs().max()))
    difference = float((got - expected)[finite].abs().max()) / largest
    return CheckResult(name, difference <= tolerance, f"{remark}off by {difference:.1e}, allowed {tolerance:.0e}")


@dataclass(frozen=True)
class CheckTable:
    """Results of all checks of one model; `str` is a table of them.

    Attributes:
        results: one per check.
        dtype: of the model.
        tolerance: largest difference of two logits that passes, as a share of the largest logit, which counts as at least 1.
    """

    results: tuple[CheckResult, ...]
    dtype: torch.dtype
    tolerance: float

    @property
    def passed(self) -> bool:
        """Tell whether all checks passed."""
        return all(result.passed for result in self.results)

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __str__(self) -> str:
        lines = align_rows([("pass" if one.passed else "FAIL", one.name, one.detail) for one in self.results])
        return "\n".join([*lines, "", self.note])

    @property
    def note(self) -> str:
        """Sentence about the tolerance, which `kvpatch check` prints below the table of checks."""
        kind = str(self.dtype).removeprefix("torch.")
        coarse = f" That is coarse: {kind} rounds so much in this model that float32 would tell more." * (self.tolerance > 0.1)
        return (
            f"In {kind}, logits may differ by {self.tolerance:.0e} of the largest one: {ROUNDINGS} times what one rounding of "
            f"each layer's attention changes in this model.{coarse}"
        )
