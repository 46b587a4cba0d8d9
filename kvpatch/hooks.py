"""What is put on a patched model: the attention modules' forward and the decoder's pre-hook. generation.py has the rest."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from . import belonging, compiled, joinable, validating
from .arch import Adapter
from .arch.site import Site
from .attention import attend
from .cache import EvictingCache
from .errors import KVPatchError
from .report import Report

if TYPE_CHECKING:
    from .patching import Patch
    from .target import Target

_LOG = logging.getLogger(__name__)
MISSING = object()


def _refuse_pickle(self: object, protocol: object) -> Any:
    raise KVPatchError(
        "A patched model cannot be pickled, nor saved whole by torch.save: leave the block or call Patch.remove() first, or "
        "save model.state_dict(). (copy.deepcopy works: the copy evicts by the same settings.)"
    )


class Mark(str):
    """The name of the policy under which a module is patched; no two are the same object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    __reduce_ex__ = _refuse_pickle


class Settings:
    """What hooks know of their Patch; a weak reference, so that the model never keeps it alive."""

    def __init__(
        self, owner: Patch, adapter: Adapter, max_positions: int | None, target: Target
    ) -> None:
        self.origin = uuid.uuid4().hex
        bounds, self.kv_shape = target.bounds(), adapter.kv_shape(target.attentions[0][0])
        self.policy, self.budget, self.seed = owner.policy, owner.budget, owner.seed
        self.block, self.renumbered, self.backend = owner.block, owner.renumbered, owner.backend
        self.adapter, self.max_positions, self.bounds = adapter, max_positions, bounds
        self.parallel = owner.parallel
        self.decoder_parameters: tuple[str, ...] = ()
        self.strict: tuple[str, ...] = ()
        # nothing is ever evicted and every position is the model's own: what cannot be served may run the model's own code
        acting = any(self.budget.evicts(layer) for layer in range(len(self.budget.per_layer)))
        acting = acting and self.policy.score is not None
        self.transparent = not acting and self.block is None and not self.renumbered
        # attention's distances are between columns of the batch, padding or not: of sliding windows, and of ALiBi by default
        self.columns = not adapter.distances_from_mask and any(
            own.sliding(attn) is not None or own.slopes(attn) is not None for attn, own in target.attentions
        )
        self.ran = self.felt = False
        self.unfelt = self.longest = 0
        self.aside: dict[str, tuple[Any, Any]] = {}  # attributes of the decoder: its own, and during a pass of ours
        self._owner = weakref.ref(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # a copied model evicts by the same settings

    __reduce_ex__ = _refuse_pickle

    def new_cache(self, layers: int | None = None) -> EvictingCache:
        """layers: so many of the first ones, for a model that leaves early."""
        budget = dataclasses.replace(self.budget, per_layer=self.budget.per_layer[:layers])
        cache = EvictingCache(
            self.policy,
            budget,
            seed=self.seed,
            block=self.block,
            renumbered=self.renumbered,
            backend=self.backend,
            bounds=self.bounds[:layers],
            parallel=self.parallel,
        )
        cache.strict, cache.origin = self.strict, self.origin
        cache.transparent = self.transparent
        cache.columns = self.transparent and self.columns
        return cache

    def count(self, call: dict[str, Any], training: bool) -> None:
        """Whether a pass can feel the budget: one that goes on from a cache, or reads more than one block; and the longest of
        those that cannot. A pass that was asked for a cache, or for gradients, is the caller's own affair."""
        tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
        Q, self.ran = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim > 1 else 0, True
        if call.get("past_key_values") is not None or (self.block is not None and Q > self.block):
            self.felt = True
        elif not call.get("use_cache") and not training:
            self.unfelt, self.longest = self.unfelt + 1, max(self.longest, Q)

    def warn_if_unfelt(self) -> None:
        """Log that an evaluation measured the unpatched model, which nothing in its figures shows."""
        acting = self.policy.score is not None and any(map(self.budget.evicts, range(len(self.budget.per_layer))))
        count, self.unfelt = self.unfelt, 0
        if not acting or self.felt or count < 2:  # one pass alone is to look at what a policy keeps
            return
        budgets = ", ".join(dict.fromkeys(map(str, self.budget.per_layer)))
        _LOG.warning(
            f"policy {self.policy.name!r}, k={budgets}: none of {count} forward passes felt the budget, so their figures "
            "are the unpatched model's: a pass computes all of its tokens before it evicts, and nothing went on from there. "
            f"For log-likelihoods and perplexity give block=, fewer than the {self.longest} tokens of the longest pass."
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

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            run = attend if cache.now is not None and cache.now.traced else attend_untraced
            return run(cache, self.layer_idx, q, k, v, Site(adapter, self, k.shape[1])).to(v.dtype)

        # a bound method belongs to the model that was patched, not to a copy of it
        bound = previous is not None and getattr(previous, "__func__", None) is not cls.forward
        own: Callable[..., Any] = previous if bound else functools.partial(cls.forward, self)  # type: ignore[assignment]
        return adapter.run(self, own, core, call.pop(names[0]), call, positioned=not cache.renumbered)

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
    if torch.compiler.is_compiling():
        if isinstance(past, EvictingCache) and _step(decoder, call, past, settings):
            return (), call
        if settings.transparent and past is not None and not isinstance(past, EvictingCache) and _aside(decoder, settings, 0):
            return None  # a cache of the model's own: its code, in one graph
    return _begin_untraced(decoder, call, settings)


def _enter(decoder: nn.Module, call: dict[str, Any], settings: Settings) -> Any:
    """`_begin`, with those attributes of the decoder in place that an adapter puts aside during a pass of ours."""
    changed = _begin(decoder, call, settings)
    for name, values in settings.aside.items():
        value = values[changed is not None]
        if value is MISSING:
            vars(decoder).pop(name, None)
        else:
            vars(decoder)[name] = value
    return changed


def _aside(decoder: nn.Module, settings: Settings, ours: int) -> bool:
    """Those attributes of the decoder are in place already, the model's own (0) or `ours` (1)."""
    return all(vars(decoder).get(name, MISSING) is values[ours] for name, values in settings.aside.items())


def _begin(decoder: nn.Module, call: dict[str, Any], settings: Settings) -> Any:
    """`before_decoder` of any pass but a step that torch.compile sees through."""
    settings.count(call, decoder.training)
    past, config = call.get("past_key_values"), getattr(decoder, "config", None)
    use_cache = call.get("use_cache")
    if settings.transparent and not isinstance(past, EvictingCache) and (past is not None or _own_attention(decoder, call)):
        return None
    if use_cache is None:
        use_cache = getattr(config, "use_cache", True) if past is None else True
    scratch = not isinstance(past, EvictingCache) and (not use_cache or decoder.training)
    if scratch and (settings.block is None or past is not None):
        return None  # without block=, training and cache-less forwards run the model's own code
    cache = settings.new_cache() if past is None else own_cache(past)
    cache.scratch = scratch
    n_layers = min(len(settings.budget.per_layer), getattr(config, "num_hidden_layers", len(cache.layers)))
    if len(cache.layers) != n_layers:
        raise KVPatchError(
            f"The cache was made for a model of {len(cache.layers)} layers, but this one has {n_layers}: make one with this "
            "model's own patch.new_cache()."
        )
    belonging.check(cache, settings)
    if _attentions_wanted(decoder, call):
        raise KVPatchError(
            "output_attentions=True: under a budget no full attention matrix is computed, so there is none to return. "
            "Leave it out, or look at cache.positions(layer) for what is attended to."
        )
    tokens = validating.tokens(call, decoder)
    if tokens is None:
        return None
    B, Q = tokens.shape[:2]
    if not Q:
        raise KVPatchError(
            f"This pass brings no token: the cache has seen {cache.get_seq_length()} already. Give generate() the "
            "whole text as input_ids, or what is new together with an attention_mask [B, seen + new] over both."
        )
    cache.check_whole()
    mask = validating.padding_mask(call.get("attention_mask"), B, Q > 1)
    cache._check(B, Q, mask)  # a mask that is too short makes positions that are, too
    validating.position_ids(call.get("position_ids"), B, Q, settings.max_positions is not None)
    table = functools.partial(settings.adapter.rotary_table, decoder, tokens.device) if cache.renumbered else None
    if cache.joined and not cache.renumbered:
        joinable.place(call, cache, Q, mask, settings.decoder_parameters)
    if table is None:
        _check_positions(cache, Q, call.get("position_ids"), settings.max_positions)
    with torch.inference_mode(False), torch.no_grad():  # as in attention.attend
        repeatable = scratch and decoder.training
        cache.begin(B, Q, mask, call.get("input_ids"), tokens.device, table, repeatable)
    if settings.adapter.positions_from_mask and call.get("position_ids") is None:
        assert cache.now is not None
        call["position_ids"] = cache.now.positions_BQ
    if cache.padded and table is None and "position_ids" in settings.decoder_parameters:
        cache.by_columns |= call.get("position_ids") is None
    # a 4-D mask is taken as it is: no n x n mask gets built, and nothing has to match the cache's length
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    if scratch:
        call.update(past_key_values=None, use_cache=False, attention_mask=Courier.carrying(cache, mask))
    else:
        settings.note(cache)
        call.update(past_key_values=cache, use_cache=True, attention_mask=mask)
    return (), call


def _attentions_wanted(decoder: nn.Module, call: dict[str, Any]) -> bool:
    asked = call.get("output_attentions")
    return bool(getattr(getattr(decoder, "config", None), "output_attentions", False) if asked is None else asked)


def _own_attention(decoder: nn.Module, call: dict[str, Any]) -> bool:
    """A pass that wants attention matrices, or brings an attention pattern of its own."""
    mask = call.get("attention_mask")
    return _attentions_wanted(decoder, call) or (mask is not None and getattr(mask, "ndim", 0) != 2)


def _step(decoder: nn.Module, call: dict[str, Any], cache: EvictingCache, settings: Settings) -> bool:
    """Begin a decode step that torch.compile can see through; False where it is none."""
    tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
    mask = call.get("attention_mask")
    if tokens is None or call.get("output_attentions") or (mask is not None and mask.ndim != 2):
        return False  # the untraced hook has the words for it
    if not _aside(decoder, settings, 1):
        return False  # the model's own code ran since the last pass of ours
    if not compiled.can_trace(cache, tokens.shape[0], tokens.shape[1]):
        return False
    if cache.joined and not cache.renumbered:
        joinable.place(call, cache, 1, mask, settings.decoder_parameters)
    compiled.begin(cache, None if cache.renumbered else settings.max_positions, mask)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    call.update(past_key_values=cache, use_cache=True, attention_mask=mask)
    return True


def own_cache(past: object) -> EvictingCache:
    """`past`, if it is one of ours; which patch made it is looked at where it is used."""
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


# what torch.compile must not look into: prompts, and whatever moves the cache's counters
_begin_untraced = torch.compiler.disable(_enter, reason=compiled.ONE_GRAPH)
attend_untraced = torch.compiler.disable(attend, reason=compiled.ONE_GRAPH)
