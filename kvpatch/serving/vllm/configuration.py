"""kvpatch's settings in vLLM's configuration, and reasons to refuse it."""

from __future__ import annotations

import os

import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform

from ...errors import KVPatchError
from ...policies.served import FeatureSet, refuse
from .callers import iterate_callers
from .terms import RequestTerms, read_terms
from .versions import VARIABLE, describe_refusal, is_tested, refuse_parallel


def find_settings(config: VllmConfig) -> RequestTerms | None:
    """Return kvpatch's settings in a configuration, or None."""
    return read_terms(config.additional_config, os.environ.get(VARIABLE))


def find_config() -> VllmConfig | None:
    """Return vLLM's configuration: the current one, else one among the local variables of running functions, else None.

    `check_current` and `find_current_settings` look in it for kvpatch's settings.
    """
    if (current := get_current_vllm_config_or_none()) is not None:
        return current
    for variables in iterate_callers():
        for one in (variables.get("vllm_config"), getattr(variables.get("self"), "vllm_config", None)):
            if isinstance(one, VllmConfig):
                return one
    return None


def find_current_settings() -> RequestTerms | None:
    """Return kvpatch's settings of the engine that is being made or runs, or None."""
    config = find_config()
    return None if config is None else find_settings(config)


def check_current() -> None:
    """Raise KVPatchError if kvpatch's settings ask for what cannot be served; nothing without settings.

    The classes for latent attention (MLA), `CpuLatent` and `AmxLatent`, call it as vLLM chooses such a backend, which has no
    budgets.
    """
    config = find_config()
    terms = None if config is None else find_settings(config)
    if config is not None and terms is not None:
        check_configuration(config, terms)


def check_configuration(config: VllmConfig, terms: RequestTerms) -> None:
    """Raise KVPatchError, before weights are loaded, if vLLM's configuration asks for what it cannot do under a budget.

    `Worker` calls it as the first layer is made, and `check_current`.
    """
    if not is_tested(vllm.__version__):
        raise describe_refusal(vllm.__version__, current_platform.is_cpu())
    refuse_parallel(config.parallel_config, VARIABLE in os.environ)
    parallel, model = config.parallel_config, config.model_config
    # each: whether vLLM is set so, why that cannot be served, and what to do instead
    heads, size = model.get_total_num_kv_heads(), parallel.tensor_parallel_size
    refused = (
        (config.speculative_config is not None, "speculative decoding takes tokens back", "leave speculative_config out"),
        (
            config.kv_transfer_config is not None,
            "a KV connector moves blocks of a whole text",
            "leave kv_transfer_config and kv_offloading_size out",
        ),
        (parallel.decode_context_parallel_size > 1, "a text is on several processes", "use tensor_parallel_size"),
        (heads % size > 0, f"{size} processes cannot share {heads} KV heads evenly", f"use a number that divides {heads}"),
        (
            terms.of_the_prompt and config.scheduler_config.enable_chunked_prefill,
            f"k={terms.k} is a share of a request's prompt, whose length is not known where vLLM reads it in chunks",
            "give enable_chunked_prefill=False (--no-enable-chunked-prefill), or k as a number of tokens",
        ),
    )
    for applies, why, instead in refused:
        if applies:
            raise KVPatchError(f"kvpatch in vLLM: {why}. {instead[0].upper()}{instead[1:]}.")
    # kinds of models that no policy serves in vLLM, or not this one
    facts = {"latent": model.use_mla, "chunks": bool(model.attention_chunk_size), "mixed": model.is_hybrid}
    refuse("a model in vLLM", FeatureSet(terms.policy, **facts))  # raises by kvpatch's table of what goes with what
