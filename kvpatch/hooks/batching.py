"""Continuous batching under a patch: init_continuous_batching() and generate_batch() of a patched model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import GenerationMixin

from ..arch.kinds import position_limit
from ..arch.rotary import switch_length
from ..backends.entry_sizes import count_entry_bytes
from ..cache.prefix import Prefix, Prefixes
from ..policies.served import refuse
from ..policies.windows import Chunk
from ..serving.admission import HAS
from ..serving.conversations import Conversations
from ..serving.pool import RequestPool
from .accelerate import OwnMethod
from .attention import Courier
from .editing import replace_span
from .identity import is_read_alike
from .state import PatchState, pass_mask
from .versions import check_engine

ENGINE = "kvpatch.serving.engine"  # imported with the first manager
ALIKE = (
    "in continuous batching this model has {}: it rotates the tokens of a longer text otherwise, and requests share passes, in "
    "which all are rotated alike; generate() serves it"
)
_TOKENIZER: ContextVar[Any] = ContextVar("tokenizer", default=None)  # given to generate_batch()


def wrap_generate_batch() -> Callable[..., Any]:
    """Make the generate_batch() of a model that is patched: it also takes a tokenizer, for stop strings, as generate() does.

    `Installation._install_generate` calls this. generate_batch() calls init_continuous_batching(), which finds the tokenizer in
    `_TOKENIZER`.
    """

    def generate_batch(self: Any, *args: Any, tokenizer: Any = None, **kwargs: Any) -> Any:
        """Run the class's generate_batch() for the user; meanwhile `_TOKENIZER` holds the tokenizer for its manager."""
        token = _TOKENIZER.set(tokenizer)
        try:
            return type(self).generate_batch(self, *args, **kwargs)
        finally:
            _TOKENIZER.reset(token)

    return functools.wraps(GenerationMixin.generate_batch)(generate_batch)


def wrap_init_batching(state: PatchState, decoder: str, own: OwnMethod, placeholders: dict[int, str]) -> Callable[..., Any]:
    """Make the init_continuous_batching() of a patched model: it returns a manager that gives each request a budget.

    `Installation._install_generate` calls this; the user or generate_batch() calls the method made. Where the patch changes
    nothing (policy "full") it returns transformers' own manager, unless the user gives `conversations`, which keep requests'
    caches for later ones, or `messages=True`: each request then says at which tokens its messages begin.

    decoder: its name in the model. own: finds the unpatched method. placeholders: token ids of images and sounds, which a
    request cannot have.
    """

    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        tokenizer: Any = None,
        conversations: Conversations | None = None,
        messages: bool = False,
    ) -> Any:
        """Return the manager of this model's requests, for the user or generate_batch(); each request has a budget.

        Under policy "full" (`transparent`) it is transformers' own manager, unless there are `conversations` or `messages`. The
        first three arguments are those of transformers; tokenizer: for stop strings, by default the one in `_TOKENIZER`.
        """
        if state.settings.transparent and conversations is None and not messages:
            return own(self)(generation_config, continuous_batching_config, workload_hints)
        # refuse what continuous batching cannot do
        check_engine(transformers.__version__)
        chunks = any(isinstance(shape.sliding, Chunk) for shape in state.shapes)  # layers that attend within chunks
        sharded = getattr(self, "_device_mesh", None) is not None
        refuse("continuous batching", state.list_features(chunks=chunks, sharded=sharded, messages=messages))
        from ..serving import engine

        # bytes of a token's keys and values in all layers, by which the engine fits requests into its memory
        bits, size = state.settings.bits, self.dtype.itemsize
        kv_bytes = sum(one.heads * count_entry_bytes(bits, one.key, one.value, size, one.latent) for one in state.shapes)
        positions, limit = _limit_positions(self, state)  # of a request: the most, and what an error says of them
        reader = self.get_submodule(decoder)  # the decoder, which reads texts
        find = functools.partial(_find_prefix, reader, state.prefixes)
        # _make_courier makes the mask by which the decoder's hook finds the requests; a request with placeholders is refused
        terms = engine.EngineTerms(state.settings, positions, kv_bytes, _make_courier, find, limit, placeholders)
        given = _TOKENIZER.get() if tokenizer is None else tokenizer  # for stop strings
        if conversations is not None:  # how the engine edits a kept cache, and tells if this model may go on from it
            conversations.replace = functools.partial(replace_span, reader, state)
            conversations.read_alike = functools.partial(is_read_alike, reader)
        config = continuous_batching_config
        return engine.find_manager(self, terms, generation_config, config, workload_hints, given, conversations)

    return functools.wraps(GenerationMixin.init_continuous_batching)(init_continuous_batching)


def _limit_positions(model: Any, state: PatchState) -> tuple[int | None, str]:
    """Return the most positions of a request, None if unlimited, and the sentence of the error for requests that need more.

    init_continuous_batching() calls it for a new manager. The limit is the model's number of positions (sentence HAS) or, if
    less, the length from which the model uses other rotary frequencies for all tokens, as LongRoPE does (sentence ALIKE).
    """
    # with renumbered positions a text may be longer than the number of positions that the model has
    limit = None if state.settings.renumbered else position_limit(model.config.get_text_config())
    limit, switch = state.max_positions or limit, switch_length(model)
    return (limit, HAS) if switch is None or (limit is not None and limit <= switch) else (switch, ALIKE)


def _find_prefix(decoder: nn.Module, prefixes: Prefixes, ids: Sequence[int]) -> Prefix | None:
    """Return the longest prefix (a text read before, for others to go on from) with which a request's text, `ids`, begins.

    `RequestPool.find_prefix` is this function; the engine's admission calls it for each request it takes in. None if there is
    no such prefix, or if a model with other weights or adapters than `decoder` has read it. prefixes: those of the patch.
    """
    prefix = prefixes.longest(ids)
    if prefix is None or prefix.model_stamp is None:
        return prefix
    return prefix if prefix.model_stamp.decoder() is decoder or is_read_alike(decoder, prefix) else None


def _make_courier(pool: RequestPool) -> Tensor:
    """Make the mask of a packed pass, which carries the pool of its requests through the model to the decoder's hook.

    The engine calls it, as `EngineTerms.carry`, for each pass.
    """
    return Courier.carrying(pool, pass_mask(pool.device))


def end_continuous_batching(model: nn.Module) -> None:
    """Stop managers that were made under the patch; `Installation.restore` calls it as one of the model's undos."""
    engine = sys.modules.get(ENGINE)  # None: the engine was never imported, so that there is no manager
    if engine is not None:
        engine.stop_managers(model)
