"""Sampling of each request by its own settings, in transformers' continuous batching.

The engine takes the largest logit of every row. Rows of requests that sample get Gumbel noise: the largest of logits and such
noise is a sample of their softmax. So greedy requests and those of any temperature share a pass, and a seed is a request's own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from ..cache.messages import Messages


@dataclass
class Sampling:
    """Settings of one request's next tokens.

    processors: of its logits, as generate() would have them. samples: a token is drawn instead of the most probable one.
    generator: of its random numbers; None for those of the process.
    """

    processors: LogitsProcessorList
    samples: bool
    generator: torch.Generator | None = None

    def __deepcopy__(self, memo: Any) -> Sampling:
        """Return itself: the engine copies the state of a request that it begins anew, which goes on drawing."""
        return self

    def choose(self, ids_1T: Tensor, logits_1V: Tensor) -> Tensor:
        """Return logits [1,V] after the request's processors, with noise if it samples. The engine then takes the largest.

        `RequestSampling` calls it for each new token.
        """
        processors: Any = self.processors
        logits_1V = processors(ids_1T, logits_1V)
        if not self.samples:
            return logits_1V
        waits_1V = torch.empty_like(logits_1V, dtype=torch.float32).exponential_(generator=self.generator)
        return logits_1V - waits_1V.log()  # Gumbel noise


def make_sampling(
    model: Any, config: GenerationConfig, prompt: int, *, seed: int | None = None, presence: float = 0.0, frequency: float = 0.0
) -> Sampling:
    """Return a request's Sampling, from what generate() would be given. `_accept_request` calls it when the request arrives.

    Args:
        model: the model, which makes the processors.
        config: temperature, top_p, do_sample and such.
        prompt: tokens of the prompt.
        seed: of the request.
        presence: subtracted from the logits of tokens that were generated.
        frequency: subtracted once for each time that a token was generated.
    """
    config = copy.copy(config)
    model._prepare_special_tokens(config, device=model.device)  # of an end, which some processors forbid or favour
    processors = model._get_logits_processor(config, input_ids_seq_length=prompt, device=model.device)
    if presence or frequency:
        processors.insert(0, OccurrencePenalty(prompt, presence, frequency))
    generator = None if seed is None else torch.Generator(model.device).manual_seed(seed)
    return Sampling(processors, bool(config.do_sample), generator)


class OccurrencePenalty(LogitsProcessor):
    """Lower the logits of tokens that were generated before, as OpenAI defines presence_penalty and frequency_penalty."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scores [1,V] of the next token after input_ids [1,T]."""
        counts_V = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[-1])
        return scores - self.frequency * counts_V - self.presence * (counts_V > 0)


class RequestSampling(ContinuousBatchingLogitsProcessor):
    """The engine's only logits processor: each row by the Sampling that its request was added with (`sampling=`)."""

    def __init__(self) -> None:
        # the engine hands on no other arguments of a request; messages are for its RequestPool
        self.supported_kwargs, self.ignored_kwargs = {"sampling": Sampling, "messages": Messages}, ()
        self._coming: list[Any] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Write zeros as the argument of requests that bring none: transformers wants one tensor, and nobody reads it."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Note the requests of the coming pass, in the order of its rows; return zeros, an argument that nobody reads."""
        self._coming = [one.state for one in requests_with_new_token]
        return torch.zeros(len(self._coming), dtype=torch.int32, device="cpu")

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Return logits `scores` [B,V], each row changed in place as its request samples. The engine calls this once a pass.

        tensor_arg: what transformers gives to such a processor; not used.
        """
        for row, state in enumerate(self._coming):  # requests of the pass, by row
            sampling = state.logit_processor_kwargs.get("sampling")
            if sampling is not None and (sampling.samples or sampling.processors):
                ids_1T = torch.tensor([state.initial_tokens + state.generated_tokens], device=scores.device)
                scores[row : row + 1] = sampling.choose(ids_1T, scores[row : row + 1])
        return scores


def sample_by_request(manager: Any) -> None:
    """Make a server's ContinuousBatchingManager sample each request by the settings that came with it.

    `start_engine` calls it before the manager starts. The generation config that it was made with is replaced by a greedy copy:
    the engine then takes the largest logit.
    """
    manager.generation_config = copy.deepcopy(manager.generation_config)
    manager.generation_config.do_sample = False
    listed = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
    listed.logits_processor.append(RequestSampling())
    listed._retrieve_processors_kwargs()
    listed.tensors_required, listed.do_processing = 1, True  # RequestSampling takes one tensor
    manager.logit_processor = listed
