"""Requests that ask for a budget of their own, checked where vLLM admits them: each is refused alone, and no engine sees it.

vLLM lets its logits processors check a request. This one changes no logits:

    vllm serve ... --logits-processors kvpatch.serving.vllm.admission:Budgets
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LaterLogitsProcessor

from .configuration import find_current_settings


class Budgets(LogitsProcessor, LaterLogitsProcessor):
    """Checks what a request asks for against the settings, for both of vLLM's model runners."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise KVPatchError, which vLLM answers with status 400, if a request asks for a budget that it cannot have."""
        if (terms := find_current_settings()) is not None:
            terms.check_request(sampling_params.extra_args)

    def __init__(self, *given: Any) -> None:
        """Take what either runner tells a processor, and keep nothing."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Return that no logits of the request are changed."""
        return False

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: there is no state."""

    def apply(self, logits: Tensor, *given: Any) -> Tensor:
        return logits
