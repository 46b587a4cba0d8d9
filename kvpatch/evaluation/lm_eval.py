"""Model "kvpatch" for lm-evaluation-harness: its "hf" with policy=, k= and block= among the model_args.

    python -m kvpatch.evaluation.lm_eval run --model kvpatch --model_args pretrained=gpt2,policy=h2o,k=0.5,block=16 --tasks piqa

takes every option of `lm_eval`. In generate_until tasks the budget acts as in generate(). A log-likelihood task is one
forward pass per request, where the budget acts only with a `block=` of fewer tokens than the request has; a share `k` then
refers to context and continuation together. --use_cache finds stored responses by the request alone, so give each policy and
budget a file of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..handle import Patch
from ..patching import SETTINGS, patch
from ..policies import Policy, get_policy

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM, eval_logger
except ImportError as error:
    raise KVPatchError(
        f'kvpatch.evaluation.lm_eval needs lm-evaluation-harness ({error}): pip install "lm-eval>=0.4.13".'
    ) from error


@register_model("kvpatch")
class KVPatchLM(HFLM):  # type: ignore[misc]
    """The harness' HFLM, patched until `lm.patch.remove()`.

    The harness pads batches on the right and passes no mask; a share `k` would then count padding, and results would depend
    on the batch size. This model passes the mask.

    Args:
        pretrained: name, folder or model, as HFLM takes it.
        policy: as `kvpatch.patched` takes it.
        k: as `kvpatch.patched` takes it.
        **kwargs: block, schedule, positions, seed and strict as `kvpatch.patched` takes them; kv_backend for its `backend`,
            since HFLM has a parameter of that name; options of the policy, such as window=; all others go to HFLM.

    Raises:
        KVPatchError: `kvpatch.patched` refuses the model or an option.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | Policy = "keyformer",
        k: Any = 0.5,
        **kwargs: Any,
    ) -> None:
        chosen = policy if isinstance(policy, Policy) else get_policy(policy)
        options = {name: kwargs.pop(name) for name in chosen.options() if name in kwargs}
        names = {setting: "kv_backend" if setting == "backend" else setting for setting in SETTINGS}
        options |= {setting: kwargs.pop(name) for setting, name in names.items() if name in kwargs}
        super().__init__(pretrained, **kwargs)
        self._lengths: dict[tuple[int, ...], int] = {}
        self.patch: Patch = patch(self.model, chosen, k, **options)

    @property
    def _evicts(self) -> bool:
        return self.patch.settings.acts

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score requests as HFLM does; logs a warning if the budget has no effect because no block is set."""
        self._warn_unfelt(len(requests))
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts as HFLM does, with the same warning as `loglikelihood`."""
        self._warn_unfelt(len(requests))
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _warn_unfelt(self, count: int) -> None:
        if self._evicts and self.patch.settings.block is None:
            eval_logger.warning(
                f"{count} log-likelihoods will not feel policy {self.patch.settings.policy.name!r}: a forward pass computes "
                "all of its tokens before it evicts. Give block=, fewer tokens than a request has."
            )

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score requests with a padding mask; requests that padding makes equal go to different calls."""
        if not self._evicts or self.patch.settings.block is None:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        texts = [(*context, *continuation)[-(self.max_length + 1) : -1] for _, context, continuation in requests]
        lengths: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for text in dict.fromkeys(texts):
            lengths[_stripped(text)].append(len(text))
        calls: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(texts):
            calls[lengths[_stripped(text)].index(len(text))].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        for call, indices in sorted(calls.items()):
            some = [requests[index] for index in indices]
            self._lengths = {key: some_lengths[call] for key, some_lengths in lengths.items() if call < len(some_lengths)}
            try:
                answers.update(zip(indices, super()._loglikelihood_tokens(some, disable_tqdm, override_bs), strict=True))
            finally:
                self._lengths = {}
        return [answers[index] for index in range(len(requests))]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return logits; rows that are being scored get a padding mask."""
        found = [self._lengths.get(_stripped(row)) for row in inps.tolist()] if self._lengths else [None]
        if attn_mask is not None or None in found:  # the harness probes the memory with such batches
            return super()._model_call(inps, attn_mask, labels)
        mask_BT = torch.arange(inps.shape[1])[None] < torch.tensor(found)[:, None]
        dtype = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.model(inps, attention_mask=mask_BT.long().to(inps.device)).logits


def _stripped(tokens: Sequence[int]) -> tuple[int, ...]:
    """Strip the zeros at the end, with which the harness pads."""
    end = len(tokens)
    while end and tokens[end - 1] == 0:
        end -= 1
    return tuple(tokens[:end])


if __name__ == "__main__":
    cli_evaluate()
