"""Model "kvpatch" for lm-evaluation-harness: its "hf" with policy=, k= and block= among the model_args.

    python -m kvpatch.evaluation.lm_eval run --model kvpatch --model_args pretrained=gpt2,policy=h2o,k=0.5,block=16 --tasks piqa

takes every option of `lm_eval`. settings=FILE, a file of kvpatch.Settings, takes the place of policy= and k=. In generate_until
tasks the budget acts as in generate(). A log-likelihood task is one forward pass per request, where the budget acts only with
a `block=` of fewer tokens than the request has; a share `k` then refers to context and continuation together. The results'
"config" has an entry "kvpatch" that says of each task if the budget acted, and a line of the log above the table says so too.
--use_cache finds stored responses by the request alone, so give each policy and budget a file of its own.
"""

from __future__ import annotations

import difflib
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import KVPatchError
from ..handle import Patch
from ..hooks.inputs import BUDGETS
from ..hooks.settings import policy_of
from ..patching import patch
from ..policies import Policy
from ..policies.options import PolicyOptions
from ..storage.settings import HALF, OF_PATCH, Settings

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM, eval_logger
except ImportError as error:
    raise KVPatchError(
        f'kvpatch.evaluation.lm_eval needs lm-evaluation-harness ({error}): pip install "lm-eval>=0.4.13".'
    ) from error


_Answers = TypeVar("_Answers")
_NAMES = {setting: "kv_backend" if setting == "backend" else setting for setting in OF_PATCH}


@register_model("kvpatch")
class KVPatchLM(HFLM):  # type: ignore[misc]
    """The harness' HFLM, patched until `lm.patch.remove()`.

    The harness pads batches on the right and passes no mask; a share `k` would then count padding, and results would depend
    on the batch size. This model passes the mask.

    Args:
        pretrained: name, folder or model, as HFLM takes it.
        policy: as `kvpatch.patched` takes it, Settings too; it has no default.
        k: as `kvpatch.patched` takes it.
        settings: a file of kvpatch.Settings, in place of policy and k.
        **kwargs: bits, block, schedule, positions, seed and strict as `kvpatch.patched` takes them; kv_backend for its
            `backend`, since HFLM has a parameter of that name; options of the policy, such as window=; all others go to HFLM.

    Raises:
        KVPatchError: `kvpatch.patched` refuses the model or an option, or a name is misspelt.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | Policy | Settings | None = None,
        k: Any = HALF,
        settings: str | PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Sort the arguments into those of the policy, of `patch` and of HFLM; load the model as HFLM does, and patch it."""
        if settings is not None:
            if policy is not None:
                raise KVPatchError(f"policy={policy!r:.60} and settings={settings} both name a policy: give one of them.")
            policy = Settings.load(settings)
        if isinstance(policy, Settings):
            policy, k, kwargs = _add_settings(policy, k, kwargs)
        option_names = set(PolicyOptions.__annotations__) | set(policy.options() if isinstance(policy, Policy) else ())
        _check_names(kwargs, option_names)
        options = {name: kwargs.pop(name) for name in option_names if name in kwargs}
        chosen = policy_of(policy, None, options, tuple(_NAMES.values()))
        # _NAMES: options of patch(), and their names here
        patch_arguments = {setting: kwargs.pop(name) for setting, name in _NAMES.items() if name in kwargs}
        try:
            super().__init__(pretrained, **kwargs)
        except TypeError as error:  # the model's class names an argument that nobody takes
            unknown = [name for name in kwargs if f"'{name}'" in str(error)]
            if not unknown:
                raise
            raise KVPatchError(
                f"model_args has no {unknown[0]!r}: give arguments of lm_eval's hf model, policy, k, "
                f"{', '.join(_NAMES.values())}, or options of policy {chosen.name!r}: {', '.join(chosen.options())}."
            ) from error
        self._lengths: dict[tuple[int, ...], int] = {}
        self._tasks: dict[str, dict[str, Any]] = {}
        self.patch: Patch = patch(self.model, chosen, k, **patch_arguments)

    @property
    def _may_evict(self) -> bool:
        """Tell whether the policy and budget can evict anything at all."""
        return self.patch.settings.acts

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score requests as HFLM does, and note of each task if the budget acted."""
        run = super().loglikelihood
        return self._note_tasks(requests, ("prompt", "no_cache"), lambda: run(requests, disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts as HFLM does, and note of each task if the budget acted."""
        run = super().loglikelihood_rolling
        return self._note_tasks(requests, ("prompt", "no_cache"), lambda: run(requests, disable_tqdm))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate as HFLM does, and note of each task if the budget acted."""
        run = super().generate_until
        return self._note_tasks(requests, ("decode",), lambda: run(requests, disable_tqdm))

    def get_model_info(self) -> dict[str, Any]:
        """Return the model's part of the results' "config", with an entry "kvpatch". The harness calls this at the end."""
        settings = self.patch.settings
        ks = settings.budget.described()
        different = [k for layer, k in enumerate(ks) if k not in ks[:layer]]
        noted = {"policy": settings.policy.name, "k": different, "block": settings.block}
        for task, counts in self._tasks.items():
            line = f"[kvpatch] {task}: the budget acted in {counts['acted']} of its passes ({counts['requests']} requests)"
            idle = self._may_evict and counts["acted"] == "none"
            # level of a warning, else of information
            eval_logger.log(30 if idle else 20, line + (": give block=, fewer tokens than a request has" if idle else ""))
        return {**super().get_model_info(), "kvpatch": {**noted, "tasks": self._tasks}}

    def _note_tasks(self, requests: list[Instance], kinds: Sequence[str], run: Callable[[], _Answers]) -> _Answers:
        """Run requests; note in `_tasks` if all, some or none of a task's forward passes computed tokens after an eviction.

        The harness calls `loglikelihood`, `loglikelihood_rolling` or `generate_until`, and these call it. kinds: of passes that
        count, "prompt", "no_cache" or "decode".
        """

        def count_passes() -> tuple[int, int]:
            passes = [self.patch.passes.get(kind, (0, 0)) for kind in kinds]
            return sum(total for total, _ in passes), sum(acted for _, acted in passes)

        before = count_passes()
        answers = run()
        total, acted = (after - earlier for after, earlier in zip(count_passes(), before, strict=True))
        word = "none" if not acted else "all" if acted == total else "some"
        for task, number in Counter(str(request.task_name) for request in requests).items():
            counts = self._tasks.setdefault(task, {"requests": 0, "acted": word})
            counts["requests"] += number
            counts["acted"] = word if counts["acted"] == word else "some"
        return answers

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score requests for HFLM's loglikelihood(). Sets `_lengths` meanwhile, by which `_model_call` masks padding.

        Texts that differ only by zeros at their end, with which HFLM pads, are scored in different calls: `_lengths` has one
        length for both.
        """
        if not self._may_evict or self.patch.settings.block is None:  # no prompt evicts before its logits are computed
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        # what the model is fed for each request: all tokens but the last, cut to its length
        texts = [(*context, *continuation)[-(self.max_length + 1) : -1] for _, context, continuation in requests]
        # lengths of the texts that are equal once the zeros at their end are stripped; the i-th is scored in call i
        lengths: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for text in dict.fromkeys(texts):
            lengths[_strip_padding(text)].append(len(text))
        calls: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(texts):
            calls[lengths[_strip_padding(text)].index(len(text))].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        for call, indices in sorted(calls.items()):
            subset = [requests[index] for index in indices]
            self._lengths = {key: some_lengths[call] for key, some_lengths in lengths.items() if call < len(some_lengths)}
            try:
                answers.update(zip(indices, super()._loglikelihood_tokens(subset, disable_tqdm, override_bs), strict=True))
            finally:
                self._lengths = {}
        return [answers[index] for index in range(len(requests))]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return a batch's logits; with a padding mask if `_lengths` has the length of each row. HFLM calls this."""
        lengths = [self._lengths.get(_strip_padding(row)) for row in inps.tolist()] if self._lengths else [None]
        if attn_mask is not None or None in lengths:  # the harness probes the memory with such batches
            return super()._model_call(inps, attn_mask, labels)
        mask_BT = torch.arange(inps.shape[1], device="cpu")[None] < torch.tensor(lengths, device="cpu")[:, None]
        dtype = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.model(inps, attention_mask=mask_BT.long().to(inps.device)).logits


def _add_settings(settings: Settings, k: Any, kwargs: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Return policy, k, and `kwargs` with the options of Settings added, for `__init__`.

    Raises KVPatchError if k or an option is given beside the Settings that have it.
    """
    options = {_NAMES.get(name, name): value for name, value in settings.options.items()}
    twice = {name: kwargs[_NAMES.get(name, name)] for name in settings.options if _NAMES.get(name, name) in kwargs}
    settings.add_arguments(twice if k is HALF else twice | {"k": k})
    return settings.policy, settings.k, kwargs | options


def _check_names(given: Iterable[str], options: Iterable[str]) -> None:
    """Raise KVPatchError, before a model is loaded, for an argument that HFLM does not know and that looks like one of ours.

    `__init__` calls it. given: names of the arguments. options: names of options of policies.
    """
    ours = ["policy", "k", "settings", *_NAMES.values(), *options]
    theirs = {*inspect.signature(HFLM.__init__).parameters, *inspect.signature(PreTrainedModel.from_pretrained).parameters}
    for name in given:
        if name in ours or name in theirs:
            continue
        meant = ["k"] if name in BUDGETS else difflib.get_close_matches(name.lower(), ours, n=1, cutoff=0.75)
        if meant:
            raise KVPatchError(f"model_args has no {name!r}. Did you mean {meant[0]!r}?")


def _strip_padding(tokens: Sequence[int]) -> tuple[int, ...]:
    """Strip the zeros at the end of a row, by which the harness pads: `_model_call` finds its length by what is left."""
    end = len(tokens)
    while end and tokens[end - 1] == 0:
        end -= 1
    return tuple(tokens[:end])


if __name__ == "__main__":
    cli_evaluate()
