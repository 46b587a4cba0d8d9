"""A layer of vLLM under a budget: metadata of a pass, the attention of a layer, and the worker that all layers share.

All names that vLLM does not promise are imported in this folder; `versions.TESTED` has the versions that they were tested in.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionType,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from ...arch.adapter import Adapter
from ...arch.bound import BoundAdapter
from ...attention.attend import attend
from ...cache.cache import EvictingCache
from ...cache.holding import keeps_new
from ...cache.settings import CacheSettings
from ...errors import KVPatchError
from ...policies.budgets import Budget, Size
from ...policies.parallel import WHOLE, Parallel
from .callers import iterate_callers
from .configuration import check_configuration, find_settings
from .pages import BudgetSpec, LayerBudget, check_manager
from .requests import Requests
from .scheduled import Pass

_LOG = logging.getLogger("vllm.kvpatch")


class VllmAdapter(Adapter):
    """Adapter of a layer of any model, made from the arguments that vLLM gives its attention."""

    name, classes = "vllm", ()

    def output(self, attn: Any, y_BQE: Tensor) -> Tensor:
        return attn.projection(y_BQE.flatten(0, 1))[0].unflatten(0, y_BQE.shape[:2])

    def scale(self, attn: Any) -> float:
        return attn.factor

    def slopes(self, attn: Any) -> Tensor | None:
        return attn.slopes_N

    def sliding(self, attn: Any) -> int | None:
        return attn.window

    def softcap(self, attn: Any) -> float | None:
        return attn.cap

    def sinks(self, attn: Any) -> Tensor | None:
        return attn.sinks_N


class BoundLayer(BoundAdapter):
    """The adapter of a layer whose weights no longer change: the rows of its output projection are measured once."""

    rows: Tensor | None = None

    def output_rows(self, like: Tensor, group: int, parallel: Parallel = WHOLE) -> tuple[Tensor, bool]:
        """Return the output projection's rows per query head, for `Call` to weigh values, and True: they were measured."""
        if self.rows is None:  # once, for vLLM's weights do not change
            self.rows, _ = super().output_rows(like, group, parallel)
        return self.rows, True


class BudgetedAttention(AttentionImpl):
    """The attention of one layer: through the caches of the pass's requests, which the first layer begins for all."""

    def __init__(  # noqa: PLR0913 - vLLM's signature
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Make a layer's attention; vLLM calls it for each. Adds it to the worker that all layers of the model share."""
        config = get_current_vllm_config()
        _refuse_kind(attn_type, kv_sharing_target_layer_name is not None, kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.factor, self.window, self.cap, self.sinks_N = scale, sliding_window, logits_soft_cap or None, sinks
        self.slopes_N = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.bound = BoundLayer(VllmAdapter(), self, self.num_kv_heads)
        self.holder: Callable[[], nn.Module | None] = lambda: None  # the worker sets it: the module around this layer
        before: list[BudgetedAttention] = [
            layer.impl for layer in _list_layers(config) if isinstance(layer.impl, BudgetedAttention)
        ]
        self.index = len(before)
        self.worker: Worker = before[0].worker if before else Worker(config)
        self.worker.add(self)

    @property
    def projection(self) -> nn.Module:
        """The layer's output projection, for policies that weigh values by it: a sibling of vLLM's attention module."""
        holder = self.holder()  # the module that has both
        projections = [one for one in holder.children() if isinstance(one, RowParallelLinear)] if holder is not None else []
        if len(projections) != 1:
            raise KVPatchError(
                f"Policy {self.worker.terms.policy.name!r} weighs values by the output projection, which kvpatch did not find "
                "in this model of vLLM's: use the policy without critical."
            )
        return projections[0]

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check the output projection, if the policy reads it."""
        if self.worker.terms.policy.weighs_values:
            _ = self.projection  # raises an error if there is none

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules that run when the output projection is measured."""
        return self.projection.modules()

    def do_kv_cache_update(self, *given: Any) -> None:
        """Do nothing: `forward` writes what is kept."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Pass | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write a layer's attention into `output`, and return it. vLLM calls this once per pass, for all requests of the pass.

        query, key, value: the new tokens of all requests, one after the other. kv_cache: the layer's pages. Scales: unused.
        """
        if attn_metadata is None or not attn_metadata.scheduled:  # vLLM warms up
            return output
        T, D = attn_metadata.scheduled[-1].first + attn_metadata.scheduled[-1].columns, self.head_size  # T: tokens of the pass
        q, k, v = (x[:T].view(T, -1, D).transpose(0, 1)[None] for x in (query, key, value))
        out_1QE = self.worker.attend(self, q, k, v, kv_cache, attn_metadata)
        output[:T].copy_(out_1QE[0].view(T, *output.shape[1:]))
        return output

    def core(self, cache: EvictingCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend through one cache, which gets the new keys and values. PackedPass.attend calls this for each part."""
        return attend(cache, self.index, q, k, v, self.bound)


class Worker:
    """The layers of a model on this process, and its requests."""

    def __init__(self, config: VllmConfig) -> None:
        """Check vLLM's configuration, as the first layer is made. The worker then waits for the layers to be added.

        Under a policy that weighs values by the output projection, torch will call `_note_holder`, which finds that projection.
        """
        terms = find_settings(config)
        assert terms is not None
        check_configuration(config, terms)
        self.terms, self.config, self.layers = terms, config, list[BudgetedAttention]()
        self._holder_hook = register_module_module_registration_hook(self._note_holder) if terms.policy.weighs_values else None
        self.requests: Requests | None = None
        if terms.policy.over_layers is not None:  # it gives layers unequal budgets
            self._refuse_prefix_caching()
        if config.cache_config.enable_prefix_caching:
            _LOG.info("[kvpatch] prefix caching is off under a budget.")

    def add(self, layer: BudgetedAttention) -> None:
        """Add a layer; layer.index is its place. `BudgetedAttention` calls it. Unequal windows exclude prefix caching."""
        self.layers.append(layer)
        if layer.window != self.layers[0].window:
            self._refuse_prefix_caching()

    def _refuse_prefix_caching(self) -> None:
        """Raise KVPatchError if prefix caching is on: vLLM does not start with it if layers hold unequal numbers of tokens."""
        if self.config.cache_config.enable_prefix_caching:
            raise KVPatchError(
                "Layers of this model hold different numbers of tokens under this budget, and vLLM's prefix caching does not "
                "start with such layers: give enable_prefix_caching=False (--no-enable-prefix-caching)."
            )

    @functools.cached_property
    def settings(self) -> CacheSettings:
        """The policy and budget of the requests' caches, made when vLLM first sizes a layer's pages: all layers exist then."""
        windows, model, policy = tuple(layer.window for layer in self.layers), self.config.model_config, self.terms.policy
        # layers with a sliding window keep that instead of a budget, unless all layers have one
        bounds = windows if None in windows else (None,) * len(windows)
        bytes_per_token = 2 * model.get_total_num_kv_heads() * model.get_head_size() * model.dtype.itemsize
        budget = Budget.parse(self.terms.k, n_layers=len(windows), bytes_per_token=bytes_per_token, bounds=bounds)
        longest, tokens = model.max_model_len, budget.rules[0].tokens(model.max_model_len)  # what layer 0 may hold
        if longest <= tokens:
            _LOG.warning("[kvpatch] k=%r is not below max_model_len=%d: nothing is evicted.", self.terms.k, longest)
        tp = get_tp_group()
        parallel = Parallel(tp.world_size, tp.rank_in_group, tp.device_group) if tp.world_size > 1 else WHOLE
        return CacheSettings(policy, budget, seed=self.terms.seed, bounds=bounds, parallel=parallel)

    @functools.cached_property
    def held(self) -> list[LayerBudget]:
        """The budget of each layer, by which vLLM's pages are counted at the start: the most that any prompt gives the layer.

        Budgets that depend on the text are replaced by their highest value.
        """
        settings, longest = self.settings, self.config.model_config.max_model_len
        budgets = [rule.k if isinstance(rule, Size) else rule.highest(longest, 1)[0] for rule in settings.rules]
        return [
            LayerBudget(budget, keeps_new(settings, layer), settings.bounds[layer] is not None, self.terms.most)
            for layer, budget in enumerate(budgets)
        ]

    def spec(self, layer: BudgetedAttention, spec: AttentionSpec) -> BudgetSpec:
        """Return the spec of a layer's pages under its budget, for `make_budgeted_spec`, in place of vLLM's."""
        model, cache = self.config.model_config, self.config.cache_config
        budgeted = BudgetSpec.of(spec, self.held[layer.index], model.max_model_len, cache)
        check_manager(budgeted)
        return budgeted

    def _note_holder(self, module: nn.Module, name: str, child: Any) -> None:
        """Note in layer.holder the module that gets a layer's attention as a child: it has the output projection too.

        torch calls this for each child that any module gets, while vLLM makes the model.
        """
        layer = getattr(child, "impl", None)
        if isinstance(layer, BudgetedAttention) and layer.worker is self:
            layer.holder = weakref.ref(module)

    def attend(self, layer: BudgetedAttention, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, now: Pass) -> Tensor:
        """Run one layer of a pass, q [1,H*G,T,D], k and v [1,H,T,D] -> [1,T,H*G*D]. The layer's `forward` calls this.

        The first layer begins the pass in the caches of all requests, and the first pass of all makes `requests`.
        now.scheduled: each request's columns (tokens) in the pass, and its pages. packed: the pass, cut into parts of requests
        that share a cache; its `attend` calls layer.core for each part.
        """
        if self.requests is None:
            self.requests = Requests(self.settings, q.device)
            if self._holder_hook is not None:  # the hook that calls `_note_holder`: the model has been made
                self._holder_hook.remove()
        self.requests.newest_pass[layer.index] = now.scheduled
        if layer.index == 0:
            self.packed = self.requests.begin(now.scheduled)
        if self.requests.pools[layer.index] is None:
            # N pages of P slots (places for tokens), divided anew: keys first, then values, in strips (a page of one head)
            N, H, P, _ = kv_cache.shape
            self.requests.pools[layer.index] = kv_cache.view(2, N * H, P, -1)
        return self.packed.attend(layer.core, q, k, v)


def make_budgeted_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of a layer's pages under its budget, when vLLM sizes them; `spec` itself for other kinds of layers.

    vLLM does not say which layer it asks for, and asks twice for some: the layer is a variable of one of its functions.
    """
    if isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
        for variables in iterate_callers():
            for module in variables.values():
                layer = getattr(module, "impl", None) if isinstance(module, nn.Module) else None
                if isinstance(layer, BudgetedAttention):
                    return layer.worker.spec(layer, spec)
        raise KVPatchError("kvpatch did not find the layer whose pages vLLM asks for: leave kvpatch's settings out.")
    return spec


def _list_layers(config: VllmConfig) -> list[Any]:
    """Return the attention layers of vLLM that have been made under this configuration so far."""
    return [layer for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]


def _refuse_kind(attn_type: str, shares: bool, kv_cache_dtype: str) -> None:
    """Raise KVPatchError for a layer that no budget can serve; `BudgetedAttention` calls it when it is made.

    attn_type: only a decoder's is served. shares: the layer uses another's keys. kv_cache_dtype: only "auto", the model's.
    """
    refused = (
        (attn_type != AttentionType.DECODER, f"attention of the kind {attn_type!r} in vLLM: start without its settings."),
        (shares, "layers that share keys in vLLM: start without its settings."),
        (
            kv_cache_dtype != "auto",
            f"{kv_cache_dtype} keys in vLLM, since it reads and writes pages in the model's own type: leave kv_cache_dtype "
            "(--kv-cache-dtype) out, or kvpatch's settings.",
        ),
    )
    for applies, what in refused:
        if applies:
            raise KVPatchError(f"kvpatch does not serve {what}")
