"""patched() and patch(): resolve, check everything, install, and undo it all.

Nothing on the model holds the state of a text: modules get a forward that finds an EvictingCache among its arguments,
and everything else lives in that cache. A forward without one runs the model's own code.
"""

from __future__ import annotations

import functools
import inspect
import weakref
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
    """Put `model` on a KV budget inside a with-block; afterwards the model is as it was, also after an error.

    Args:
        model: a decoder of transformers (also wrapped by PEFT or hooked by accelerate) with an adapter.
        policy: a name of `list_policies()` or a Policy.
        k: the budget of each KV head: a share of the prompt (float in (0, 1], 1.0 never evicts), tokens (int), a size of
            all keys and values of one row ("2GiB", over all processes of a sharded model), or a list of these, one per layer.
        block: read prompts so many tokens at a time and evict after each block, so that no head ever holds more than its
            budget and one block. It also makes forwards in training mode and without a cache evict, gradients included.
        schedule: "prompt", "decode" or "both" instead of the policy's own.
        positions: "original", or "renumbered": a cached token stands at its rank among those that its head holds.
        backend: who computes attention and scores: "auto" (the fastest that can: flash-attn and Triton on a GPU, else torch),
            "torch", or "flash" or "triton" wherever these can.
        seed: of the policy's random numbers.
        strict: raise an error that names the layer and the positions where queries, keys, values, attention or scores are NaN
            or infinite. It waits for the device in every layer and leaves out what makes steps fast: to find a fault with.
            Without it a score that is NaN counts as the lowest.
        **policy_options: the policy's own fields, such as `window=`, `noise=`, `sinks=`, `recent=`, `protect=`.

    Yields:
        The Patch: its report, and caches to hold yourself.

    Raises:
        KVPatchError: anything that cannot work, before the model is touched.
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
            handle.restore()  # where remove() was interrupted


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
    """As `patched`, without a with-block: undo it with `Patch.remove()`."""
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
"""Names of patched()'s own arguments: what a slip may have meant."""
SETTINGS = tuple(one.name for one in _PARAMETERS if one.kind is one.KEYWORD_ONLY)
"""Those beside the model, the policy and its budget; the command line and the harness take each of them."""


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
    """A patch in force. Made by `patched` and `patch`."""

    def __init__(self, target: Target, settings: CacheSettings) -> None:
        self.settings, self._target = settings, target
        self._cache: weakref.ref[EvictingCache] | None = None
        self._report: Report | None = None
        self._undo: list[Callable[[], None]] = []  # each is there before what it undoes, and may run twice
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
            for name in ("_compiled_call", "_last_compile_config"):  # what generate() compiles here goes with the patch
                self._set(generator, name, MISSING)

    def _hook_state(self, target: Target) -> PatchState:
        module, adapter = target.attentions[0]
        limit = adapter.max_positions(getattr(target.decoder, "config", None))
        names = parameters(type(target.decoder))  # type: ignore[arg-type]
        mine = weakref.ref(self)  # the model must not keep the Patch alive

        def note(cache: EvictingCache, finished: bool) -> None:
            patch = mine()
            if patch is not None:
                patch._cache = weakref.ref(cache)
                patch._report = Report.of(cache) if finished else patch._report

        return PatchState(self.settings, adapter, limit, adapter.kv_shape(module), names, note)

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
        if own.setdefault("_kvpatch", mark) is not mark:  # in one step: of two threads that patch, one comes first
            raise already_patched(module)

    def new_cache(self, past: Cache | None = None, *, room: int | None = None) -> EvictingCache:
        """An empty cache under this budget: prefill it once, `clone()` it per question.

        Args:
            past: a DynamicCache of an unpatched prompt without padding, to start from where that is exact.
            room: tokens that will be decoded after a prompt. Buffers then have their final size where the prompt ends, so
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
            KVPatchError: the cache is empty or in the middle of a prompt.
        """
        ownership.check_own(cache, self._state)
        save(cache, file_path(path), self._target.identity())

    def load_cache(self, path: str | PathLike[str]) -> EvictingCache:
        """A cache that `save_cache` wrote under the same model, policy and budget, ready to go on.

        Raises:
            KVPatchError: the file is missing, truncated or altered, or belongs to another model, dtype, policy or budget.
        """
        target = self._target
        cache = load(self.new_cache(), file_path(path), target.identity(), target.shapes(), target.devices())
        with torch.no_grad():  # how layers attend is the model's, and decides what a cache can be joined with
            for layer, (module, adapter) in zip(cache.layers, target.attentions, strict=True):
                layer.geometry = BoundAdapter(adapter, module, layer.positions.shape[1]).geometry(layer.device)
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
            gone = " The caches of earlier forward passes are gone: hold on to a pass's output." if self._state.ran else ""
            raise KVPatchError(f"Nothing to report yet: call generate() or the model inside the block first.{gone}")
        return self._report

    def remove(self) -> None:
        """Undo the patch; calling it again does nothing. Open caches stay readable, but no model will take them."""
        self.restore()
        cache = self._cache() if self._cache is not None else None
        if cache is not None and not cache.unfinished and cache.get_seq_length():
            self._report, self._cache = Report.of(cache), None
        self._state.warn_if_unfelt()

    def restore(self) -> None:
        """Put the model back, newest change first. An interrupt comes out when all is back; what it stopped is done again."""
        raised: BaseException | None = None
        failed = 0
        while self._undo:
            try:
                self._undo[-1]()
                self._undo.pop()
                failed = 0
            except BaseException as error:
                raised, failed = raised or error, failed + isinstance(error, Exception)
                if failed > 1:  # by itself: the others need not stay for it
                    self._undo.pop()
                    failed = 0
        if raised is not None:
            raise raised
