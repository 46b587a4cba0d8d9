"""patched() and patch(): resolve, check everything, install, and undo it all.

Nothing on the model holds the state of a text: modules get a forward that finds an EvictingCache among its arguments,
and everything else lives in that cache. A forward without one runs the model's own code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin, PreTrainedModel

from .arch import Adapter, adapter_of, architectures, routes_through_interface
from .arch.adapter import dtype_bytes, dtype_of
from .backends.choice import check, check_name
from .backends.protocol import Case
from .cache import EvictingCache
from .errors import KVPatchError
from .generation import BATCHED, PREPARE, masks_for_generate, refuse_batched, wrap_generate, wrap_prepare_cache
from .hooks import MISSING, Settings, attention_forward, before_decoder, parameters
from .parallel import Parallel, check_layers, parallel_of
from .placement import device_of, replace_forward, weights
from .policies import Policy, get_policy
from .policies.budgets import Budget
from .report import Report
from .storage import load, save


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
            all keys and values of one row ("2GiB", over all processes of a sharded model), or a list of these, one per layer.
        block: read prompts so many tokens at a time and evict after each block, so that no head ever holds more than its
            budget and one block. It also makes forwards in training mode and without a cache evict, gradients included.
        schedule: "prompt", "decode" or "both" instead of the policy's own.
        positions: "original", or "renumbered": a cached token stands at its rank among those that its head holds.
        backend: who computes attention and scores: "auto" (the fastest that can: flash-attn and Triton on a GPU, else torch),
            "torch", or "flash" or "triton" wherever these can.
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
    _check_options(positions, seed)
    check_name(backend)
    chosen = policy if isinstance(policy, Policy) else get_policy(policy)
    chosen = chosen.with_options(schedule, **policy_options)
    _check_block(block, chosen)
    target = _Target.find(model)
    if positions == "renumbered":
        target.check_renumbering()
    if chosen.over_layers is not None and isinstance(k, Sequence) and not isinstance(k, str):
        raise KVPatchError(
            f"k is a list, but policy {chosen.name!r} divides one budget over the layers itself: give one k, or use a policy "
            "without the pyramid."
        )
    if chosen.selection is not None:
        target.check_projection()
    budget = Budget.parse(
        k, n_layers=len(target.attentions), bytes_per_token=target.bytes_per_token(), bounds=target.bounds()
    )
    for case in dict.fromkeys(target.cases(positions == "renumbered", chosen)):
        check(backend, case)
    return Patch(target, chosen, budget, seed, block, positions == "renumbered", backend)


def _check_block(block: object, policy: Policy) -> None:
    if block is None:
        return
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise KVPatchError(f"block={block!r} must be a number of tokens, at least 1.")
    if policy.schedule == "decode":
        raise KVPatchError(
            f"block={block} evicts while the prompt is read, but schedule='decode' keeps the prompt whole: use "
            "schedule='prompt' or 'both', or leave block out."
        )
    if policy.score is not None and policy.score.across_layers:
        raise KVPatchError(
            f"block={block}: with shared=True a layer's choice needs the scores that later layers gave the blocks before, but "
            "a layer reads all blocks before the next layer runs. Use shared=False, or feed the blocks one by one."
        )


def _check_options(positions: object, seed: object) -> None:
    if positions not in ("original", "renumbered"):
        raise KVPatchError(f"positions={positions!r} is unknown; use 'original' or 'renumbered'.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise KVPatchError(f"seed={seed!r} must be an int.")


class _Target:
    """The parts of a model that are touched, found and checked."""

    def __init__(
        self,
        attentions: list[tuple[nn.Module, Adapter]],
        decoder: nn.Module,
        generators: list[nn.Module],
        parallel: Parallel,
    ):
        self.attentions, self.decoder, self.generators, self.parallel = attentions, decoder, generators, parallel

    @classmethod
    def find(cls, model: nn.Module) -> _Target:
        if not isinstance(model, nn.Module):
            raise KVPatchError(f"patched() takes a model (torch.nn.Module), not {type(model).__name__}.")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise KVPatchError(f"{type(model).__name__} is an encoder-decoder; kvpatch serves decoder-only models.")
        found = [(module, adapter) for module in model.modules() if (adapter := adapter_of(module)) is not None]
        if not found:
            raise KVPatchError(_unknown(model))
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
        if next(decoder.parameters(), None) is None:
            raise KVPatchError(
                f"{type(decoder).__name__} has no parameters of its own: FullyShardedDataParallel keeps them in one flat "
                "tensor. Patch the model before it is wrapped, wrap it with use_orig_params=True, or use fully_shard()."
            )
        for adapter in {id(adapter): adapter for _, adapter in found}.values():
            adapter.check(decoder)
        _check_decoder(decoder)
        generators: list[nn.Module] = [m for m in model.modules() if isinstance(m, GenerationMixin)]
        found.sort(key=lambda pair: pair[0].layer_idx)  # type: ignore[arg-type, return-value]
        check_layers([int(module.layer_idx) for module, _ in found])  # type: ignore[arg-type]
        return cls(found, decoder, generators, parallel_of(model, found))

    def bounds(self) -> tuple[int | None, ...]:
        """The sliding window of each layer that bounds itself; None for others, and wherever all layers slide alike."""
        windows = tuple(adapter.sliding(module) for module, adapter in self.attentions)
        return windows if None in windows else (None,) * len(windows)

    def check_projection(self) -> None:
        for _, adapter in self.attentions:
            if adapter.projection is None and type(adapter).output is Adapter.output:
                raise KVPatchError(
                    f"Two-stage selection weighs values by the output projection, but in {adapter.name} more than that stands "
                    "between attention and its output: use the policy without critical."
                )

    def check_renumbering(self) -> None:
        for _, adapter in self.attentions:
            if not adapter.renumbers:
                raise KVPatchError(
                    f"positions='renumbered' does not work for {adapter.name}: {adapter.why_not}. Use positions='original'."
                )

    def identity(self) -> dict[str, Any]:
        """What a saved cache must agree with: shapes, dtype, and a hash over a few numbers of every parameter."""
        digest = hashlib.sha256()
        for name, weight in weights(self.decoder):
            few = weight.flatten()[:16]
            digest.update(name.encode() + (b"" if few.is_meta else few.float().cpu().numpy().tobytes()))
        module, adapter = self.attentions[0]
        heads, head_dim = adapter.kv_shape(module)
        kind = type(self.decoder).__name__
        shape = {"layers": len(self.attentions), "KV heads": heads, "head size": head_dim}
        numbers = {"dtype": str(dtype_of(self.decoder)), "weights": digest.hexdigest()[:16]}
        part = {"part": str(self.parallel)} if self.parallel.size > 1 else {}
        return {"class": kind, **part, **shape, **numbers}

    def cases(self, renumbered: bool, policy: Policy) -> Iterator[Case]:
        """What every layer will ask of a backend."""
        fresh = policy.score is not None and policy.score.fresh
        dtype = dtype_of(self.decoder)
        for module, adapter in self.attentions:
            heads, head_dim = adapter.kv_shape(module)
            alibi, window = adapter.slopes(module) is not None, adapter.sliding(module) is not None
            yield Case(device_of(module).type, dtype, head_dim, 1, alibi, window, fresh=fresh, renumbered=renumbered)

    def devices(self) -> list[torch.device]:
        """Where each layer's cache lies."""
        return [device_of(module) for module, _ in self.attentions]

    def bytes_per_token(self) -> int:
        module, adapter = self.attentions[0]
        heads, head_dim = adapter.kv_shape(module)
        return 2 * heads * head_dim * dtype_bytes(self.decoder)


def _unknown(model: nn.Module) -> str:
    """No adapter serves `model`: what to type instead."""
    known = f"No adapter for {type(model).__name__}. Known architectures: {', '.join(architectures())}. To add one, "
    for module in model.modules():
        if routes_through_interface(module):
            cls = type(module)
            name = cls.__module__.split(".")[-2]
            return known + (
                "register a row, for its attention goes through transformers' attention interface: "
                f"kvpatch.register_arch(kvpatch.InterfaceAdapter({name!r}, '{cls.__module__}.{cls.__qualname__}')); then let "
                "kvpatch.check.Checks(model).run() compare it with the unpatched model."
            )
    return known + (
        "subclass kvpatch.Adapter (project, output, kv_shape; see kvpatch/arch/llama.py) and call "
        "kvpatch.register_arch(MyAdapter())."
    )


def _check_decoder(decoder: nn.Module) -> None:
    """A decoder that transformers does not know must be able to take what it will be given."""
    takes = inspect.signature(type(decoder).forward).parameters
    missing = [name for name in ("past_key_values", "attention_mask", "use_cache") if name not in takes]
    if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        raise KVPatchError(
            f"The forward of {type(decoder).__name__} takes no {', '.join(missing)}: kvpatch hands the decoder its cache as "
            "past_key_values, a mask as attention_mask, and use_cache; add them, and hand the cache and the mask on to the "
            "attention modules."
        )


def _contains(module: nn.Module, wanted: set[int]) -> bool:
    return wanted <= {id(child) for child in module.modules()}


def _refuse_prefix_tuning(model: nn.Module) -> None:
    for config in getattr(model, "peft_config", {}).values() if hasattr(model, "peft_config") else ():
        kind = str(getattr(config, "peft_type", ""))
        if "PREFIX" in kind or "CARTRIDGE" in kind:
            name = "cartridges" if "CARTRIDGE" in kind else "prefix tuning"
            raise KVPatchError(
                f"PEFT's {name} brings a KV cache of its own, which cannot be put on a budget; LoRA and other adapters that "
                "change weights work, and so does prompt tuning."
            )


class Patch:
    """A patch in force. Made by `patched` and `patch`."""

    def __init__(
        self,
        target: _Target,
        policy: Policy,
        budget: Budget,
        seed: int,
        block: int | None,
        renumbered: bool,
        backend: str,
    ) -> None:
        self.policy, self.budget, self.seed = policy, budget, seed
        self.block, self.renumbered, self.backend = block, renumbered, backend
        self.parallel, self._target = target.parallel, target
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
            for name, value in adapter.attributes(module).items():
                self._set(module, name, value)
            self._undo.callback(replace_forward(module, functools.partial(attention_forward, type(module), adapter)))
        adapter = target.attentions[0][1]
        limit = adapter.max_positions(getattr(target.decoder, "config", None))
        settings = Settings(self, adapter, limit, target.bounds())
        settings.decoder_parameters = parameters(type(target.decoder))  # type: ignore[arg-type]
        for name, ours in adapter.aside(target.decoder).items():
            settings.aside[name] = (vars(target.decoder).get(name, MISSING), ours)
            self._set(target.decoder, name, settings.aside[name][0])
        self._settings = settings
        hook = functools.partial(before_decoder, settings=settings)
        self._undo.callback(target.decoder.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for generator in target.generators:
            generate = wrap_generate(vars(generator).get("generate"), settings)
            self._set(generator, "generate", MethodType(generate, generator))
            masks = masks_for_generate(getattr(generator, "create_masks_for_generate", None))
            self._set(generator, "create_masks_for_generate", masks)
            prepare = wrap_prepare_cache(vars(generator).get(PREPARE), settings)
            self._set(generator, PREPARE, MethodType(prepare, generator))
            for name in BATCHED if not settings.transparent else ():
                self._set(generator, name, MethodType(refuse_batched(name), generator))
            for name in ("_compiled_call", "_last_compile_config"):  # what generate() compiles here goes with the patch
                self._set(generator, name, MISSING)

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        before = vars(module).pop(name, MISSING)
        if value is not MISSING:
            vars(module)[name] = value

        def undo() -> None:
            if before is MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before

        self._undo.callback(undo)

    def new_cache(self, past: Cache | None = None, *, room: int | None = None) -> EvictingCache:
        """An empty cache under this budget: prefill it once, `clone()` it per question.

        Args:
            past: a DynamicCache of an unpatched prompt without padding, to start from where that is exact.
            room: tokens that will be decoded after a prompt. Buffers then have their final size where the prompt ends, so
                that a decode step can be compiled.

        Raises:
            KVPatchError: the policy needs attention rows that `past` does not hold, or `room` is no number of tokens.
        """
        if room is not None and (isinstance(room, bool) or not isinstance(room, int) or room < 1):
            raise KVPatchError(f"room={room!r} must be a number of tokens, at least 1.")
        cache = self._settings.new_cache()
        cache.room = room
        if past is not None:
            cache.absorb(past)
        return cache

    def save_cache(self, cache: EvictingCache, path: str | PathLike[str]) -> None:
        """Write a compressed cache, with its scores, to a safetensors file.

        Raises:
            KVPatchError: the cache is empty or in the middle of a prompt.
        """
        save(cache, path, self._target.identity())

    def load_cache(self, path: str | PathLike[str]) -> EvictingCache:
        """A cache that `save_cache` wrote under the same model, policy and budget, ready to go on.

        Raises:
            KVPatchError: the file is missing, truncated or altered, or belongs to another model, dtype, policy or budget.
        """
        return load(self, path, self._target.identity(), self._target.devices())

    def report(self) -> Report:
        """What the last run kept and cost.

        Raises:
            KVPatchError: nothing has run yet.
        """
        cache = self._cache() if self._cache is not None else None
        if cache is not None and cache.get_seq_length():
            return Report.of(cache)
        if self._report is None:
            gone = " The caches of earlier forward passes are gone: hold on to a pass's output." if self._settings.ran else ""
            raise KVPatchError(f"Nothing to report yet: call generate() or the model inside the block first.{gone}")
        return self._report

    def remove(self) -> None:
        """Undo the patch; calling it again does nothing. Open caches stay readable, but no model will take them."""
        cache = self._cache() if self._cache is not None else None
        if cache is not None and cache.get_seq_length():
            self._report, self._cache = Report.of(cache), None
        self._undo.close()
        self._settings.warn_if_unfelt()
