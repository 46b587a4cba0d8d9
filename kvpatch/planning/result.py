"""The result of a plan, and its table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..report_text import align_rows, format_size, format_span


class Fit(NamedTuple):
    """Sequences and tokens that fit into the memory beside the weights.

    requests: of this length. tokens: of the prompt of each request of the batch; None where the model's positions are no limit
    and neither is the memory.
    """

    requests: int
    tokens: int | None


@dataclass(frozen=True)
class Plan:
    """Bytes of a model and of its cache, in full and under a budget; `str(plan)` is the table of `kvpatch plan`.

    Attributes:
        model: as it was named.
        kind: its model_type.
        policy: name of the policy.
        k: the budget as it was given.
        bits: of each number held.
        tokens: of a request's prompt.
        new: tokens generated after it.
        batch: requests at a time.
        dtype: of the weights, and of the cache's numbers with 16 bits.
        weights: bytes of the weights; None if they are not known, and so is what fits.
        weights_from: where that number comes from, or why there is none.
        full: bytes of a request's cache that keeps every token, of sliding layers those in their window.
        held: bytes of the tokens of a request that the budget leaves.
        allocated: the most bytes that its buffers take, with the slots that wait for coming tokens.
        reading: the most bytes while its prompt is read.
        kept: the tokens that a KV head of each layer holds, the mean of heads that share a budget.
        positions: tokens that the model has positions for; None for no limit.
        longest: tokens of the longest prompt that these positions allow under the policy; None for no limit.
        memory: bytes that are given; None if nothing was said.
        fit_full: what fits into them under the full cache.
        fit: what fits under the budget.
        remarks: what the budget cannot do for this model, and what is not counted.
    """

    model: str
    kind: str
    policy: str
    k: object
    bits: int
    tokens: int
    new: int
    batch: int
    dtype: str
    weights: int | None
    weights_from: str
    full: int
    held: int
    allocated: int
    reading: int
    kept: tuple[int, ...]
    positions: int | None
    longest: int | None
    memory: int | None
    fit_full: Fit | None
    fit: Fit | None
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values, as `kvpatch plan --json` prints them."""
        plain = dataclasses.asdict(self)
        for name in ("fit", "fit_full"):
            fit = getattr(self, name)
            plain[name] = None if fit is None else fit._asdict()
        return plain | {"kept": list(self.kept), "remarks": list(self.remarks)}

    def __str__(self) -> str:
        lines = [write_title(self), "", *align_rows([("", "full cache", "under the budget"), *list_rows(self)]), ""]
        return "\n".join([*lines, *write_remarks(self)])


def list_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """List the rows that `kvpatch plan` prints: a name, the value of the full cache, and that under the budget."""
    many, weights = plan.batch > 1, "unknown" if plan.weights is None else format_size(plan.weights)
    rows = [
        ("weights", weights, weights),
        ("tokens of a head", f"{plan.tokens + plan.new:,}", format_span(plan.kept)),
        ("cache of a request", format_size(plan.full), format_size(plan.held)),
        ("  with its spare slots", "", f"at most {format_size(plan.allocated)}"),
        ("  while its prompt is read", "", f"at most {format_size(plan.reading)}"),
    ]
    if many:
        rows.append(
            (f"cache of {plan.batch:,} requests", format_size(plan.batch * plan.full), format_size(plan.batch * plan.held))
        )
    if plan.memory is not None and plan.fit is not None and plan.fit_full is not None:
        size = format_size(plan.memory)
        rows.append((f"requests that fit in {size}", f"{plan.fit_full.requests:,}", f"{plan.fit.requests:,}"))
        each = f"tokens of each of {plan.batch:,} prompts" if many else "tokens of a prompt"
        rows.append((f"{each} in {size}", _write_tokens(plan.fit_full, plan), _write_tokens(plan.fit, plan)))
    return rows


def write_title(plan: Plan) -> str:
    """Write the first line of the table of `kvpatch plan`: the model, the policy, and the requests."""
    new = f" and {plan.new:,} new ones" if plan.new else ""
    requests = "one request" if plan.batch == 1 else f"{plan.batch:,} requests"
    return (
        f"{plan.model} ({plan.kind}, {plan.dtype}): {plan.policy}, k={plan.k}, {plan.bits} bits; {requests} of {plan.tokens:,} "
        f"tokens{new}"
    )


def write_remarks(plan: Plan) -> list[str]:
    """Write the lines below the table of `kvpatch plan`: where the weights' bytes come from, and a line for each remark."""
    source = "unknown, and so is what fits: " if plan.weights is None else "from "
    return [f"- Bytes of the weights: {source}{plan.weights_from}.", *(f"- {one}" for one in plan.remarks)]


def _write_tokens(fit: Fit, plan: Plan) -> str:
    """Write how many tokens of a prompt fit, for `list_rows`, and say if the model's positions limit them, not its memory.

    A policy that reads a prompt twice needs positions for both readings, so that fewer tokens fit than there are positions.
    """
    if fit.tokens is None or plan.positions is None:
        return "any number" if fit.tokens is None else f"{fit.tokens:,}"
    if fit.tokens == plan.positions - plan.new:
        return f"{fit.tokens:,}, all its positions"
    return f"{fit.tokens:,}" + (", the most that it can read twice" if fit is plan.fit and fit.tokens == plan.longest else "")
