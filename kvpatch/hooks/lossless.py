"""generate() of `patched(..., lossless=True)`: a budgeted cache drafts, and passes over the full cache on the host verify.

transformers' assisted decoding does both; here are its candidates, and the passes that they ask for. Such a pass reads the end
of a prompt under the patch: attention is full until there, so that entries and logits are the unpatched model's, and the budget
chosen anew is what the next draft is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode

from ..arch.adapter import keys_dtype
from ..arch.rotary import switch_length
from ..arch.upstream import CACHE, cache_of, set_cache
from ..cache.cache import EvictingCache
from ..cache.lossless import LosslessCache
from ..errors import KVPatchError
from ..policies.served import refuse
from . import inputs
from .accelerate import OwnMethod, device_of
from .state import PatchState

FIRST, MOST = 8, 16  # tokens of a draft: of the first one, and of the longest
CRITERIA = "_kvpatch_criteria"  # attribute of a GenerationConfig: the stopping criteria, which `Drafter` gets by no argument
STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
TRIES = 8  # drafts in a row of which nothing is accepted, after which no more are made
HOPELESS = (
    f"lossless=True: nothing of the last {TRIES} drafts was accepted, so that tokens are generated one by one, each by "
    "a pass over the full cache. A larger k or another policy may draft better."
)


def new_cache(state: PatchState) -> LosslessCache:
    """Make an empty LosslessCache of a patch: a budgeted cache that drafts, and one of all tokens, in `folder` or in memory."""
    return LosslessCache(state.new_cache(), len(state.shapes), state.options.folder)


def check_lossless(lossless: object, folder: object) -> Path | None:
    """Return the folder in which a lossless patch keeps the keys and values of all tokens; None for the host's memory.

    `patched` calls it for its arguments: lossless, folder are its `lossless` and `offload_folder`. A lossless patch drafts
    tokens from a budgeted cache, and verifies them with the full one.

    Raises:
        KVPatchError: `lossless` is not True or False, `folder` is no existing folder, or it is given without lossless=True.
    """
    if isinstance(lossless, str | PathLike):
        raise KVPatchError(
            f"lossless={lossless!r} must be True or False: the folder of the full cache's file is "
            f"offload_folder={str(lossless)!r}, beside lossless=True."
        )
    if not isinstance(lossless, bool):
        raise KVPatchError(f"lossless={lossless!r} must be True or False.")
    if folder is None:
        return None
    if not lossless:
        raise KVPatchError(f"offload_folder={folder!r} is where lossless=True keeps the full cache: give both, or neither.")
    if not isinstance(folder, str | PathLike) or not Path(folder).is_dir():
        raise KVPatchError(f"offload_folder={folder!r} must be a folder that exists, for the file of the full cache.")
    return Path(folder)


def require_lossless_cache(past: object, state: PatchState) -> LosslessCache:
    """Return the caller's cache `past` of a lossless patch, or a new one for None, before it is filled or saved.

    `_enter_decoder`, `generate`, `save_cache` and `Patch.new_cache` call it.

    Raises:
        KVPatchError: it is another kind of cache, or of another patch.
    """
    if past is None:
        return new_cache(state)
    if isinstance(past, LosslessCache) and past.settings is state.settings:
        return past
    raise KVPatchError(
        f"{CACHE} is a {type(past).__name__} that this patch did not make: with lossless=True go on from the cache that "
        "generate() returned, or from patch.new_cache()."
    )


# ---- passes ----


def begin_pass(reader: nn.Module, call: dict[str, Any], cache: LosslessCache, state: PatchState) -> EvictingCache:
    """Begin a pass over a lossless cache: it attends to all tokens' entries, and refills `drafts`, which this returns.

    The decoder's pre-hook (`_enter_decoder`) calls it. Entries are keys and values, kept on the host; `drafts` is the budgeted
    cache, from which tokens are drafted. reader: the decoder. call: its arguments, which get `drafts` as their cache.
    """
    tokens = call.get("input_ids")
    if tokens is None or tokens.shape[0] != 1:
        raise KVPatchError("lossless=True drafts for one text at a time, given as input_ids [1,N].")
    n_read, cache.resent_tokens = cache.resent_tokens, 0  # tokens read before, which generate()'s first pass brings once more
    if n_read:
        tokens = inputs.drop_read(call, n_read, tokens.shape[1])
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise KVPatchError("lossless=True reads one text without padding: leave the padding out.")
    check_room(reader, tokens, cache, state)
    drafts = cache.begin(tokens[0].tolist())  # a new, empty budgeted cache
    set_cache(call, drafts, state.cache_name)
    if drafts.columns_read:
        cache.verified.passes += 1  # not the text's first pass; counted for the report
    state.log.verified = cache.verified
    return drafts


def check_room(reader: nn.Module, tokens_1N: Tensor, cache: LosslessCache, state: PatchState) -> None:
    """Raise KVPatchError unless the host has room for the tokens' keys and values; `begin_pass` asks before each pass."""
    numbers, device = sum(shape.heads * (shape.key + shape.value) for shape in state.shapes), tokens_1N.device
    cache.check_room(tokens_1N.shape[1], numbers * keys_dtype(reader, device.type).itemsize, device)


def end_pass(output: Any, cache: LosslessCache) -> Any:
    """End a pass over a lossless cache, for `after_decoder`; return the output with `cache` in place of `cache.drafts`."""
    cache.end()  # takes in the pass's tokens
    if isinstance(output, tuple):
        return tuple(cache if part is cache.drafts else part for part in output)
    for name, value in output.items():
        if value is cache.drafts:
            output[name] = cache
    return output


# ---- generate() ----


def _check_model(model: Any, prompt: int, longest: int) -> None:
    """Raise KVPatchError, for `generate`, for offloaded weights, or if a text of `longest` tokens has other rotations."""
    if model.device.type == "meta":  # to which assisted decoding moves its drafts
        raise KVPatchError("lossless=True takes no offloaded weights in generate(): load them all, or leave it out.")
    if (limit := switch_length(model)) is None or longest - 1 <= limit:  # the last token is not read
        return
    less = f"give max_new_tokens={limit + 1 - prompt} or less, or " if prompt <= limit else ""
    raise KVPatchError(
        f"lossless=True: this model rotates its tokens otherwise once a text is longer than {limit} tokens, which the entries "
        f"on the host do not follow, and this one may have {longest}: {less}leave lossless out of patched()."
    )


def _check_processors(processors: Iterable[Any]) -> None:
    """Raise KVPatchError, for `generate`, for a logits processor with a state: tokens of rejected drafts would change it."""
    for one in processors:
        if isinstance(one, STATEFUL):
            raise KVPatchError(
                f"lossless=True: {type(one).__name__} goes on from one token to the next, also from rejected drafts: leave "
                "guidance_scale and watermarking_config out of generate(), or lossless out of patched()."
            )


class Drafter(CandidateGenerator):
    """Drafter of assisted decoding, by the budgeted cache: at most `length` tokens, which follows how many were accepted.

    No draft holds a token that ends the text: the verifying pass writes that one, and criteria look at the last token alone.
    """

    def __init__(self, model: Any, cache: LosslessCache, processors: Any, config: GenerationConfig, state: PatchState) -> None:
        """Begin the drafts of one generate(), which makes it by `_get_candidate_generator`. processors: of logits, or None."""
        self.model, self.cache, self.processors, self.state = model, cache, processors, state
        self.samples, self.longest = bool(config.do_sample), int(config.max_length)  # longest: tokens of prompt and answer
        self.criteria: StoppingCriteriaList = vars(config)[CRITERIA]  # put there by `decode` in generate() below
        self.length: int = FIRST  # tokens of the next draft
        self.failed = self.drafted = 0  # drafts in a row of which nothing was accepted; tokens of the newest draft

    @torch.no_grad()
    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Draft tokens that follow input_ids [1,N]; return [1,N+g], and if sampled the logits [1,g,V] they were drawn from.

        transformers' assisted decoding calls it before each verifying pass. The budgeted cache reads the drafted tokens.
        """
        n_text, self.drafted, drafts = input_ids.shape[1], 0, self.cache.drafts
        n_wanted = min(self.length, self.longest - n_text - 1)
        if not self.cache.drafting or n_wanted <= 0 or drafts.columns_read != n_text - 1:  # a full pass must read the text
            return input_ids, None
        text, logits = input_ids, list[Tensor]()
        for _ in range(n_wanted):
            logits_1QV = self.model(text[:, -1:], **{CACHE: drafts}, use_cache=True).logits
            logits_1V = logits_1QV[:, -1].to(torch.float32)
            logits_1V = self.processors(text, logits_1V) if self.processors else logits_1V
            token = logits_1V.softmax(-1).multinomial(1) if self.samples else logits_1V.argmax(-1, keepdim=True)
            longer = torch.cat([text, token.to(text.device)], 1)
            if bool(self.criteria(longer, (*logits, logits_1V)).all()):  # the token ends the text: the verifying pass writes it
                break
            text, logits = longer, [*logits, logits_1V]
        self.drafted = len(logits)
        return text, torch.stack(logits, 1) if self.samples and logits else None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Count accepted tokens; set the next draft's length, 0 after TRIES in vain. Assisted decoding calls it each pass."""
        accepted, verified = int(num_matches), self.cache.verified  # `verified`: counts for the report
        if not self.drafted:
            return
        verified.drafted, verified.accepted = verified.drafted + self.drafted, verified.accepted + accepted
        self.length = min(self.length + 2, MOST) if accepted == self.drafted else max(self.length - 1, accepted + 1)
        self.failed = 0 if accepted else self.failed + 1
        if self.failed >= TRIES:
            self.length = 0
            self.state.settings.notices.say("drafts", HOPELESS)


def wrap_candidates(own: OwnMethod, state: PatchState) -> Callable[..., Any]:
    """Wrap the method in which generate() makes the object that drafts tokens, for `Installation._install_generate`."""

    def _get_candidate_generator(self: Any, generation_config: GenerationConfig, **kwargs: Any) -> Any:
        """Return, for generate(), what drafts in assisted decoding: a Drafter for a lossless cache, else the model's object."""
        cache = cache_of(kwargs["model_kwargs"])
        if not isinstance(cache, LosslessCache):
            return own(self)(generation_config=generation_config, **kwargs)
        if CRITERIA not in vars(generation_config):  # `decode` below did not run
            refuse("generate() of the class", state.list_features())
        return Drafter(self, cache, kwargs.get("logits_processor"), generation_config, state)

    return _get_candidate_generator


class CriteriaAfterPrompt(StoppingCriteriaList):
    """Stopping criteria that never stop at the prompt itself; older transformers apply them to it if nothing was drafted."""

    def __init__(self, criteria: StoppingCriteriaList, prompt: int) -> None:
        super().__init__(criteria)
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] <= self.prompt:
            return input_ids.new_zeros(len(input_ids), dtype=torch.bool)
        return super().__call__(input_ids, scores, **kwargs)


def generate(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: PatchState, given: Tensor | None,
    taken_as: str, strings: str | list[str] | None,
) -> Any:  # fmt: skip
    """Run generate() of a lossless patch once, by transformers' loop that drafts and verifies, for `_run_with_cache`.

    run: the unpatched generate(); args, kwargs: its arguments. given: the ids among them. taken_as: name of its argument for a
    cache. strings: texts at which to stop, from the arguments or a configuration.
    """
    for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate", "compile_config"):
        if kwargs.get(name) is not None:
            raise KVPatchError(f"lossless=True drafts by itself: leave {name} out of generate(), or lossless out of patched().")
    if given is None or given.shape[0] != 1:
        raise KVPatchError("lossless=True generates from one text at a time: give input_ids [1,N], and one text a call.")
    cache = require_lossless_cache(cache_of(kwargs), state)
    seen = len(cache.ids)
    if given[0, :seen].tolist() != cache.ids or given.shape[1] <= seen:
        raise KVPatchError(
            f"input_ids do not go on from the {seen} tokens that the cache has read: give the whole text and something new, or "
            "leave the cache out."
        )
    set_cache(kwargs, cache, taken_as)
    streamer, tokenizer = kwargs.get("streamer"), kwargs.pop("tokenizer", None)  # generate() gives them to no custom loop
    if tokenizer is not None and strings is not None:
        kwargs["stop_strings"] = None  # a configuration's, too
        kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]

    def decode(model: Any, input_ids: Tensor, generation_config: GenerationConfig, **others: Any) -> Any:
        """Draft and verify in `generate`, which encloses this: a `custom_generate`, called in place of transformers' loop."""
        if generation_config.get_generation_mode(None) not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise KVPatchError("lossless=True generates greedily or by sampling: leave beams and other searches out.")
        if len(input_ids) != 1:
            raise KVPatchError("lossless=True drafts for one text at a time: leave num_return_sequences out.")
        # transformers takes inputs on the CPU for any model, but does not move them where it drafts
        input_ids, chunk = input_ids.to(device := device_of(model)), generation_config.prefill_chunk_size
        others = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in others.items()}
        _check_processors(others["logits_processor"])
        _check_model(model, input_ids.shape[1], generation_config.max_length)
        check_room(model, input_ids[:, seen:], cache, state)
        if (seen or chunk) and input_ids.shape[1] > seen + 1:  # else the loop's first pass reads the text
            for ids_1Q in input_ids[:, seen:-1].split(chunk or input_ids.shape[1], 1):
                model(ids_1Q, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        cache.resent_tokens = len(cache.ids)  # the loop's first pass brings these once more: `begin_pass` drops them
        criteria = CriteriaAfterPrompt(others["stopping_criteria"], input_ids.shape[1])
        vars(generation_config)[CRITERIA] = others["stopping_criteria"] = criteria  # `Drafter` gets this configuration
        others.pop("streamer", None)
        return model._assisted_decoding(input_ids, generation_config=generation_config, streamer=streamer, **others)

    state.log.start(cache.drafts, made_here=False)
    try:
        return run(*args, **kwargs, custom_generate=decode)
    except BaseException:
        cache.go_back([*cache.ids[:seen], -1])  # what this call has read, drafts too, is no part of the text
        raise
    finally:
        cache.resent_tokens = 0  # an error may have come before the pass that takes it
        state.log.finish(cache.drafts)
