"""Hooks of generate(): they supply an EvictingCache, however generate() is called, and raise for options that bypass it.

There are two ways in. `wrap_generate` passes the cache as an argument, as any caller could. A generate() that was
called on the class, or that has no such argument, makes its own cache: there `wrap_prepare_cache` replaces it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, GenerationMixin

from ..arch.upstream import CACHE, CACHE_NAMES, cache_of, mask_columns, set_cache
from ..arch.upstream import create_masks_for_generate as make_masks
from ..cache import from_dynamic
from ..cache.cache import EvictingCache
from ..cache.lossless import LosslessCache
from ..cache.prefix import Prefix
from ..errors import KVPatchError
from ..policies.served import refuse
from . import inputs, leftovers, lossless, offsets, ownership, texts
from .accelerate import OwnMethod
from .generate_steps import GenerateSteps
from .state import PatchState
from .versions import check_prompt_tuning

DEFAULT_LENGTH = 20  # new tokens of a generate() that is told no number


def wrap_generate(own: OwnMethod, state: PatchState) -> Callable[..., Any]:
    """Make a model's generate(), which passes an EvictingCache to the unpatched one, for `Installation._install_generate`."""
    steps = GenerateSteps(state)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own generate() with an EvictingCache, for the user; after an error remove hooks that PEFT leaves."""
        if "_kvpatch" not in vars(self):  # a shallow copy of the model has kept this method after the block
            return own(self)(*args, **kwargs)
        try:
            return _run_with_cache(self, own(self), steps, args, kwargs)
        except KVPatchError:
            leftovers.remove_adapter_hooks(self)
            raise

    return functools.wraps(GenerationMixin.generate)(generate)


def _run_with_cache(
    self: Any, run: Callable[..., Any], steps: GenerateSteps, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the model's generate() once with an EvictingCache, unless its options ask for no cache or another kind.

    The wrapper of generate() calls it. Changes `kwargs`, the cache and the patch's log. `cache.plans` holds the lengths of
    prompt and answer until `_finish` clears them. run: the unpatched generate(). steps: CUDA graphs of its decode steps.
    """
    state = steps.state
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    config = config if isinstance(config, GenerationConfig) else None
    configs = (config, getattr(self, "generation_config", None))
    if state.settings.transparent and _asks_for_others(kwargs, *configs, self.config):  # policy "full"
        return run(*args, **kwargs)
    _refuse_cache_implementation(kwargs, *configs)
    cache_name, past = _cache_parameter(run, kwargs), cache_of(kwargs)
    goes_on = isinstance(past, EvictingCache | LosslessCache | Prefix)  # the model would fill it whatever use_cache says
    if cache_name is None or (find_option("use_cache", kwargs, config) is False and not goes_on):
        return run(*args, **kwargs)
    _refuse_checkpointing(self)
    if state.lossless:
        given = texts.Given.of(args, kwargs, 0)
        return lossless.generate(run, args, kwargs, state, given.ids, cache_name, find_option("stop_strings", kwargs, *configs))
    past = ownership.start_from_prefix(past, state) if isinstance(past, Prefix) else past
    cache = _cache_for(self, state, past, kwargs.get("attention_mask"))
    cache.refuse_unfinished()
    given = texts.Given.of(args, kwargs, cache.get_seq_length())
    assists, compiles, changes = getattr(config, "is_assistant", False), _compile_wanted(kwargs, *configs), cache.n_changes
    if compiles:
        refuse("compile_config", state.list_features())
    virtual = _virtual_tokens(self)  # how many tokens PEFT puts before the prompt
    if given.columns is not None and not assists:
        texts.check_mask(given)
        if past is not None and not virtual:
            ownership.check(cache, state)
            state.log.warn_not_compared(texts.check_text(given, cache))
    recorded = assists or any(layer.record_past for layer in cache.layers)  # else steps are recorded for this call alone
    try:
        if assists:  # the model drafts tokens for another one
            _prepare_drafts(cache, given.columns, kwargs, given.ids)
        elif given.columns is not None:
            _announce_prompt(cache, given, virtual)
            cache.plans.new_tokens = _count_new(kwargs, configs, (cache.plans.prompt_len or 0) - virtual)
            cache.plans.static_room = cache.plans.new_tokens if compiles else cache.plans.static_room  # slots that stay
            if not state.settings.transparent and _drafts_wanted(kwargs, *configs):
                inputs.refuse_switch(self, given.whole or 0, cache.plans.new_tokens or DEFAULT_LENGTH)
        set_cache(kwargs, cache, cache_name)
        offsets.give_back_offsets(self, cache, None if given.ids is None else len(given.ids))
        state.log.start(cache, made_here=past is None)
        # captured steps know neither drafts, nor static shapes, nor positions of the caller's
        captured = not (assists or cache.is_compileable or kwargs.get("position_ids") is not None)
        graphs = steps.with_graphs(self, cache) if captured else nullcontext()
        with graphs, leftovers.restore_depth(self, find_option("assistant_early_exit", kwargs, *configs)):
            return run(*args, **kwargs)
    except BaseException:
        if compiles and cache.n_changes > changes:  # the progress of an interrupted compiled step is unknown
            cache.in_progress.setdefault("change", ["generate() under torch.compile"])
        raise
    finally:
        _finish(cache, state, recorded)


def wrap_prepare_cache(own: OwnMethod, state: PatchState) -> Callable[..., Any]:
    """Wrap generate()'s method that makes a cache, for `Installation._install_generate`: type(model).generate() calls it."""

    def _prepare_cache_for_generation(
        self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Put an EvictingCache into `model_kwargs` as generate() begins, which calls this. Changes its `generation_config`."""
        past = cache_of(model_kwargs)
        past = ownership.start_from_prefix(past, state) if isinstance(past, Prefix) else past
        given = isinstance(past, EvictingCache | LosslessCache)  # by the wrapper of generate(), or by the caller
        leaves = state.settings.transparent and not given and _asks_for_others(model_kwargs, generation_config)
        if not leaves and (given or generation_config.use_cache is not False):
            _refuse_cache_implementation({}, generation_config)
            generation_config.cache_implementation = None
            generation_config.use_cache = True
            if not given or (isinstance(past, EvictingCache) and past.plans.prompt_len is None):  # not by the wrapper
                made_here = past is None
                past = _cache_for(self, state, past, model_kwargs.get("attention_mask"))
                state.log.start(past, made_here)
                _begin_unwrapped(past, generation_config, model_kwargs, state)
            set_cache(model_kwargs, past, CACHE)
        return own(self)(generation_config, model_kwargs, *args, **kwargs)

    return _prepare_cache_for_generation


def _begin_unwrapped(cache: EvictingCache, config: GenerationConfig, model_kwargs: dict[str, Any], state: PatchState) -> None:
    """Note a prompt's length in `cache.plans`, for type(model).generate(); `_finish` clears it when its `config` is freed."""
    mask = model_kwargs.get("attention_mask")
    columns = mask_columns(config) if mask is None else mask.shape[1]
    if getattr(config, "is_assistant", False):
        _prepare_drafts(cache, columns, model_kwargs)
    elif columns is not None:
        cache.plans.prompt_len, cache.plans.resent_columns = columns, cache.get_seq_length()
        cache.plans.new_tokens = None if config.max_length is None else max(int(config.max_length) - columns, 1)
        if cache.get_seq_length() and not state.settings.transparent:  # its ids are not among the arguments here
            state.log.warn_not_compared("generate() of the class was called, not the model's")
    weakref.finalize(config, _finish, cache, state).atexit = False


def _announce_prompt(cache: EvictingCache, given: texts.Given, virtual: int) -> None:
    """Note in `cache.plans`, for `_run_with_cache`, columns up to the prompt's end: seen ones, PEFT's (`virtual`), and new."""
    # columns of the whole text (PEFT's masks do not tell new tokens alone from it), and those that the cache has read
    columns, seen = given.whole or 0, given.columns_read
    if not virtual:
        cache.plans.prompt_len = columns
        cache.plans.resent_columns = 0 if given.alone else seen  # tokens read before that the first pass may bring again
    else:  # more columns than were read are the whole text, of which PEFT itself drops those; fewer are new ones
        cache.plans.prompt_len = columns + virtual if columns + virtual > seen else seen + columns


def _finish(cache: EvictingCache, state: PatchState, recorded: bool = True) -> None:
    """Clear `cache.plans` and log the end time, for `_run_with_cache` after generate(), also if it failed."""
    cache.plans.prompt_len, cache.plans.new_tokens, cache.plans.resent_columns = None, None, 0
    if not recorded:  # assisted decoding has turned recording on for this call: plain steps need no log
        cache.stop_past_recording()
    state.log.finish(cache)


def _cache_for(model: Any, state: PatchState, past: object, mask: Tensor | None) -> EvictingCache:
    """Return the cache for a generate(): a new one for None, a copy of a filled unpatched one, or `past`, an EvictingCache."""
    # under lossless=True the wrapper of model.generate() makes the cache: type(model).generate() has passed it by
    refuse("generate() of the class", state.list_features())
    if past is None:
        text_config = model.config.get_text_config()
        return state.new_cache(getattr(text_config, "num_hidden_layers", None))
    if isinstance(past, Cache) and not isinstance(past, EvictingCache) and past.get_seq_length():
        ownership.check_layers(past, state)
        from_dynamic.absorb(cache := state.new_cache(), past, mask)
        return cache
    return ownership.require_evicting_cache(past)


def _prepare_drafts(cache: EvictingCache, columns: int | None, kwargs: dict[str, Any], ids: Tensor | None = None) -> None:
    """Prepare an assistant model's cache, for `_run_with_cache`: it records drafting steps, so that they can be undone."""
    if ids is not None and kwargs.get("attention_mask") is None:  # else generated pad tokens would count as padding
        kwargs["attention_mask"] = torch.ones_like(ids)
    cache.activate_past_recording()
    cache.plans.may_roll_back = True
    if columns is not None and cache.get_seq_length() >= columns:
        cache.reset()  # transformers 5.15 leaves rejected drafts in it: read the text anew
    seen = cache.get_seq_length()
    # the last token of the text is read by the first decode step
    cache.plans.prompt_len = seen or (None if columns is None else max(columns - 1, 1))


def _cache_parameter(run: Callable[..., Any], kwargs: dict[str, Any]) -> str | None:
    """Return the name under which `_run_with_cache` passes a cache to generate() (`run`); None: a custom one takes none."""
    if isinstance(kwargs.get("custom_generate"), str):
        return None
    parameters = inspect.signature(run).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return next((name for name in CACHE_NAMES if name in parameters), CACHE if takes_any else None)


# ---- the caller's options ----


def find_option(name: str, kwargs: dict[str, Any], *configs: Any) -> Any:
    """Return an option of generate() as it resolves it: the caller's own, else of the first configuration that has it."""
    found = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((one for one in found if one is not None), None)


def _asks_for_others(kwargs: dict[str, Any], *configs: Any) -> bool:
    """Tell `_run_with_cache` if generate() is asked for another cache or attention matrices; "full" then leaves it alone."""
    past = cache_of(kwargs)
    if past is not None and not isinstance(past, EvictingCache | Prefix):
        return True
    asked = [kwargs.get("output_attentions"), *(getattr(c, "output_attentions", None) for c in configs)]
    return any(asked) or _other_implementation(kwargs, *configs) is not None


def _other_implementation(kwargs: dict[str, Any], *configs: Any) -> str | None:
    """Return the cache_implementation that generate() is asked for, unless it is a name of the default; else None."""
    asked = [kwargs.get("cache_implementation"), *(getattr(c, "cache_implementation", None) for c in configs)]
    return next((one for one in asked if one not in (None, "dynamic", "hybrid")), None)


def _refuse_cache_implementation(kwargs: dict[str, Any], *configs: Any) -> None:
    """Raise KVPatchError, for `_run_with_cache`, if another cache of transformers is asked for by name."""
    implementation = _other_implementation(kwargs, *configs)
    if implementation is not None:
        instead = {
            "static": " To compile the decode step give a compile_config.",
            "quantized": " To round keys and values give bits=8 or 4 to patched().",
        }.get(implementation, "")
        raise KVPatchError(
            f"cache_implementation={implementation!r} asks for another cache; inside the block kvpatch brings its own. "
            f"Leave it out (also in generation_config).{instead}"
        )


def _drafts_wanted(kwargs: dict[str, Any], *configs: Any) -> bool:
    """Tell `_run_with_cache` if generate() was asked for assisted decoding: by a model that drafts, or by prompt lookup."""
    return any(find_option(name, kwargs, *configs) is not None for name in ("assistant_model", "prompt_lookup_num_tokens"))


def _compile_wanted(kwargs: dict[str, Any], *configs: Any) -> bool:
    """Tell `_run_with_cache` if generate() will compile its steps: the cache then gets room for all new tokens at once."""
    return not find_option("disable_compile", kwargs, *configs) and find_option("compile_config", kwargs, *configs) is not None


def _refuse_checkpointing(model: Any) -> None:
    """Raise KVPatchError, for `_run_with_cache`, if gradient checkpointing would take the cache away from the layers."""
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise KVPatchError(
            "generate() of a model in training mode with gradient checkpointing, which takes caches away from its layers: call "
            "model.eval() before, and model.train() afterwards."
        )


def _virtual_tokens(model: Any) -> int:
    """Count, for `_run_with_cache`, the tokens that PEFT's prompt tuning puts before the prompt; 0 without prompt tuning."""
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(wrapper, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return 0
    check_prompt_tuning(importlib.metadata.version("peft"))
    return config.num_virtual_tokens


def _count_new(kwargs: dict[str, Any], configs: tuple[Any, ...], prompt: int) -> int | None:
    """Return the number of new tokens as generate() will resolve it, for `_run_with_cache`; None if no option says so."""
    new, longest = (find_option(name, kwargs, *configs) for name in ("max_new_tokens", "max_length"))
    if new is None and longest is not None:
        return max(int(longest) - prompt, 1)
    return None if new is None else int(new)


def wrap_make_masks(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wrap generate()'s method `previous` that makes masks for compiled steps, for `Installation._install_generate`."""

    def create_masks_for_generate(*args: Any, **kwargs: Any) -> Any:
        """Return, with an EvictingCache, a prompt's padding mask, or a step's last column of it: steps' shapes stay equal."""
        past, mask = cache_of(kwargs), kwargs.get("attention_mask")
        if not isinstance(past, EvictingCache):
            return (previous or make_masks)(*args, **kwargs)
        Q = kwargs["inputs_embeds"].shape[1]
        if mask is None or Q > 1 or past.seen_B is None:
            return mask
        return mask[:, -1:].clone(memory_format=torch.contiguous_format)  # strides must stay constant too

    return create_masks_for_generate
