"""Checks that the patch keeps its promises on a given model, on random ids, in seconds: `kvpatch check`, `check_model`.

The checks do not ask the library which tokens it kept. Eviction is compared with the unpatched model under a hand-written 4-D
attention mask, for a policy whose kept set is known in advance: the first and the newest tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..hooks.target import Target
from ..patching import patched
from ..policies import Policy, get_policy
from .teacher_forcing import feed, positions_of, predictions, wide

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of two logits that passes, by dtype, as a share of the largest logit, which counts as at least 1.

The tolerance of float64 is that large because some models compute softmax in float32 regardless of their dtype.
"""

Outcome = str | tuple[Tensor, Tensor] | None
"""Outcome of a check: an error message, "" if there is no error; actual and expected logits; or None if not comparable."""

_PROMPT, _NEW, _SINKS, _BUDGET = 40, 8, 4, 16


@dataclass(frozen=True)
class Result:
    """Result of one check: its name, whether it passed, and the measured difference or the error message."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class CheckTable:
    """Results of all checks of one model; `str` is a table of them.

    Attributes:
        results: one per check.
        dtype: of the model.
        tolerance: largest difference of logits of this dtype that passes, as a share of the largest logit.
    """

    results: tuple[Result, ...]
    dtype: torch.dtype
    tolerance: float

    @property
    def passed(self) -> bool:
        """Tell whether all checks passed."""
        return all(result.passed for result in self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __str__(self) -> str:
        width = max(len(result.name) for result in self.results)
        lines = [f"{'pass' if one.passed else 'FAIL'}  {one.name:{width}}  {one.detail}" for one in self.results]
        return "\n".join([*lines, "", self.note])

    @property
    def note(self) -> str:
        """Sentence about the tolerance."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"In {kind}, logits may differ by {self.tolerance:.0e} of the largest one."


def check_model(model: Any, policy: str | Policy = "keyformer", k: Any = 0.5, *, seed: int = 0) -> CheckTable:
    """Check on a model, in seconds and on random ids, that a patch keeps its promises.

    Args:
        model: as `patched` takes it; hidden states are compared if it has no head.
        policy: as `patched` takes it.
        k: as `patched` takes it.
        seed: of the random ids and of the policy.

    Returns:
        A table to print or iterate over; `.passed` tells whether all checks passed. An exception inside a check becomes its
        result.

    Raises:
        KVPatchError: `patched` refuses the model or an option, before anything is measured.

    Example:
        >>> print(kvpatch.check_model(model, "snapkv", k=0.3))
    """
    checks = Checks(model, policy, k, seed)
    return CheckTable(tuple(checks.run()), model.dtype, checks.tolerance)


class Checks:
    """Checks of one model under one policy and budget.

    Args:
        model: a causal language model.
        policy: a policy or the name of one.
        k: the budget, as `kvpatch.patched` takes it.
        seed: of the random token ids and of the policy.

    Raises:
        KVPatchError: `kvpatch.patched` refuses the model or the options.

    Example:
        for result in Checks(model, "h2o", k=0.5).run():
            print(result.passed, result.name, result.detail)
    """

    def __init__(self, model: Any, policy: str | Policy = "keyformer", k: Any = 0.5, seed: int = 0) -> None:
        self.model, self.seed = model, seed
        self.policy, self.k = get_policy(policy) if isinstance(policy, str) else policy, k
        with patched(model, self.policy, k, seed=seed):
            pass  # a wrong option ends here, before anything is measured
        target = Target.find(model)
        self.mask_has_positions = bool(target.attentions[0][1].aside(target.decoder))
        limit = positions_of(model) or _PROMPT + _NEW
        self.n = min(_PROMPT, limit - _NEW)
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = torch.randint(0, vocabulary, (2, self.n + _NEW), generator=torch.Generator().manual_seed(seed))
        self.ids_BT = ids.to(model.device)
        self.tolerance = TOLERANCE.get(model.dtype, 1e-1)

    def run(self) -> list[Result]:
        """Run all checks in order; an exception inside a check becomes its result."""
        checks: list[tuple[str, Callable[[], Outcome]]] = [
            ("k=1.0 gives the unpatched model's logits", self.full),
            ("eviction is the same as masking", self.masking),
            ("a row of a padded batch is as it is alone", self.padding),
            ("the same seed gives the same logits", self.seeded),
            ("the model is as it was after the block", self.restored),
        ]
        return [self._judged(name, check) for name, check in checks]

    def _judged(self, name: str, check: Callable[[], Outcome]) -> Result:
        try:
            with torch.no_grad():
                outcome = check()
        except Exception as error:  # an unknown model may raise anything; it belongs into the table
            return Result(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
        if outcome is None:
            return Result(name, True, "not compared: this model reads ALiBi from its padding mask, so it takes no other")
        if isinstance(outcome, str):
            return Result(name, not outcome, outcome or "bit for bit")
        got, expected = outcome
        largest = max(1.0, float(expected.abs().max()))
        difference = float((got - expected).abs().max()) / largest
        return Result(name, difference <= self.tolerance, f"off by {difference:.1e}, allowed {self.tolerance:.0e}")

    def full(self) -> tuple[Tensor, Tensor]:
        """Compare k=1.0 with the unpatched model."""
        expected = self._feed(self.ids_BT)
        with patched(self.model, self.policy, 1.0, seed=self.seed):
            return self._feed(self.ids_BT), expected

    def masking(self) -> tuple[Tensor, Tensor] | None:
        """Compare a window with sinks to one unpatched forward pass whose mask hides the evicted tokens."""
        if self.mask_has_positions:
            return None
        budget = min(_BUDGET, self.n - 1)
        sinks = min(_SINKS, budget - 1)
        with patched(self.model, "window", budget, sinks=sinks):
            got = self._feed(self.ids_BT)
        total = self.ids_BT.shape[1]
        query, key = torch.arange(total)[:, None], torch.arange(total)[None]
        seen = key <= query
        # a generated token sees the tokens kept before it, and itself
        kept = seen & ((query < self.n) | (key < sinks) | (key >= query - (budget - sinks)))
        text = self.model.config.get_text_config()
        types, window = set(getattr(text, "layer_types", None) or ()), getattr(text, "sliding_window", None)
        masks: Any = self._mask(kept)
        if window is not None and len(types) > 1:  # sliding layers keep their window under any policy
            masks = {"full_attention": masks, "sliding_attention": self._mask(seen & (key > query - window))}
        elif window is not None and types != {"full_attention"}:
            masks = self._mask(kept & (key > query - window))
        places = {}
        if "position_ids" in inspect.signature(type(self.model).forward).parameters:
            places["position_ids"] = torch.arange(total, device=self.model.device)[None].expand(len(self.ids_BT), -1)
        expected = self.model(self.ids_BT, attention_mask=masks, use_cache=False, **places)
        return got, wide(predictions(expected)[:, self.n - 1 :])

    def _mask(self, seen_QT: Tensor) -> Tensor:
        """Build the mask [B,1,Q,T] that is added to logits."""
        smallest = torch.finfo(self.model.dtype).min
        mask = torch.zeros(seen_QT.shape, dtype=self.model.dtype).masked_fill(~seen_QT, smallest)
        return mask[None, None].expand(len(self.ids_BT), 1, -1, -1).to(self.model.device)

    def padding(self) -> tuple[Tensor, Tensor]:
        """Compare a shorter row, left-padded beside a longer one, with the same row alone."""
        pads = self.n // 3
        mask = torch.ones_like(self.ids_BT)
        mask[1, :pads] = 0
        with patched(self.model, self.policy, self.k, seed=self.seed):
            return self._feed(self.ids_BT, mask)[1:], self._feed(self.ids_BT[1:, pads:], skipped=pads)

    def seeded(self) -> str:
        """Compare two runs with the same seed."""
        first, second = (self._patched_logits() for _ in range(2))
        return "" if torch.equal(first, second) else f"off by {float((first - second).abs().max()):.1e}"

    def restored(self) -> str:
        """Compare the model before and after patching: attributes and hooks by identity, logits bit for bit.

        One block ends normally and one raises.
        """
        before, logits = _snapshot(self.model), self._feed(self.ids_BT)
        self._patched_logits()
        try:
            with patched(self.model, self.policy, self.k):
                raise InterruptedError
        except InterruptedError:
            pass
        after = _snapshot(self.model)
        changed = [where for where in before.keys() | after.keys() if before.get(where) != after.get(where)]
        if changed:
            return f"changed: {', '.join('.'.join(where).lstrip('.') for where in sorted(changed)[:3])}"
        return "" if torch.equal(self._feed(self.ids_BT), logits) else "attributes are as before, but the logits differ"

    def _patched_logits(self) -> Tensor:
        with patched(self.model, self.policy, self.k, seed=self.seed):
            return self._feed(self.ids_BT)

    def _feed(self, ids_BT: Tensor, mask_BT: Tensor | None = None, skipped: int = 0) -> Tensor:
        """Return logits [B,1+_NEW,V] of the prompt's last token and of each further token, fed one by one."""
        return feed(self.model, ids_BT, self.n - skipped, mask_BT).logits_BSV


def _snapshot(model: Any) -> dict[tuple[str, str], _Same]:
    """Record every attribute and hook of every module by identity."""
    return {
        (name, key): _Same([*value.keys(), *value.values()] if isinstance(value, dict) else [value])
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


class _Same:
    """Objects compared by identity; holding them keeps their addresses from being reused."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and [*map(id, self.objects)] == [*map(id, other.objects)]
