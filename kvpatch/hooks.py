"""What is put on a patched model: the attention modules' forward, the decoder's pre-hook, and generate()."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, masking_utils

from . import compiled
from .arch import Adapter
from .arch.site import Site
from .attention import attend
from .cache import EvictingCache
from .errors import KVPatchError
from .report import Report

if TYPE_CHECKING:
    from .patching import Patch


class Settings:
    """What hooks know of their Patch; a weak reference, so that the model never keeps it alive."""

    def __init__(self, owner: Patch, adapter: Adapter, max_positions: int | None) -> None:
        self.policy, self.budget, self.seed = owner.policy, owner.budget, owner.seed
        self.block, self.renumbered, self.backend = owner.block, owner.renumbered, owner.backend
        self.adapter, self.max_positions = adapter, max_positions
        self.decoder_parameters: tuple[str, ...] = ()
        self._owner = weakref.ref(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # a copied model evicts by the same settings

    def new_cache(self) -> EvictingCache:
        return EvictingCache(
            self.policy, self.budget, seed=self.seed, block=self.block, renumbered=self.renumbered, backend=self.backend
        )

    def note(self, cache: EvictingCache, finished: bool = False) -> None:
        owner = self._owner()
        if owner is not None:
            owner._cache = weakref.ref(cache)
            if finished:
                owner._report = Report.of(cache)


def attention_forward(
    cls: type[nn.Module], adapter: Adapter, previous: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The forward of an attention module: through the cache if there is one, else what stood there before."""
    names = parameters(cls)  # type: ignore[arg-type]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        cache = next((value for value in call.values() if isinstance(value, EvictingCache)), None)
        cache = cache or next((value.cache for value in call.values() if isinstance(value, Courier)), None)
        if cache is None:
            _refuse_lost_mask(call)
            return cls.forward(self, *args, **kwargs) if previous is None else previous(*args, **kwargs)
        if self.training and (rate := adapter.dropout(self)):
            raise KVPatchError(
                f"This model trains with an attention dropout of {rate:g}, which evicting attention leaves out: set it to 0 "
                "in the config (attention_dropout or attn_pdrop), train without block=, or call model.eval() to generate."
            )
        hidden_BQE = call.pop("hidden_states")
        q, k, v = (adapter.plain if cache.renumbered else adapter.project)(self, hidden_BQE, **call)
        run = attend if cache.now is not None and cache.now.traced else attend_untraced
        y_BQE = run(cache, self.layer_idx, q, k, v, Site(adapter, self, k.shape[1]))
        return adapter.output(self, y_BQE.to(v.dtype)), None

    return forward


class Courier(Tensor):
    """The mask of a pass that keeps no cache; what is made of it carries the pass's own cache on.

    Gradient checkpointing takes caches away from its layers, and runs them again when no decoder is running; the mask is
    what always reaches them.
    """

    cache: EvictingCache

    @classmethod
    def carrying(cls, cache: EvictingCache, mask: Tensor) -> Courier:
        courier = mask.as_subclass(cls)
        courier.cache = cache
        return courier

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Courier) and isinstance(args[0], Courier):
            out.cache = args[0].cache
        return out


def _refuse_lost_mask(call: dict[str, Any]) -> None:
    """The one-entry mask without its cache would let every token see all others."""
    for value in call.values():
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == (1, 1, 1, 1):
            raise KVPatchError(
                "The cache of this pass did not reach an attention layer: the model replaces its attention mask on the way. "
                "Pass use_cache=True in eval mode, or leave block= out."
            )


@functools.cache
def parameters(cls: Any) -> tuple[str, ...]:
    """Names of forward's parameters, for arguments that are passed by place."""
    return tuple(name for name in inspect.signature(cls.forward).parameters if name != "self")


# ---- the decoder's pre-hook ----


def before_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    """Give the decoder an EvictingCache where it would make a DynamicCache, and keep the padding mask on the cache."""
    call = {**dict(zip(settings.decoder_parameters, args, strict=False)), **kwargs}
    past = call.get("past_key_values")
    if torch.compiler.is_compiling() and isinstance(past, EvictingCache) and _step(call, past, settings):
        return (), call
    return _begin_untraced(decoder, call, settings)


def _begin(decoder: nn.Module, call: dict[str, Any], settings: Settings) -> Any:
    """`before_decoder` of any pass but a step that torch.compile sees through."""
    past = call.get("past_key_values")
    use_cache = call.get("use_cache")
    if use_cache is None:
        use_cache = decoder.config.use_cache if past is None else True  # type: ignore[union-attr]
    scratch = not isinstance(past, EvictingCache) and (not use_cache or decoder.training)
    if scratch and (settings.block is None or past is not None):
        return None  # without block=, training and cache-less forwards run the model's own code
    cache = settings.new_cache() if past is None else _own_cache(past)
    cache.scratch = scratch
    if len(cache.layers) != len(settings.budget.per_layer):
        raise KVPatchError(
            f"The cache was made for a model of {len(cache.layers)} layers, but this one has "
            f"{len(settings.budget.per_layer)}: make one with this model's own patch.new_cache()."
        )
    if call.get("output_attentions") or (
        call.get("output_attentions") is None and getattr(decoder.config, "output_attentions", False)
    ):
        raise KVPatchError(
            "output_attentions=True: under a budget no full attention matrix is computed, so there is none to return. "
            "Leave it out, or look at cache.positions(layer) for what is attended to."
        )
    tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
    if tokens is None:
        return None  # the model's own error is the right one
    mask = _padding_mask(call.get("attention_mask"))
    table = functools.partial(settings.adapter.rotary_table, decoder, tokens.device) if settings.renumbered else None
    if table is None:
        _check_positions(cache, tokens.shape[1], call.get("position_ids"), settings.max_positions)
    with torch.inference_mode(False), torch.no_grad():  # as in attention.attend
        repeatable = scratch and decoder.training
        B, Q = tokens.shape[:2]
        cache.begin(B, Q, mask, call.get("input_ids"), tokens.device, table, repeatable)
    # a 4-D mask is taken as it is: no n x n mask gets built, and nothing has to match the cache's length
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    if scratch:
        call.update(past_key_values=None, use_cache=False, attention_mask=Courier.carrying(cache, mask))
    else:
        settings.note(cache)
        call.update(past_key_values=cache, use_cache=True, attention_mask=mask)
    return (), call


def _step(call: dict[str, Any], cache: EvictingCache, settings: Settings) -> bool:
    """Begin a decode step that torch.compile can see through; False where it is none."""
    tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
    mask = call.get("attention_mask")
    if tokens is None or call.get("output_attentions") or (mask is not None and mask.ndim != 2):
        return False  # the untraced hook has the words for it
    if not compiled.can_trace(cache, tokens.shape[0], tokens.shape[1]):
        return False
    compiled.begin(cache, None if settings.renumbered else settings.max_positions, mask)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    call.update(past_key_values=cache, use_cache=True, attention_mask=mask)
    return True


def _own_cache(past: object) -> EvictingCache:
    if isinstance(past, EvictingCache):
        return past
    kind = type(past).__name__
    if isinstance(past, Cache) and past.get_seq_length() == 0:
        raise KVPatchError(
            f"An empty {kind} was passed as past_key_values; it would stay empty, for inside the block kvpatch's own cache "
            "is filled. Leave past_key_values out, or pass patch.new_cache()."
        )
    raise KVPatchError(
        f"past_key_values is a {kind} that was filled outside the block. Run the prompt inside the block, or convert the "
        "cache with patch.new_cache(past), which works for policies that do not score by attention."
    )


def _padding_mask(mask: object) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise KVPatchError(
            f"attention_mask must be a padding mask [B, tokens], not {shape}: a custom attention pattern cannot be kept "
            "under a budget."
        )
    return mask


def _check_positions(cache: EvictingCache, Q: int, position_ids: Tensor | None, limit: int | None) -> None:
    """Learned and tabled positions run out with an IndexError deep inside; say it in words."""
    if limit is None or cache.get_seq_length() + Q <= limit:
        return
    if position_ids is not None:
        last = int(position_ids.max()) + 1
    else:
        last = cache.get_seq_length() + Q
    if last > limit:
        raise KVPatchError(
            f"The text needs {last} positions, but this model has {limit}. Evicting tokens does not give new positions: "
            "shorten the prompt or generate fewer tokens."
        )


# ---- generate() ----


def wrap_generate(previous: Callable[..., Any] | None, settings: Settings) -> Callable[..., Any]:
    """generate() that brings its own EvictingCache, told the prompt's length and the number of new tokens."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(type(self).generate, self) if previous is None else previous
        config = kwargs.get("generation_config")
        _refuse_cache_implementation(kwargs, config, getattr(self, "generation_config", None))
        compiling = _compile_wanted(kwargs, config, getattr(self, "generation_config", None))
        if _no_cache_wanted(kwargs, config):
            return run(*args, **kwargs)
        if self.training and any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            raise KVPatchError(
                "generate() of a model in training mode with gradient checkpointing, which takes caches away from its layers: "
                "call model.eval() before, and model.train() afterwards."
            )
        past = kwargs.get("past_key_values")
        if past is None:
            cache = settings.new_cache()
        elif isinstance(past, Cache) and not isinstance(past, EvictingCache) and past.get_seq_length():
            cache = settings.new_cache()
            cache.absorb(past, kwargs.get("attention_mask"))
        else:
            cache = _own_cache(past)
        columns = _prompt_columns(args, kwargs)
        if columns is not None:
            # ids that only continue a cache do not count what it has seen
            seen, virtual = cache.get_seq_length(), _virtual_tokens(self)
            cache.prompt_len = columns + virtual if columns + virtual > seen else seen + columns
            cache.new_tokens = _new_tokens(self, kwargs, config, cache.prompt_len - virtual)
            if compiling:
                cache.room = cache.new_tokens
        kwargs.update(past_key_values=cache, use_cache=True)
        kwargs.pop("cache_implementation", None)
        try:
            return run(*args, **kwargs)
        finally:
            cache.prompt_len = cache.new_tokens = None
            settings.note(cache, finished=True)

    return functools.wraps(GenerationMixin.generate)(generate)


def _refuse_cache_implementation(kwargs: dict[str, Any], *configs: Any) -> None:
    asked = [kwargs.get("cache_implementation"), *(getattr(c, "cache_implementation", None) for c in configs)]
    for implementation in asked:
        if implementation not in (None, "dynamic"):
            compiled_instead = " To compile the decode step give a compile_config." if implementation == "static" else ""
            raise KVPatchError(
                f"cache_implementation={implementation!r} asks for another cache; inside the block kvpatch brings its own. "
                f"Leave it out (also in generation_config).{compiled_instead}"
            )


def _compile_wanted(kwargs: dict[str, Any], *configs: Any) -> bool:
    """generate() was asked to compile the decode step."""
    if kwargs.get("disable_compile") or any(getattr(config, "disable_compile", None) for config in configs):
        return False
    asked = (kwargs.get("compile_config"), *(getattr(config, "compile_config", None) for config in configs))
    return any(one is not None for one in asked)


def masks_for_generate(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """The masks that generate() makes before a step that may be compiled: the padding mask itself, for our caches. Of a decode
    step only the newest column, so that its shape stays."""

    def create_masks_for_generate(*args: Any, **kwargs: Any) -> Any:
        past, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if not isinstance(past, EvictingCache):
            return (previous or masking_utils.create_masks_for_generate)(*args, **kwargs)
        Q = kwargs["inputs_embeds"].shape[1]
        if mask is None or Q > 1 or past.seen_B is None:
            return mask
        return mask[:, -1:].clone(memory_format=torch.contiguous_format)  # strides too must stay

    return create_masks_for_generate


def _no_cache_wanted(kwargs: dict[str, Any], config: Any) -> bool:
    asked = kwargs.get("use_cache")
    return asked is False or (asked is None and getattr(config, "use_cache", None) is False)


def _prompt_columns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for tokens in (
        kwargs.get("inputs_embeds"),
        args[0] if args else None,
        kwargs.get("inputs"),
        kwargs.get("input_ids"),
    ):
        if isinstance(tokens, Tensor) and tokens.ndim >= 2 and tokens.shape[1]:
            return tokens.shape[1]
    return None


def _virtual_tokens(model: Any) -> int:
    """Tokens that PEFT's prompt tuning will put before the prompt: while it generates, it prepares the model's inputs."""
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config = getattr(wrapper, "active_peft_config", None)
    return getattr(config, "num_virtual_tokens", 0) if getattr(config, "is_prompt_learning", False) else 0


def _new_tokens(model: Any, kwargs: dict[str, Any], config: Any, prompt: int) -> int | None:
    """generate()'s own number of new tokens, as it will resolve it."""
    sources = [kwargs, vars(config) if config is not None else {}, vars(getattr(model, "generation_config", object()))]
    for source in sources:
        if source.get("max_new_tokens") is not None:
            return int(source["max_new_tokens"])
        if source.get("max_length") is not None:
            return max(int(source["max_length"]) - prompt, 1)
    return None


# what torch.compile must not look into: prompts, and whatever moves the cache's counters
_begin_untraced = torch.compiler.disable(_begin, reason=compiled.ONE_GRAPH)
attend_untraced = torch.compiler.disable(attend, reason=compiled.ONE_GRAPH)
