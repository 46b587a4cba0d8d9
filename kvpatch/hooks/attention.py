"""The forward of a patched attention module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..arch.adapter import Adapter
from ..arch.bound import BoundAdapter
from ..arch.upstream import cache_argument
from ..attention.attend import attend
from ..cache import compiled
from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..serving.packed import PackedPass
from .accelerate import OwnMethod


def make_forward(cls: type[nn.Module], adapter: Adapter, layer: int, reads: bool, own: OwnMethod) -> Callable[..., Any]:
    """Make the forward that replaces an attention module's; `Installation._change_model` calls this as a model is patched.

    The model calls the new forward once for each pass and layer. It attends through the cache among its arguments, which
    changes that cache; without one it calls the module's own forward.

    cls: the module's class. adapter: runs the code of its model family. layer: index of the layer in the cache. reads: True if
    the module computes no keys, and uses those of that layer. own: returns the module's own forward.
    """
    # names of the forward's parameters, the first of which takes the hidden states; and of the parameter that takes the cache
    names, cache_name = parameters(cls), cache_argument(cls.forward)  # type: ignore[arg-type]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module with attention through the cache that its arguments bring; without one run its own forward.

        The decoder layer calls it. In training mode an attention dropout raises KVPatchError.
        """
        call = {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs
        # find the cache: under its name, under another, or on the mask that carries it (a Courier)
        cache = call.get(cache_name)
        if not isinstance(cache, EvictingCache):
            cache = next((value for value in call.values() if isinstance(value, EvictingCache)), None)
            cache = cache or next((value.cache for value in call.values() if isinstance(value, Courier)), None)
        if cache is None:  # a pass that the patch leaves to the model
            _refuse_lost_mask(call, Q=call[names[0]].shape[1])
            return own(self)(*args, **kwargs)
        if self.training and (rate := adapter.dropout(self)):
            raise KVPatchError(
                f"This model trains with an attention dropout of {rate:g}, which evicting attention leaves out: load it by "
                "from_pretrained(..., attention_dropout=0.0) (in some families attn_pdrop=0.0), train without block= and "
                "outside of replay(), or call model.eval() to generate."
            )

        hidden = call.pop(names[0])

        def attend_through(cache: EvictingCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attend through this layer of the cache, which changes it; the adapter calls this in place of attention.

            q [B,H*G,Q,D], k and v [B,H,Q,D] -> [B,Q,H*G*D].
            """
            now, compiling = cache.now, torch.compiler.is_compiling()  # now: facts about the running pass
            if not (compiling or reads or now is None) and (steps := cache.steps) is not None and steps.now is now:
                step = steps.running[layer]  # a fast decode step, bound to this layer's buffers before
                if step is not None and step.takes_call(self, q):  # the same module, dtype and mode as when it was bound
                    return step(cache, q, k, v)
            if now is not None and now.repeat is not None:  # the pass reads a prompt a second time, for scores
                now.repeat.hidden = hidden
            # torch.compile traces only the passes begun as traced decode steps
            run = attend_untraced if compiling and not (now is not None and now.traced) else attend
            out = run(cache, layer, q, k, v, BoundAdapter(adapter, self, k.shape[1]), reads)
            return out if out.dtype == v.dtype else out.to(v.dtype)

        if isinstance(cache, PackedPass):  # continuous batching: it calls attend_through for each cache of requests
            core = functools.partial(cache.attend, attend_through)
        else:
            core = functools.partial(attend_through, cache)
        call = adapter.without_rotation(call) if cache.settings.renumbered else call  # such a cache rotates keys later
        # the model family's code computes q, k, v from the hidden states, calls `core` for attention, and projects its output
        return adapter.run(self, own(self), core, hidden, call)

    return forward


class PassMask(Tensor):
    """The one-entry mask that replaces the padding mask in a pass through a cache.

    Its type identifies it: results computed from it are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Courier(Tensor):
    """The mask of a pass for which the caller gave no cache; it and tensors made from it carry the pass's own cache, or caches.

    Gradient checkpointing removes caches from the layers' arguments, and runs layers again after the decoder has ended. The
    mask is the only argument that always reaches the layers.
    """

    cache: Any  # an EvictingCache, or a PackedPass; on its way to the decoder a RequestPool

    @classmethod
    def carrying(cls, cache: Any, mask: Tensor) -> Courier:
        """Return `mask` as a Courier, a mask tensor with the attribute `cache`, by which the attention layers find the cache.

        For passes whose layers do not get their cache as an argument. `_begin_pass` and `begin_replay` call it where the caller
        wants no cache, so that one serves this pass alone; `_make_courier` and `_begin_packed` for continuous batching, which
        packs tokens of several requests, each with its own cache.
        """
        courier = mask.as_subclass(cls)
        courier.cache = cache
        return courier

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch operation on this mask; masks made from it get its `cache`. torch calls this for each operation.

        Raises KVPatchError for scores that the mask was added to (a Courier without `cache`): the model's own attention ran, as
        when gradient checkpointing runs a layer again after the patch was removed.
        """
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Courier) and isinstance(args[0], Courier):
            if not hasattr(args[0], "cache"):  # scores plus a mask
                raise KVPatchError(
                    "Gradient checkpointing runs layers again in the backward pass, which came after the block: call "
                    "backward() inside it."
                )
            out.cache = args[0].cache
        return out


def _refuse_lost_mask(call: dict[str, Any], Q: int) -> None:
    """Raise KVPatchError if an attention module without a cache gets the patch's mask [1,1,1,1], which hides no later tokens.

    The replaced forward calls it for passes without a cache. Attention through the cache is causal by itself, so the patch
    gives the decoder this mask. If the cache was lost on the way, the module's own attention would let each of its Q tokens see
    all others. For Q = 1 the mask may be the model's own.
    """
    for value in call.values():
        hides_nothing = isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == (1, 1, 1, 1)
        if isinstance(value, PassMask) or (hides_nothing and Q > 1):
            raise KVPatchError(
                "The cache of this pass did not reach an attention layer: gradient checkpointing took it away, or the model "
                "replaces its attention mask on the way. Call model.eval() and pass use_cache=True, or leave block= out."
            )


@functools.cache
def parameters(cls: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a class's forward, without self, by which hooks name positional arguments."""
    return tuple(name for name in inspect.signature(cls.forward).parameters if name != "self")


# torch.compile must not trace these: prompts, and all that advances the cache's counters
attend_untraced = torch.compiler.disable(attend, reason=compiled.ONE_GRAPH)
