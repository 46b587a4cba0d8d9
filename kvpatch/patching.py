"""patched(), patch(), unpatch() and replay(): put a model on a KV budget, take it off again, or let it follow a record.

The model holds no state of a text: attention modules get a forward that finds an EvictingCache among its arguments, and
all state lives in that cache. A forward without one runs the model's own code.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import transformers
from torch import nn

from .arch.automatic import AutomaticAdapter
from .arch.proof import prove_class
from .backends.dispatch import check_name
from .cache.lifetimes import Record
from .errors import KVPatchError
from .handle import Patch
from .hooks import settings
from .hooks.install import unmark_module
from .hooks.lossless import check_lossless
from .hooks.state import RunOptions
from .hooks.target import Target
from .hooks.versions import check_versions, find_untested
from .policies import Policy
from .policies.budgets import ONE_TOKEN, Rule, says_one_token
from .policies.served import refuse
from .storage.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .policies.options import PolicyOptions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_FIRST = ("self", "model", "policy", "k")


def _takes_settings(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate patched.__init__ to accept Settings in place of policy, k and the options that they hold.

    The wrapper sees which arguments the caller has given: one that Settings hold, too, is an error even if it is the default.
    """

    @wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        """Call `init` as `patched(...)` is called; if `policy` is a Settings, with its policy, k and options as arguments."""
        given = dict(zip(_FIRST, args, strict=False)) | kwargs
        settings = given.pop("policy", None)
        # if arguments are too many, or one is given twice, the lengths differ, and `init` raises the TypeError
        if not isinstance(settings, Settings) or len(given) + 1 != len(args) + len(kwargs):
            return init(*args, **kwargs)
        return init(given.pop("self"), **settings.add_arguments(given))  # type: ignore[call-arg, arg-type]

    return call


class patched:
    """Put `model` on a KV budget inside a with-block; leaving it restores the model, also after an error.

    All arguments are checked at the call, before the model is touched. `patch` takes the same arguments.

    Args:
        model: a decoder of transformers (also wrapped by PEFT or hooked by accelerate) with an adapter.
        policy: a name of `list_policies()` in any case, such as "snapkv" or "SnapKV", or a Policy; None is refused. Or
            Settings, which stand for policy, k and the options that they have; others may be given beside them.
        k: the budget of each KV head: a share of the prompt (float in (0, 1], 1.0 never evicts), tokens (int), the bytes of
            all keys and values of one row held between steps ("2GiB", over all processes of a sharded model; buffers have one
            free slot per head more), or a list of these, one per layer; a table of tokens or shares, `k[layer][head]`; or a
            budget that follows the text: `Share`, `Mass`, `Threshold`.
        bits: of each key and value held: 16 keeps the model's own precision, 8 and 4 round them where a prompt ends or a token
            is generated, so that the same bytes hold two to four times the tokens; a `k` in bytes counts it.
        block: tokens of a prompt to read at a time, evicting after each block, so that no head ever holds more than its
            budget plus one block. With it, forwards in training mode and without a cache evict too, with gradients.
        schedule: "prompt", "decode" or "both" instead of the policy's own.
        positions: "original", or "renumbered": a cached token's position is its rank among those that its head holds.
        backend: code that computes attention and scores: "auto" (the fastest that supports the case: flash-attn and Triton on
            a GPU, else torch), "torch", or "flash" or "triton" wherever these support it.
        seed: seed of the policy's random numbers.
        strict: raise an error that names the layer and the positions where queries, keys, values, attention or scores are NaN
            or infinite. A debugging aid: it synchronizes with the device in every layer and turns the fast paths of decode
            steps off. Without it a NaN score counts as the lowest, and the first at a prompt's end is logged.
        record: note when each token is evicted, for `Patch.record()` and `kvpatch.replay`: 4 bytes for each token, layer and KV
            head. It turns the fast paths of decode steps off.
        graphs: on a CUDA device generate() captures its decode step in a CUDA graph and replays it, where a step can be
            captured, as `Patch.graph()` does for a loop of your own; False calls the model for each step.
        auto: take a model without an adapter whose attention goes through transformers' attention interface, after checks
            on its first use; False refuses it.
        lossless: generate() writes what the unpatched model would: the entries of all tokens stay in host memory (on a CPU in a
            mapped file), unrounded, the budget drafts some tokens, and one pass that streams the whole cache layer by layer
            verifies them. One text at a time, greedily or sampled.
        offload_folder: of the mapped file, also beside a device; None is the folder for temporary files on a CPU.
        **policy_options: the policy's own fields, such as `window=`, `noise=`, `sinks=`, `recent=`, `protect=`: those of
            PolicyOptions.

    Yields:
        The Patch: its report, and caches of your own.

    Raises:
        KVPatchError: the options or the model cannot work.

    Example:
        with kvpatch.patched(model, "snapkv", k=0.3, window=16) as patch:
            model.generate(**inputs, max_new_tokens=256)
        print(patch.report())
    """

    _patch: Patch | None = None  # also where __init__ raised
    _unused = False  # True from the call to the entry of the block

    @_takes_settings
    def __init__(  # noqa: PLR0913 - the public signature
        self,
        model: nn.Module,
        policy: str | Policy | Settings | None = None,
        k: float | int | str | Rule | Sequence[float | int | str | Rule | Sequence[float | int]] = 0.5,
        *,
        bits: int = 16,
        block: int | None = None,
        schedule: str | None = None,
        positions: str = "original",
        backend: str = "auto",
        seed: int = 0,
        strict: bool = False,
        record: bool = False,
        graphs: bool = True,
        auto: bool = True,
        lossless: bool = False,
        offload_folder: str | PathLike[str] | None = None,
        **policy_options: Unpack[PolicyOptions],
    ) -> None:
        """Check all arguments and make the Patch, which changes the model only when the block is entered."""
        check_versions(transformers.__version__, torch.__version__)
        assert not isinstance(policy, Settings)  # they were taken apart
        settings.check_model(model, policy)
        positions, backend = settings.positions_of(positions), check_name(backend)
        bits = settings.bits_of(bits)
        settings.check_options(seed, block, strict=strict, record=record, graphs=graphs, auto=auto)
        chosen = settings.policy_of(policy, schedule, dict(policy_options), ARGUMENTS)
        options = RunOptions(graphs, lossless, check_lossless(lossless, offload_folder))
        target = _find_target(model, auto)
        patch_settings = settings.settings_of(
            target, chosen, k, bits=bits, block=block, positions=positions, backend=backend, seed=seed, strict=strict,
            record=record,
        )  # fmt: skip
        if lossless:
            refuse("lossless", patch_settings.list_features())
        if says_one_token(k):
            warnings.warn(ONE_TOKEN, stacklevel=3)  # the line that calls patched()
        self._unused, self._patch = True, Patch(target, patch_settings, options)

    def __enter__(self) -> Patch:
        """Change the model, and return the Patch. A block can be entered only once."""
        if self._patch is None or not self._unused:
            raise KVPatchError("This block was entered before: call kvpatch.patched(...) again for another one.")
        self._unused = False
        self._patch.install()
        return self._patch

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the patch at the end of the with-block, also after an error in it; the model is as it was before."""
        if self._patch is None:
            return
        try:
            self._patch.remove()
        finally:
            self._patch.restore()  # if remove() was interrupted
            self._patch = None

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse attributes of the Patch that are looked up here, and say where they are; Python calls it for missing ones."""
        if name.startswith("_") or not hasattr(self._patch, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise KVPatchError(
            f"patched(...).{name}: patched() acts in a with-block, and what has {name} is its Patch. Write `with "
            f"kvpatch.patched(model, ...) as patch:`, then patch.{name}; without a block, patch = kvpatch.patch(model, ...)."
        )

    def __del__(self) -> None:
        """Restore a model whose block was dropped, when this object is freed; warn if the block was never entered."""
        if self._patch is not None:
            self._patch.restore()  # of a block that was dropped, or interrupted where it began
        if self._unused:
            warnings.warn(
                "[kvpatch] patched(...) was called but its block was never entered, so that nothing was evicted: write `with "
                "kvpatch.patched(model, ...):` around the calls, or use kvpatch.patch(model, ...).",
                stacklevel=2,
            )


def _find_target(model: nn.Module, auto: bool) -> Target:
    """Find the parts of a model to change, for `patched`. Under untested versions check its class on a tiny model (a twin).

    That trial (`prove_class`) is left out for a model that is patched already, which `Target.find` refuses. Changes nothing.
    """
    untested, remedy = find_untested(transformers.__version__, torch.__version__)
    if not untested or any("_kvpatch" in vars(module) for module in model.modules()):
        return Target.find(model, auto=auto)
    try:
        target = Target.find(model, auto=auto)
    except KVPatchError as error:
        raise KVPatchError(f"{untested}: {remedy} if this worked before. {error}") from error
    if not any(isinstance(adapter, AutomaticAdapter) for _, adapter in target.attentions):  # these were checked on a twin
        prove_class(target.decoder, [module for module, _ in target.attentions], untested, remedy)
    return target


ARGUMENTS = tuple(one.name for one in inspect.signature(patched).parameters.values() if one.kind is not one.VAR_KEYWORD)
"""Names of patched()'s own arguments, offered as corrections of misspelt ones."""


def _takes_arguments_of(
    other: Callable[Arguments, object],
) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Decorate `patch`, as this module is imported, so that editors and help() show the arguments of `other` (`patched`)."""

    def replace_signature(function: Callable[..., Result]) -> Callable[Arguments, Result]:
        """Set the signature of `other` on `function`, in place, and return it."""
        function.__signature__ = inspect.signature(other)  # type: ignore[attr-defined]
        return function

    return replace_signature


@_takes_arguments_of(patched)
def patch(*args: Any, **kwargs: Any) -> Patch:
    """Put a model on a KV budget without a with-block; `Patch.remove()` undoes it. The arguments are those of `patched`.

    Raises:
        KVPatchError: the options or the model cannot work; raised before the model is touched.

    Example:
        patch = kvpatch.patch(model, "h2o", k=0.5)
        model.generate(**inputs, max_new_tokens=256)
        patch.remove()
    """
    block = patched(*args, **kwargs)
    handle = block.__enter__()
    block._patch = None  # so that the end of this function does not leave the block
    return handle


def unpatch(model: nn.Module) -> None:
    """Restore a model whose Patch is not at hand: a deep copy made inside a block, or a model whose Patch was lost.

    `model` is then as it was before, attribute by attribute, and a copy is as a copy of the unpatched model. A model that is
    not patched stays as it is. Give the module that was patched, or one that contains it.

    Raises:
        KVPatchError: `model` is no module.

    Example:
        with kvpatch.patched(model, "h2o", k=0.5):
            twin = copy.deepcopy(model)
        kvpatch.unpatch(twin)
    """
    if not isinstance(model, nn.Module):
        raise KVPatchError(f"unpatch() takes a model (torch.nn.Module), not {type(model).__name__}: give the patched model.")
    for module in model.modules():
        if "_kvpatch" in vars(module):
            unmark_module(module, vars(module)["_kvpatch"])


@contextmanager
def replay(model: nn.Module, record: Record | Sequence[Record]) -> Iterator[None]:
    """Let `model` hide what a recorded run had evicted, in a with-block: one parallel pass, with gradients, equals the rollout.

    A forward takes whole texts without a cache: input_ids, and an attention_mask where there is padding, on either side. Rows
    are known by their token ids: they may be reordered, repeated, cut into smaller batches, or shortened at their end, and may
    have the one token more that generate() returns without having read it. The logits are those of the recorded run, to
    rounding: so the importance ratio of a learner and what it generated is 1. Masks are made for some queries at a time. Inside
    a block that is patched already, write `with patch.replay(record):`.

    Args:
        model: the model that generated the texts, also after its weights have changed.
        record: what `Patch.record()` returned, or a list of these.

    Raises:
        KVPatchError: the record is of another model, or the model is patched; in the block: a row is no recorded text, or a
            pass has a cache.

    Example:
        with kvpatch.replay(model, record):
            loss = model(texts, labels=texts).loss
        loss.backward()
    """
    with patched(model, "full", k=1.0) as patch, patch.replay(record):
        yield
