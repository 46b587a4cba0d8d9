"""Checks that the patch keeps its promises on a given model, on random ids, in seconds: `kvpatch check`, `check_model`.

Evictions are compared with the unpatched model whose attention modules get a mask that hides what was evicted (masked.py). For
a window with sinks the hidden tokens are known in advance; for the policy that is asked for they are read from its cache.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..hooks.target import Target
from ..patching import patched
from ..policies import Policy, get_policy
from ..policies.needs import WindowAttention
from ..policies.served import why_not
from ..storage.settings import HALF, OF_PATCH, Settings
from .check_table import ROUNDINGS, CheckResult, CheckTable, compare_logits
from .masked import Evictions, measure_rounding, predict_masked
from .teacher_forcing import feed, positions_of, predictions, widen

Outcome = str | tuple[Tensor, Tensor, str]
"""Outcome of a check: an error message, "" if there is no error; or actual and expected logits and a remark."""

_PROMPT, _LONGEST, _NEW, _SINKS, _BUDGET = 40, 640, 8, 4, 16


def check_model(model: Any, policy: str | Policy | Settings = "snapkv", k: Any = HALF, *, seed: int = 0) -> CheckTable:
    """Check on a model, in seconds and on random ids, that a patch keeps its promises, in the model's own dtype.

    Args:
        model: as `patched` takes it; hidden states are compared if it has no head.
        policy: as `patched` takes it; what it evicts is compared with the unpatched model under a mask that hides the same.
            Of Settings, options of the policy and the schedule are taken, and others such as bits refused.
        k: as `patched` takes it.
        seed: of the random ids and of the policy.

    Returns:
        A table to print or iterate over; `.passed` tells whether all checks passed. An exception inside a check becomes its
        result, and so do scores that are NaN.

    Raises:
        KVPatchError: `patched` refuses the model or an option, or the model is in training mode; before anything is measured.

    Example:
        >>> print(kvpatch.check_model(model, "snapkv", k=0.3))
    """
    if isinstance(policy, Settings):
        policy, k = _read_settings(policy, k)
    checks = Checks(model, policy, k, seed)
    return CheckTable(tuple(checks.run()), model.dtype, checks.tolerance)


def _read_settings(settings: Settings, k: Any) -> tuple[Policy, Any]:
    """Return policy and k of Settings, for `check_model`. Raises KVPatchError if `k` is given too, or for unchecked options."""
    settings.add_arguments({} if k is HALF else {"k": k})
    for name, value in settings.options.items():
        if name in OF_PATCH and name != "schedule":
            raise KVPatchError(f"check_model() tests a policy and k, not {name}={value!r} of the Settings: leave {name} out.")
    return settings.build_policy(), settings.k


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

    def __init__(self, model: Any, policy: str | Policy = "snapkv", k: Any = 0.5, seed: int = 0) -> None:
        """Refuse what `patched` refuses, draw token ids, and measure the tolerance by unpatched passes; for `check_model`."""
        self.model, self.seed = model, seed
        if getattr(model, "training", False):
            raise KVPatchError("A model in training mode fills no cache, which check_model() looks at: call model.eval().")
        self.policy, self.k = get_policy(policy) if isinstance(policy, str) else policy, k
        with patched(model, self.policy, k, seed=seed) as patch:
            pass  # a wrong option ends here, before anything is measured
        self.target = Target.find(model)  # its decoder, attention modules and adapters
        self.settings = patch.settings
        self.n = self._prompt_length(patch.settings)
        vocabulary = model.get_input_embeddings().num_embeddings
        draw = torch.Generator().manual_seed(seed)
        self.ids_BT = torch.randint(0, vocabulary, (2, self.n + _NEW), generator=draw, device="cpu").to(model.device)
        self.tolerance = ROUNDINGS * measure_rounding(model, self.target.list_mixers(), self.ids_BT, self._take_positions())

    @property
    def _without_merging(self) -> Policy:
        """The policy without merging of evicted values, which a mask cannot imitate; it evicts the same tokens."""
        return dataclasses.replace(self.policy, merging=None)

    def _prompt_length(self, settings: Any) -> int:
        """Return the length of the prompts in tokens: three observation windows or more, so many that layers evict."""
        window = self.policy.needs.find(WindowAttention)
        n = max(_PROMPT, 3 * (0 if window is None else window.width))
        evicting = [layer for layer in range(len(self.target.attentions)) if settings.budget.rules[layer].evicts]
        while n < _LONGEST and evicting and all(settings.rules[layer].least(n) >= n for layer in evicting):
            n *= 2  # no layer would evict
        return min(n, _LONGEST, (positions_of(self.model) or _LONGEST + _NEW) - _NEW)

    def run(self) -> list[CheckResult]:
        """Run all checks in order, for `check_model`. An exception inside a check becomes its result."""
        checks: list[tuple[str, Callable[[], Outcome]]] = [
            ("k=1.0 gives the unpatched model's logits", self.check_full),
            ("eviction is the same as masking", self.check_masking),
            (f"what {self.policy.name} evicts is masked the same", self.check_evictions),
            ("tokens that are forgotten are masked the same", self.check_forgetting),
            ("a row of a padded batch is as it is alone", self.check_padding),
            ("the same seed gives the same logits", self.check_seeds),
            ("the model is as it was after the block", self.check_restored),
        ]
        served = why_not("forget", self.settings.list_features()) is None  # forget() is possible under these settings
        return [self._run_check(name, check) for name, check in checks if served or check != self.check_forgetting]

    def _run_check(self, name: str, check: Callable[[], Outcome]) -> CheckResult:
        """Run one check for `run`, and turn what it returns or raises into a result. Logits may differ by the tolerance."""
        try:
            with torch.no_grad():
                outcome = check()
        except Exception as error:  # an unknown model may raise anything; it belongs into the table
            return CheckResult(name, False, f"{type(error).__name__}: {error}".splitlines()[0])
        if isinstance(outcome, str):  # what is wrong; "" if nothing is
            return CheckResult(name, not outcome, outcome or "bit for bit")
        got, expected, remark = outcome
        return compare_logits(name, got, expected, remark, self.tolerance)

    def check_full(self) -> Outcome:
        """Compare, for `run`, k=1.0 with the unpatched model: token by token, and a padded batch without position_ids."""
        pads = self.n // 3
        mask_BT = torch.ones_like(self.ids_BT)
        mask_BT[1, :pads] = 0

        def feed_both_ways() -> Tensor:
            out = self.model(self.ids_BT, attention_mask=mask_BT, use_cache=True)
            return torch.cat([self._feed_tokens(self.ids_BT), widen(predictions(out))[:, pads:]], 1)

        expected = feed_both_ways()
        with patched(self.model, self.policy, 1.0, seed=self.seed):
            return feed_both_ways(), expected, ""

    def check_masking(self) -> Outcome:
        """Compare, for `run`, the policy "window" with masking all tokens but those it keeps, which are known in advance."""
        budget = min(_BUDGET, self.n - 1)
        sinks = min(_SINKS, budget - 1)
        with patched(self.model, "window", budget, sinks=sinks) as patch:
            got, bounds = self._feed_tokens(self.ids_BT), patch.settings.bounds
        total = self.ids_BT.shape[1]
        key = torch.arange(total, device="cpu")[None]
        query = key.T
        seen_QT = key <= query
        # a generated token sees the tokens kept before it, and itself
        kept_QT = seen_QT & ((query < self.n) | (key < sinks) | (key >= query - (budget - sinks)))
        layers = [(seen_QT if bound is not None else kept_QT)[None, None] for bound in bounds]  # bound: own window
        return got, self._predict_masked(layers), ""

    def check_evictions(self) -> Outcome:
        """Compare, for `run`, the policy that is asked for with masking the tokens that its cache does not hold."""
        with patched(self.model, self.policy, self.k, seed=self.seed, strict=True):
            self._feed_tokens(self.ids_BT)  # strict raises if numbers are not finite, merged values too
        watched = Evictions(self.n, self.ids_BT.shape[1])
        with patched(self.model, self._without_merging, self.k, seed=self.seed):  # no mask imitates merged values
            got = feed(self.model, self.ids_BT, self.n, watch=watched.note_held).logits_BSV
        fewest, most = watched.count_evicted()
        count = f"{fewest} of" if fewest == most else f"{fewest} to {most} of"
        total = self.ids_BT.shape[1]
        none = f"NOTHING EVICTED of {total} tokens, give a smaller k: "
        remark = f"{count} {total} tokens evicted per head, " if most else none
        return got, self._predict_masked(watched.list_seen()), remark

    def check_forgetting(self) -> Outcome:
        """Compare, for `run`, a cache that forgets spans (of the prompt, a row, new tokens) with masking what it lacks."""
        edits = {  # when so many tokens were read: the spans that go, and the row that they go from; None: both rows
            self.n: ([(self.n // 4, self.n // 2), (self.n - 2, self.n - 1)], None),
            self.n + 2: ([(1, self.n // 8)], 0),
            self.n + 4: ([(self.n + 1, self.n + 3)], 1),
        }
        watched, passes = Evictions(self.n, self.ids_BT.shape[1]), iter(range(self.n, self.ids_BT.shape[1] + 1))
        wrong: list[int] = []  # layers in which other tokens went

        def watch(cache: EvictingCache) -> None:
            """Forget the spans of `edits` for this pass, and note which tokens are held. `feed` calls this after each pass."""
            if (edit := edits.get(next(passes))) is not None:
                before = [cache.positions(layer) for layer in range(len(cache.layers))]
                cache.forget(*edit)
                cache.check_invariants()
                wrong.extend(layer for layer, held in enumerate(before) if not _is_without(held, cache.positions(layer), *edit))
            watched.note_held(cache)

        with patched(self.model, self._without_merging, self.k, seed=self.seed):
            got = feed(self.model, self.ids_BT, self.n, watch=watch).logits_BSV
        return f"other tokens went in layer {wrong[0]}" if wrong else (got, self._predict_masked(watched.list_seen()), "")

    def _predict_masked(self, seen: list[Tensor]) -> Tensor:
        """Return the unpatched model's predictions for the checks' ids, if each layer's queries see what `seen` says alone."""
        return predict_masked(self.model, self.target, self.ids_BT, self.n, seen, self._take_positions())

    def _take_positions(self) -> dict[str, Tensor]:
        """Return all position_ids as an argument, for `_predict_masked` and others; {} if the model takes none."""
        if "position_ids" not in inspect.signature(type(self.model).forward).parameters:
            return {}
        T = self.ids_BT.shape[1]
        return {"position_ids": torch.arange(T, device=self.model.device)[None].expand(len(self.ids_BT), -1)}

    def check_padding(self) -> Outcome:
        """Compare, for `run`, a left-padded row with the row alone; where they differ unpatched too, compare with masking."""
        pads = self.n // 3
        mask = torch.ones_like(self.ids_BT)
        mask[1, :pads] = 0
        if not self._take_positions() or self.target.why_positions_fixed() is not None:  # positions may count padding
            padded, alone = self._feed_tokens(self.ids_BT, mask)[1:], self._feed_tokens(self.ids_BT[1:, pads:], skipped=pads)
            if float((padded - alone).abs().max()) > self.tolerance / 2 * max(1.0, float(alone.abs().max())):  # beyond rounding
                return self._predict_padded(mask, pads)
        with patched(self.model, self.policy, self.k, seed=self.seed):
            return self._feed_tokens(self.ids_BT, mask)[1:], self._feed_tokens(self.ids_BT[1:, pads:], skipped=pads), ""

    def _predict_padded(self, mask_BT: Tensor, pads: int) -> Outcome:
        """Compare, for `check_padding`, a padded batch with the same one unpatched, under masks that hide what was evicted."""
        watched = Evictions(self.n, self.ids_BT.shape[1], torch.tensor([0, pads], device="cpu"))
        with patched(self.model, self.policy, self.k, seed=self.seed):
            got = feed(self.model, self.ids_BT, self.n, mask_BT, watched.note_held).logits_BSV
        expected = predict_masked(self.model, self.target, self.ids_BT, self.n, watched.list_seen(), {}, mask_BT)
        return got, expected, "the model's positions count padding; compared with masking, "

    def check_seeds(self) -> str:
        """Compare two runs with the same seed."""
        first, second = (self._patched_logits() for _ in range(2))
        return "" if torch.equal(first, second) else f"off by {float((first - second).abs().max()):.1e}"

    def check_restored(self) -> str:
        """Compare, for `run`, the model before and after two patches, one left by an error: attributes, and bits of logits."""
        before, logits = _record_model(self.model), self._feed_tokens(self.ids_BT)
        self._patched_logits()
        try:
            with patched(self.model, self.policy, self.k):
                raise InterruptedError
        except InterruptedError:
            pass
        after = _record_model(self.model)
        changed = [place for place in before.keys() | after.keys() if before.get(place) != after.get(place)]
        if changed:
            return f"changed: {', '.join('.'.join(place).lstrip('.') for place in sorted(changed)[:3])}"
        return "" if torch.equal(self._feed_tokens(self.ids_BT), logits) else "attributes are as before, but the logits differ"

    def _patched_logits(self) -> Tensor:
        """Return the logits of the checks' ids under the policy and budget that are checked."""
        with patched(self.model, self.policy, self.k, seed=self.seed):
            return self._feed_tokens(self.ids_BT)

    def _feed_tokens(self, ids_BT: Tensor, mask_BT: Tensor | None = None, skipped: int = 0) -> Tensor:
        """Return logits [B,1+_NEW,V] after the prompt and each further token. skipped: tokens cut from the prompt's start."""
        return feed(self.model, ids_BT, self.n - skipped, mask_BT).logits_BSV


def _record_model(model: Any) -> dict[tuple[str, str], _Same]:
    """Return every attribute and hook of every module, for `check_restored` to compare by identity."""
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


def _is_without(before_BHT: Tensor, after_BHT: Tensor, spans: list[tuple[int, int]], row: int | None) -> bool:
    """Tell `check_forgetting` if each head lacks these spans and nothing else. row: the row that forgot; None for all rows."""
    expected = before_BHT.clone()
    rows = slice(None) if row is None else row
    for start, stop in spans:
        expected[rows] = expected[rows].masked_fill((expected[rows] >= start) & (expected[rows] < stop), -1)
    sizes = [max(expected.shape[-1], after_BHT.shape[-1]) - held.shape[-1] for held in (expected, after_BHT)]
    expected_sorted, after_sorted = (
        F.pad(held, (0, more), value=-1).sort(-1).values for held, more in zip((expected, after_BHT), sizes, strict=True)
    )
    return torch.equal(expected_sorted, after_sorted)
