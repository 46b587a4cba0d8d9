"""patched() and patch(): resolve, check everything, install, and undo it all.

Nothing on the model holds the state of a text: modules get a forward that finds an EvictingCache among its arguments,
and everything else lives in that cache. A forward without one runs the model's own code.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel

from .arch import Adapter, adapter_of, architectures
from .arch.adapter import dtype_bytes
from .attention import attend
from .backends.torch_backend import Geometry
from .cache import EvictingCache
from .errors import KVPatchError, suggest
from .policies import Policy, get_policy
from .policies.budgets import Budget
from .report import Report

BACKENDS = ("auto", "torch")
_MISSING = object()


@contextmanager
def patched(
    model: nn.Module,
    policy: str | Policy = "keyformer",
    k: Any = 0.5,
    *,
    block: int | None = None,
    schedule: str | None = None,
    positions: str = "original",
    backend: str = "auto",
    seed: int = 0,
    **policy_options: Any,
) -> Iterator[Patch]:
    """Put `model` on a KV budget inside a with-block; afterwards the model is as it was, also after an error.

    Args:
        model: a decoder of transformers (also wrapped by PEFT or hooked by accelerate) with an adapter.
        policy: a name of `policies()` or a Policy.
        k: the budget of each KV head: a share of the prompt (float in (0, 1], 1.0 never evicts), tokens (int), a size of
            all keys and values of one row ("2GiB"), or a list with one of these per layer.
        block: reserved for block-wise eviction.
        schedule: "prompt", "decode" or "both" instead of the policy's own.
        positions: "original".
        backend: "auto" or "torch".
        seed: of the policy's random numbers.
        **policy_options: the policy's own fields, such as `window=`, `noise=`, `sinks=`, `recent=`, `protect=`.

    Yields:
        The Patch: its report, and caches to hold yourself.

    Raises:
        KVPatchError: anything that cannot work, before the model is touched.
    """
    handle = patch(
        model,
        policy,
        k,
        block=block,
        schedule=schedule,
        positions=positions,
        backend=backend,
        seed=seed,
        **policy_options,
    )
    try:
        yield handle
    finally:
        handle.remove()


def patch(
    model: nn.Module,
    policy: str | Policy = "keyformer",
    k: Any = 0.5,
    *,
    block: int | None = None,
    schedule: str | None = None,
    positions: str = "original",
    backend: str = "auto",
    seed: int = 0,
    **policy_options: Any,
) -> Patch:
    """As `patched`, without a with-block: undo it with `Patch.remove()`."""
    _check_options(block, positions, backend, seed)
    chosen = policy if isinstance(policy, Policy) else get_policy(policy)
    chosen = chosen.with_options(schedule, **policy_options)
    target = _Target.find(model)
    budget = Budget.parse(k, n_layers=len(target.attentions), bytes_per_token=target.bytes_per_token())
    return Patch(target, chosen, budget, seed)


def _check_options(block: object, positions: object, backend: object, seed: object) -> None:
    if block is not None:
        raise KVPatchError(f"block={block!r}: block-wise eviction is not in this version of kvpatch; leave block=None.")
    if positions == "renumbered":
        raise KVPatchError("positions='renumbered' is not in this version of kvpatch; use positions='original'.")
    if positions != "original":
        raise KVPatchError(f"positions={positions!r} is unknown; use positions='original'.")
    if backend in ("flash", "triton"):
        raise KVPatchError(f"backend={backend!r} is not in this version of kvpatch; use backend='auto' or 'torch'.")
    if backend not in BACKENDS:
        raise KVPatchError(f"Unknown backend {backend!r}.{suggest(str(backend), BACKENDS)} Known: 'auto', 'torch'.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise KVPatchError(f"seed={seed!r} must be an int.")


class _Target:
    """The parts of a model that are touched, found and checked."""

    def __init__(self, attentions: list[tuple[nn.Module, Adapter]], decoder: nn.Module, generators: list[nn.Module]):
        self.attentions, self.decoder, self.generators = attentions, decoder, generators

    @classmethod
    def find(cls, model: nn.Module) -> _Target:
        if not isinstance(model, nn.Module):
            raise KVPatchError(f"patched() takes a model (torch.nn.Module), not {type(model).__name__}.")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise KVPatchError(f"{type(model).__name__} is an encoder-decoder; kvpatch serves decoder-only models.")
        found = [(module, adapter) for module in model.modules() if (adapter := adapter_of(module)) is not None]
        if not found:
            raise KVPatchError(
                f"No adapter for {type(model).__name__}. Known architectures: {', '.join(architectures())}. To add one, "
                "subclass kvpatch.Adapter (project, output, kv_shape; see kvpatch/arch/llama.py) and call "
                "kvpatch.register_arch(MyAdapter())."
            )
        for module in model.modules():
            if "_kvpatch" in vars(module):
                raise KVPatchError(
                    f"This model is already patched with policy {vars(module)['_kvpatch']!r}: leave that block or call "
                    "its Patch.remove() first."
                )
        _refuse_prefix_tuning(model)
        inside = {id(module) for module, _ in found}
        holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _contains(m, inside)]
        decoder = holders[-1] if holders else model
        for adapter in {id(adapter): adapter for _, adapter in found}.values():
            adapter.check(decoder)
        generators = [m for m in model.modules() if isinstance(m, GenerationMixin)]
        return cls(sorted(found, key=lambda pair: pair[0].layer_idx), decoder, generators)  # type: ignore[arg-type, return-value]

    def bytes_per_token(self) -> int:
        module, adapter = self.attentions[0]
        heads, head_dim = adapter.kv_shape(module)
        return 2 * heads * head_dim * dtype_bytes(self.decoder)


def _contains(module: nn.Module, wanted: set[int]) -> bool:
    return wanted <= {id(child) for child in module.modules()}


def _refuse_prefix_tuning(model: nn.Module) -> None:
    for config in getattr(model, "peft_config", {}).values() if hasattr(model, "peft_config") else ():
        if "PREFIX" in str(getattr(config, "peft_type", "")):
            raise KVPatchError(
                "PEFT's prefix tuning brings a KV cache of its own, which cannot be put on a budget; LoRA and other "
                "adapters that change weights work."
            )


class Patch:
    """A patch in force. Made by `patched` and `patch`."""

    def __init__(self, target: _Target, policy: Policy, budget: Budget, seed: int) -> None:
        self.policy, self.budget, self.seed = policy, budget, seed
        self._cache: weakref.ref[EvictingCache] | None = None
        self._report: Report | None = None
        self._undo = ExitStack()
        try:
            self._install(target)
        except BaseException:
            self._undo.close()
            raise

    def _install(self, target: _Target) -> None:
        for module, adapter in target.attentions:
            self._set(module, "_kvpatch", self.policy.name)
            name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
            self._set(module, name, MethodType(_attention_forward(type(module), adapter, vars(module).get(name)), module))
        limit = target.attentions[0][1].max_positions(getattr(target.decoder, "config", None))
        hook = functools.partial(_before_decoder, settings=_Settings(self, limit))
        self._undo.callback(target.decoder.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for generator in target.generators:
            generate = _generate(vars(generator).get("generate"), _Settings(self, limit))
            self._set(generator, "generate", MethodType(generate, generator))

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        before = vars(module).get(name, _MISSING)
        vars(module)[name] = value

        def undo() -> None:
            if before is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before

        self._undo.callback(undo)

    def new_cache(self, past: Cache | None = None) -> EvictingCache:
        """An empty cache under this budget: prefill it once, `clone()` it per question.

        Args:
            past: a DynamicCache of an unpatched prompt without padding, to start from where that is exact.

        Raises:
            KVPatchError: the policy needs attention rows that `past` does not hold.
        """
        cache = EvictingCache(self.policy, self.budget, seed=self.seed)
        if past is not None:
            cache.absorb(past)
        return cache

    def report(self) -> Report:
        """What the last run kept and cost.

        Raises:
            KVPatchError: nothing has run yet.
        """
        cache = self._cache() if self._cache is not None else None
        if cache is not None and cache.get_seq_length():
            return Report.of(cache)
        if self._report is None:
            raise KVPatchError("Nothing to report yet: call generate() or the model inside the block first.")
        return self._report

    def remove(self) -> None:
        """Undo the patch; calling it again does nothing. Open caches stay readable, but no model will take them."""
        cache = self._cache() if self._cache is not None else None
        if cache is not None and cache.get_seq_length():
            self._report, self._cache = Report.of(cache), None
        self._undo.close()


class _Settings:
    """What hooks know of their Patch; a weak reference, so that the model never keeps it alive."""

    def __init__(self, owner: Patch, max_positions: int | None) -> None:
        self.policy, self.budget, self.seed = owner.policy, owner.budget, owner.seed
        self.max_positions = max_positions
        self._owner = weakref.ref(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Settings:
        return self  # a copied model evicts by the same settings

    def new_cache(self) -> EvictingCache:
        return EvictingCache(self.policy, self.budget, seed=self.seed)

    def note(self, cache: EvictingCache, finished: bool = False) -> None:
        owner = self._owner()
        if owner is not None:
            owner._cache = weakref.ref(cache)
            if finished:
                owner._report = Report.of(cache)


def _attention_forward(cls: type[nn.Module], adapter: Adapter, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """The forward of an attention module: through the cache if there is one, else what stood there before."""
    names = _parameters(cls)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        cache = next((value for value in call.values() if isinstance(value, EvictingCache)), None)
        if cache is None:
            return cls.forward(self, *args, **kwargs) if previous is None else previous(*args, **kwargs)
        hidden_BQE = call.pop("hidden_states")
        q, k, v = adapter.project(self, hidden_BQE, **call)
        slopes = adapter.slopes(self)
        if slopes is not None:
            slopes = slopes.to(q.device).unflatten(0, (k.shape[1], -1))
        geometry = Geometry(adapter.scale(self), slopes, adapter.sliding(self))
        y_BQE = attend(cache, self.layer_idx, q, k, v, geometry)
        return adapter.output(self, y_BQE.to(v.dtype)), None

    return forward


@functools.cache
def _parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of forward's parameters, for arguments that are passed by place."""
    return tuple(name for name in inspect.signature(cls.forward).parameters if name != "self")


# ---- the decoder's pre-hook ----


def _before_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: _Settings) -> Any:
    """Give the decoder an EvictingCache where it would make a DynamicCache, and keep the padding mask on the cache."""
    call = {**dict(zip(_parameters(type(decoder)), args, strict=False)), **kwargs}
    past = call.get("past_key_values")
    use_cache = call.get("use_cache")
    if use_cache is None:
        use_cache = decoder.config.use_cache if past is None else True  # type: ignore[union-attr]
    if not isinstance(past, EvictingCache) and (not use_cache or decoder.training):
        return None  # training and cache-less forwards run the model's own code
    cache = settings.new_cache() if past is None else _own_cache(past)
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
    _check_positions(cache, tokens.shape[1], mask, call.get("position_ids"), settings.max_positions)
    cache.begin(tokens.shape[0], tokens.shape[1], mask, call.get("input_ids"), tokens.device)
    settings.note(cache)
    call.update(past_key_values=cache, use_cache=True)
    # a 4-D mask is taken as it is: no n x n mask gets built, and nothing has to match the cache's length
    call["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    return (), call


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


def _check_positions(
    cache: EvictingCache, Q: int, mask: Tensor | None, position_ids: Tensor | None, limit: int | None
) -> None:
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


def _generate(previous: Callable[..., Any] | None, settings: _Settings) -> Callable[..., Any]:
    """generate() that brings its own EvictingCache, told the prompt's length and the number of new tokens."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(type(self).generate, self) if previous is None else previous
        config = kwargs.get("generation_config")
        _refuse_cache_implementation(kwargs, config, getattr(self, "generation_config", None))
        if _no_cache_wanted(kwargs, config):
            return run(*args, **kwargs)
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
            seen = cache.get_seq_length()
            cache.prompt_len = columns if columns > seen else seen + columns
            cache.new_tokens = _new_tokens(self, kwargs, config, cache.prompt_len)
        kwargs.update(past_key_values=cache, use_cache=True)
        if kwargs.get("cache_implementation") == "dynamic":
            del kwargs["cache_implementation"]
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
            raise KVPatchError(
                f"cache_implementation={implementation!r} asks for another cache; inside the block kvpatch brings its own. "
                "Leave it out (also in generation_config)."
            )


def _no_cache_wanted(kwargs: dict[str, Any], config: Any) -> bool:
    asked = kwargs.get("use_cache")
    return asked is False or (asked is None and getattr(config, "use_cache", None) is False)


def _prompt_columns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for tokens in (kwargs.get("inputs_embeds"), args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids")):
        if isinstance(tokens, Tensor) and tokens.ndim >= 2 and tokens.shape[1]:
            return tokens.shape[1]
    return None


def _new_tokens(model: Any, kwargs: dict[str, Any], config: Any, prompt: int) -> int | None:
    """generate()'s own number of new tokens, as it will resolve it."""
    sources = [kwargs, vars(config) if config is not None else {}, vars(getattr(model, "generation_config", object()))]
    for source in sources:
        if source.get("max_new_tokens") is not None:
            return int(source["max_new_tokens"])
        if source.get("max_length") is not None:
            return max(int(source["max_length"]) - prompt, 1)
    return None
