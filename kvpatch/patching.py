"""patched() and patch(): resolve the options, check everything, install the hooks, and undo them.

The model holds no state of a text: attention modules get a forward that finds an EvictingCache among its arguments, and
all state lives in that cache. A forward without one runs the model's own code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from types import MethodType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache

from .arch.bound import BoundAdapter
from .backends.dispatch import check, check_name
from .cache import from_dynamic
from .cache.cache import EvictingCache
from .cache.settings import CacheSettings
from .errors import KVPatchError
from .hooks import ownership
from .hooks.accelerate import put_hook, replace_forward
from .hooks.attention import attention_forward, parameters
from .hooks.decoder import before_decoder
from .hooks.generate import BATCHED, PREPARE, masks_for_generate, refuse_batched, wrap_generate, wrap_prepare_cache
from .hooks.inputs import file_path, no_argument
from .hooks.state import MISSING, Mark, PatchState
from .hooks.target import Target, already_patched
from .hooks.versions import check_versions
from .policies import Policy, get_policy
from .policies.budgets import Budget, check_count
from .report import Report
from .storage.save_load import load, save


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
    strict: bool = False,
    **policy_options: Any,
) -> Iterator[Patch]:
    """Put `model` on a KV budget inside a with-block; leaving it restores the model, also after an error.

    Args:
        model: a decoder of transformers (also wrapped by PEFT or hooked by accelerate) with an adapter.
        policy: a name of `list_policies()` or a Policy.
        k: the budget of each KV head: a share of the prompt (float in (0, 1], 1.0 never evicts), tokens (int), the bytes of
            all keys and values of one row ("2GiB", over all processes of a sharded model), or a list of these, one per layer.
        block: tokens of a prompt to read at a time, evicting after each block, so that no head ever holds more than its
            budget plus one block. With it, forwards in training mode and without a cache evict too, with gradients.
        schedule: "prompt", "decode" or "both" instead of the policy's own.
        positions: "original", or "renumbered": a cached token's position is its rank among those that its head holds.
        backend: code that computes attention and scores: "auto" (the fastest that supports the case: flash-attn and Triton on
            a GPU, else torch), "torch", or "flash" or "triton" wherever these support it.
        seed: seed of the policy's random numbers.
        strict: raise an error that names the layer and the positions where queries, keys, values, attention or scores are NaN
            or infinite. A debugging aid: it synchronizes with the device in every layer and turns the fast paths of decode
            steps off. Without it a NaN score counts as the lowest.
        **policy_options: the policy's own fields, such as `window=`, `noise=`, `sinks=`, `recent=`, `protect=`.

    Yields:
        The Patch: its report, and caches of your own.

    Raises:
        KVPatchError: the options or the model cannot work; raised before the model is touched.
    """
    handle = None
    try:
        try:
            handle = patch(
                model,
                policy,
                k,
                block=block,
                schedule=schedule,
                positions=positions,
                backend=backend,
                seed=seed,
                strict=strict,
                **policy_options,
            )
            yield handle
        finally:
            if handle is not None:
                handle.remove()
    finally:
        if handle is not None:
            handle.restore()  # if remove() was interrupted


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
    strict: bool = False,
    **policy_options: Any,
) -> Patch:
    """Put `model` on a KV budget without a with-block; `Patch.remove()` undoes it.

    Args:
        model: as in `patched`, like the other arguments.
        policy: a name of `list_policies()` or a Policy.
        k: the budget of each KV head.
        block: tokens of a prompt to read at a time.
        schedule: "prompt", "decode" or "both".
        positions: "original" or "renumbered".
        backend: "auto", "torch", "flash" or "triton".
        seed: seed of the policy's random numbers.
        strict: check all numbers.
        **policy_options: the policy's own fields.

    Raises:
        KVPatchError: the options or the model cannot work; raised before the model is touched.
    """
    check_versions(transformers.__version__, torch.__version__)
    if not isinstance(model, nn.Module):
        raise KVPatchError(
            f"patched() takes a model (torch.nn.Module), not {type(model).__name__}: call patched(model, policy, k)."
        )
    _check_options(positions, seed, strict)
    check_name(backend)
    chosen = policy if isinstance(policy, Policy) else get_policy(policy)
    no_argument(chosen, policy_options, ARGUMENTS)
    chosen = chosen.with_options(schedule, **policy_options)
    _check_block(block, chosen)
    target = Target.find(model)
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
    _check_shared(chosen, budget, target.bounds())
    for case in dict.fromkeys(target.cases(positions == "renumbered", chosen)):
        check(backend, case)
    settings = CacheSettings(
        chosen,
        budget,
        seed,
        block,
        renumbered=positions == "renumbered",
        backend=backend,
        bounds=target.bounds(),
        parallel=target.parallel,
        strict=target.names() if strict else (),
        counts_columns=target.counts_columns(),
    )
    return Patch(target, settings)


_PARAMETERS = inspect.signature(patch).parameters.values()
ARGUMENTS = tuple(one.name for one in _PARAMETERS if one.kind is not one.VAR_KEYWORD)
"""Names of patched()'s own arguments, offered as corrections of misspelt ones."""
SETTINGS = tuple(one.name for one in _PARAMETERS if one.kind is one.KEYWORD_ONLY)
"""Keyword-only arguments of patched(), all of which the command line and the harness accept too."""


def _check_block(block: object, policy: Policy) -> None:
    if block is None:
        return
    check_count("block", block, "tokens")
    assert isinstance(block, int)
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


def _check_shared(policy: Policy, budget: Budget, bounds: tuple[int | None, ...]) -> None:
    evicts = {layer: budget.evicts(layer) for layer, bound in enumerate(bounds) if bound is None}
    if policy.score is not None and policy.score.across_layers and len(set(evicts.values())) == 2:
        full = next(layer for layer, one in evicts.items() if not one)
        raise KVPatchError(
            f"k={list(budget.per_layer)}: with shared=True each layer adds to one score, but layer {full} keeps everything "
            "and scores nothing. Give it a share below 1.0, or use shared=False."
        )


def _check_options(positions: object, seed: object, strict: object) -> None:
    if positions not in ("original", "renumbered"):
        raise KVPatchError(f"positions={positions!r} is unknown; use 'original' or 'renumbered'.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise KVPatchError(f"seed={seed!r} must be an int.")
    if not isinstance(strict, bool):
        raise KVPatchError(f"strict={strict!r} must be True or False.")


class Patch:
    """A patch in force, made by `patched` or `patch`."""

    def __init__(self, target: Target, settings: CacheSettings) -> None:
        self.settings, self._target = settings, target
        self._undo: list[Callable[[], None]] = []  # each is registered before the change that it undoes, and may run twice
        try:
            self._install(target)
        except BaseException:
            self.restore()
            raise

    def _install(self, target: Target) -> None:
        mark = Mark(self.settings.policy.name)
        for module, adapter in target.attentions:
            self._claim(module, mark)
            for name, value in adapter.attributes(module).items():
                self._set(module, name, value)
            replace_forward(module, functools.partial(attention_forward, type(module), adapter), self._undo.append)
        state = self._state = self._hook_state(target)
        for name, ours in state.adapter.aside(target.decoder).items():
            state.aside[name] = (vars(target.decoder).get(name, MISSING), ours)
            self._set(target.decoder, name, state.aside[name][0])
        hook = functools.partial(before_decoder, state=state)
        put_hook(target.decoder, hook, self._undo.append)
        for generator in target.generators:
            generate = wrap_generate(vars(generator).get("generate"), state)
            self._set(generator, "generate", MethodType(generate, generator))
            masks = masks_for_generate(getattr(generator, "create_masks_for_generate", None))
            self._set(generator, "create_masks_for_generate", masks)
            prepare = wrap_prepare_cache(vars(generator).get(PREPARE), state)
            self._set(generator, PREPARE, MethodType(prepare, generator))
            for name in BATCHED if not self.settings.transparent else ():
                self._set(generator, name, MethodType(refuse_batched(name), generator))
            for name in ("_compiled_call", "_last_compile_config"):  # compiled by generate(): dropped with the patch
                self._set(generator, name, MISSING)

    def _hook_state(self, target: Target) -> PatchState:
        module, adapter = target.attentions[0]
        limit = adapter.max_positions(getattr(target.decoder, "config", None))
        names = parameters(type(target.decoder))  # type: ignore[arg-type]
        return PatchState(self.settings, adapter, limit, adapter.kv_shape(module), names)

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        own = vars(module)

        def put(value: object) -> None:
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value

        self._undo.append(functools.partial(put, own.get(name, MISSING)))
        put(value)

    def _claim(self, module: nn.Module, mark: Mark) -> None:
        own = vars(module)

        def undo() -> None:
            if own.get("_kvpatch") is mark:
                del own["_kvpatch"]

        self._undo.append(undo)
        if own.setdefault("_kvpatch", mark) is not mark:  # atomic, of two threads
            raise already_patched(module)

    def new_cache(self, past: Cache | None = None, *, room: int | None = None) -> EvictingCache:
        """Make an empty cache under this budget: prefill it once, `clone()` it per question.

        Args:
            past: a DynamicCache that the unpatched model filled from a prompt without padding, to continue if that is exact.
            room: tokens that will be decoded after a prompt. Buffers then reach their final size when the prompt ends, so
                that a decode step can be compiled.

        Raises:
            KVPatchError: the policy needs attention rows that `past` does not hold, or `room` is no number of tokens.
        """
        if room is not None:
            check_count("room", room, "tokens")
        cache = self._state.new_cache()
        cache.request.room = room
        if past is not None and isinstance(past, Cache):
            ownership.check_layers(past, self._state)
        if past is not None:
            from_dynamic.absorb(cache, past)
        return cache

    def save_cache(self, cache: EvictingCache, path: str | PathLike[str]) -> None:
        """Write a compressed cache, with its scores, to a safetensors file.

        Raises:
            KVPatchError: the cache is empty, in the middle of a prompt, or of another patch.
        """
        ownership.check_own(cache, self._state)
        save(cache, file_path(path), self._target.identity())

    def load_cache(self, path: str | PathLike[str]) -> EvictingCache:
        """Load a cache that `save_cache` wrote under the same model, policy and budget, ready to go on.

        Raises:
            KVPatchError: the file is missing, truncated or altered, or belongs to another model, dtype, policy or budget.
        """
        target = self._target
        cache = load(self.new_cache(), file_path(path), target.identity(), target.shapes(), target.devices())
        with torch.no_grad():  # geometry comes from the model; concatenate() compares it
            for layer, (module, adapter) in zip(cache.layers, target.attentions, strict=True):
                layer.geometry = BoundAdapter(adapter, module, layer.positions.shape[1]).geometry(layer.device)
        return cache

    def report(self) -> Report:
        """Report what the last run kept and cost, and in how many passes the budget acted.

        The numbers of tokens and bytes are those of the last pass that had a cache, also if that is gone.

        Raises:
            KVPatchError: nothing has run yet.
        """
        log = self._state.log
        if not log.number:
            raise KVPatchError("Nothing to report yet: call generate() or the model inside the block first.")
        return Report.last(log)

    def remove(self) -> None:
        """Undo the patch; calling it again does nothing. Open caches stay readable, but no model accepts them."""
        self.restore()
        self._state.log.close()

    def restore(self) -> None:
        """Put the model back, newest change first.

        An interrupt is raised after everything is restored; the undo that it stopped is run again.
        """
        raised: BaseException | None = None
        failed = 0
        while self._undo:
            try:
                self._undo[-1]()
                self._undo.pop()
                failed = 0
            except BaseException as error:
                raised, failed = raised or error, failed + isinstance(error, Exception)
                if failed > 1:  # one at a time: the others must not wait for it
                    self._undo.pop()
                    failed = 0
        if raised is not None:
            raise raised
